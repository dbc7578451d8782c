"""The search that learns from conflicts, beside trying everything."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from forebay.planners.layout.conflicts import Choice, Conflicts


def solved(options: Sequence[int], conflicts: Sequence[frozenset[Choice]]) -> tuple[tuple[Choice, ...] | None, int]:
    """What is found where each of ``conflicts`` is not possible together, and after how many tests."""
    search = Conflicts(options, lambda choices: not any(one <= set(choices) for one in conflicts)).solve()
    tests = 0
    while True:
        try:
            next(search)
        except StopIteration as over:
            return over.value, tests
        tests += 1


@st.composite
def questions(draw: st.DrawFn) -> tuple[list[int], list[frozenset[Choice]]]:
    options = draw(st.lists(st.integers(1, 3), max_size=5))
    choices = [(variable, option) for variable, count in enumerate(options) for option in range(count)]
    if not choices:
        return options, []
    some = st.frozensets(st.sampled_from(choices), min_size=1, max_size=4)
    return options, draw(st.lists(some, max_size=25))


@given(questions())
def test_what_is_found_is_possible_and_what_is_possible_is_found(
    question: tuple[list[int], list[frozenset[Choice]]],
) -> None:
    options, conflicts = question
    found, _ = solved(options, conflicts)
    every = [tuple(enumerate(one)) for one in product(*map(range, options))]
    possible = {frozenset(one) for one in every if not any(conflict <= set(one) for conflict in conflicts)}
    assert frozenset(found) in possible if found is not None else not possible


def test_where_nothing_conflicts_the_first_options_are_chosen_by_one_test_each() -> None:
    assert solved([3, 1, 2], []) == (((1, 0), (2, 0), (0, 0)), 3)


def test_who_is_not_to_blame_is_not_tried_again() -> None:
    """Twenty variables between the one that is to blame and the one that is left without an option have nothing to do
    with it: who only ever takes back the latest choice comes to the first one after 2^20 of them."""
    last = 21
    found, tests = solved([2, *[2] * 20, 3], [frozenset({(0, 0), (last, option)}) for option in range(3)])
    assert found is not None
    assert (0, 1) in found
    assert tests < 200
