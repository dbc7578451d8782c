"""The dynamic programme over a chain and branch and bound: on small random cases as good as trying everything."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_array

from forebay.planners.activations.literature import chaining
from forebay.planners.activations.literature.branching import Programme, branch_and_bound
from forebay.planners.activations.literature.chaining import Link, Step, best_chain, seconds_of

whole = st.integers(0, 6).map(float)
steps = st.builds(Step, whole, whole, whole, whole, whole)
still = st.builds(Step, whole, whole, whole)
links = st.builds(Link, whole, whole)


def tried(options: list[list[Step]], between: list[Link], room: float, rate: float) -> float | None:
    """The least seconds of all chains that fit."""
    found = [seconds_of(chain, between, room, rate) for chain in product(*options)]
    return min((seconds for seconds in found if seconds is not None), default=None)


def solved(options: list[list[Step]], between: list[Link], room: float, rate: float) -> float | None:
    places = best_chain(options, between, room, rate)
    if places is None:
        return None
    return seconds_of([own[place] for own, place in zip(options, places, strict=True)], between, room, rate)


@given(st.data(), st.integers(1, 4), st.sampled_from([steps, still]), whole.map(lambda room: 3 * room))
@settings(max_examples=40)
def test_no_chain_of_choices_is_faster(
    data: st.DataObject, count: int, step: st.SearchStrategy[Step], room: float
) -> None:
    options = [data.draw(st.lists(step, min_size=1, max_size=3)) for _ in range(count)]
    between = data.draw(st.lists(links, min_size=count, max_size=count))
    rate = data.draw(st.sampled_from([0.0, 1.0]))
    assert solved(options, between, room, rate) == tried(options, between, room, rate)


def test_a_chain_by_hand() -> None:
    """Two blocks that hold 4 bytes or take a second, and room for one of them beside the workspace of a second."""
    keep, again = Step(4, 0, 0), Step(0, 4, 1)
    between = [Link(1, 1)] * 2
    assert best_chain([[keep, again]] * 2, between, 8) == [0, 0]
    # The second one would run again beside what the first holds; the first has the room to itself.
    assert best_chain([[keep, again]] * 2, between, 7) == [1, 0]
    assert best_chain([[keep, again]] * 2, between, 4) == [1, 0]
    assert best_chain([[keep, again]] * 3, [Link(1, 1)] * 3, 7) == [1, 1, 0]
    assert best_chain([[keep, again]] * 2, between, 3) is None


def test_copies_hide_under_what_follows_and_at_the_turn_nothing_does() -> None:
    """The first block's copy hides under the second's forward and backward, the second's under nothing."""
    between = [Link(2, 3)] * 2
    away, keep = Step(0, 0, 0, 2, 3), Step(4, 0, 0)
    assert seconds_of([away, keep], between, 9) == 0
    assert seconds_of([keep, away], between, 9) == 2 + 3
    assert seconds_of([away, away], between, 9) == 2 + 3
    # While the first is on its way out, at a byte a second, it is still there: compute waits until there is room.
    assert seconds_of([away, keep], between, 4, 1.0) == 0 and seconds_of([away, keep], between, 3, 1.0) is None
    longer, between = [Step(0, 0, 0, 3, 3), keep, Step(0, 0, 0)], [Link(2, 3)] * 3
    assert seconds_of(longer, between, 4, 1.0) == 1 and seconds_of(longer, between, 5, 1.0) == 0


def test_of_too_many_states_the_best_are_near(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one state in each cell: within the bytes, and hardly slower than with all of them."""
    generator = np.random.default_rng(7)
    options = [[Step(*generator.integers(0, 9, 5).astype(float)) for _ in range(4)] for _ in range(12)]
    between = [Link(*generator.integers(0, 9, 2).astype(float)) for _ in range(12)]
    exact = solved(options, between, 40, 1.0)
    monkeypatch.setattr(chaining, "MOST", 50)
    near = solved(options, between, 40, 1.0)
    assert exact is not None and near is not None and exact <= near <= 1.2 * exact


@given(st.data(), st.integers(1, 6), st.integers(1, 3))
@settings(max_examples=30)
def test_branch_and_bound_finds_the_least(data: st.DataObject, variables: int, rows: int) -> None:
    cost = st.integers(0, 9).map(float)
    target = np.array(data.draw(st.lists(cost, min_size=variables, max_size=variables)))
    row = st.lists(st.integers(-9, 9), min_size=variables, max_size=variables)
    upper = np.array(data.draw(st.lists(row, min_size=rows, max_size=rows)), float)
    most = np.array(data.draw(st.lists(st.integers(-9, 9), min_size=rows, max_size=rows)), float)
    programme = Programme(target, csr_array(upper), most, np.ones(variables), variables)
    found = branch_and_bound(programme, lambda x: None, 10_000)
    every = [np.array(x, float) for x in product((0, 1), repeat=variables)]
    fitting = [float(target @ x) for x in every if (upper @ x <= most).all()]
    if not fitting:
        assert found is None
        return
    assert found is not None and (upper @ found.x <= most + 1e-6).all()
    assert found.value == pytest.approx(min(fitting)) and found.gap == pytest.approx(0, abs=1e-6)


def test_what_is_not_proven_has_a_gap() -> None:
    """One relaxation: what is rounded from it is an answer, and how far off it may be is said."""
    target, upper = np.array([2.0, 3.0]), csr_array(np.array([[-4.0, -5.0]]))
    programme = Programme(target, upper, np.array([-3.0]), np.ones(2), 2)
    found = branch_and_bound(programme, lambda x: np.ones(2), 1)
    assert found is not None and found.value == 5.0 and found.bound == pytest.approx(1.5)
    assert found.gap == pytest.approx(0.7)
    assert branch_and_bound(programme, lambda x: None, 1) is None
    best = branch_and_bound(programme, lambda x: np.ones(2), 9)
    assert best is not None and best.value == 2.0 and best.gap == 0.0
