"""Every planner of addresses: valid whatever the buffers, never below the bound; the exact one against all orders."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import final

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.layout.instances import Kind, instance, random_buffers
from benchmarks.layout.unseen import unseen
from forebay.buffers import Addresses, Buffer, BufferSet
from forebay.checking.addresses import check_addresses
from forebay.errors import ConfigError
from forebay.planners.layout import LAYOUTS, lay_out
from forebay.planners.layout.aim import NEGLIGIBLE, Aim, Deadline, Found
from forebay.planners.layout.exact import Search, task_of
from forebay.planners.layout.fits import BEST, FIRST
from forebay.planners.layout.greedy import fitted, flowed
from forebay.planners.layout.orders import LARGEST, ORDERS, PREORDERS, order_by
from forebay.planners.layout.placing import Outcome
from forebay.planners.layout.table import Table, parts_of
from forebay.planners.layout.turns import Turns
from tests.null.layouts.making import buffer_tuples, least_height


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@settings(max_examples=25, deadline=None)
@given(buffers=buffer_tuples(alignments=(1, 1, 4)), room=st.none() | st.integers(0, 60))
def test_layouts_are_valid(layout: str, buffers: tuple[Buffer, ...], room: int | None) -> None:
    found = lay_out(BufferSet(buffers, room), layout, seconds=0.02)
    check_addresses(found)
    assert (
        found.height
        >= found.lower_bound
        == max((sum(b.size for b in buffers if b.lower <= time < b.upper) for time in range(20)), default=0)
    )
    assert found.feasible is (room is None or found.height <= room)


@settings(max_examples=40, deadline=None)
@given(
    buffers=buffer_tuples(6, alignments=(1, 1, 4)),
    order=st.sampled_from(sorted({**ORDERS, **PREORDERS})),
    fullest=st.booleans(),
)
def test_the_exact_search_finds_the_least_height_and_nothing_below(
    buffers: tuple[Buffer, ...], order: str, fullest: bool
) -> None:
    least = least_height(buffers)
    for room, fits in ((least, True), (least - 1, False)):
        found = []
        for part in parts_of(Table.of(buffers)):
            search = Search(part, task_of(part)._replace(fullest=fullest), room, order_by(part, order))
            found.append(search.advance(10**6))
            if found[-1] is Outcome.FOUND:
                assert int((search.offsets + part.size).max()) <= room
        assert all(outcome is Outcome.FOUND for outcome in found) is (fits or not found)
        assert Outcome.PAUSED not in found


@settings(max_examples=10, deadline=None)
@given(buffers=buffer_tuples(9), pieces=st.integers(1, 5))
def test_a_search_that_is_stopped_goes_on_where_it_was(buffers: tuple[Buffer, ...], pieces: int) -> None:
    for part in parts_of(Table.of(buffers)):
        order = order_by(part, "area")
        whole, halting = (Search(part, task_of(part), part.peak, order) for _ in range(2))
        expected = whole.advance(10**6)
        while (outcome := halting.advance(pieces)) is Outcome.PAUSED:
            pass
        assert (outcome, halting.nodes) == (expected, whole.nodes)
        assert (halting.offsets == whole.offsets).all()


def test_what_does_not_fit_is_proven() -> None:
    # Both begin at a multiple of 4, so that a byte between them is nobody's.
    pair = (Buffer("a", 0, 2, 3, alignment=4), Buffer("b", 1, 3, 3, alignment=4))
    assert (BufferSet(pair).lower_bound, least_height(pair)) == (6, 7)
    refused = lay_out(BufferSet(pair, 6), seconds=20)
    assert (refused.feasible, refused.proven) == (False, True)
    assert lay_out(BufferSet(pair, 7), seconds=20).feasible
    below = lay_out(BufferSet(pair, 5))
    assert (below.feasible, below.proven) == (False, True)


def test_preorders_count_lives_in_the_time_that_is_given() -> None:
    # By ranks of time a lives longest (4 to 1 and 1), though it is over when the others have hardly begun.
    times = (Buffer("a", 0, 4, 1), Buffer("b", 4, 90, 1), Buffer("c", 90, 100, 2))
    ticks = tuple(Buffer(f"t{at}", at, at + 1, 1) for at in range(4))
    table = Table.of(times + ticks)
    assert order_by(table, "longest")[:3].tolist() == [1, 2, 0]
    assert order_by(table, "length")[0] == 0
    halved = table.rows(np.arange(1, len(table)))
    assert order_by(halved, "longest")[:2].tolist() == [0, 1]


@final
class _Never:
    """A search that is not to have a turn."""

    best = Found(np.zeros(0, np.int64), 1 << 60, "nothing yet")

    def advance(self) -> None:
        raise AssertionError("the preorders were to find it")


@pytest.mark.parametrize(("style", "seed"), [("straight", 3001), ("full", 3001), ("equal", 3001)])
def test_what_a_preorder_finds_in_a_few_nodes_is_found_before_any_other_search_begins(style: str, seed: int) -> None:
    given = unseen(style, seed)
    table, never = Table.of(given.buffers), Deadline(3600.0)
    aim = Aim(table.peak, given.capacity, Deadline(0.0), never)
    found = Turns(table, aim, _Never.best, (_Never(),)).advance(aim)
    assert int((found.offsets + table.size).max()) == found.height <= given.capacity  # type: ignore[operator]


@pytest.mark.parametrize("seed", range(3))
def test_a_tight_instance_is_laid_out_at_its_capacity(seed: int) -> None:
    given = instance(seed, Kind(count=60))
    found = lay_out(given, seconds=30)
    check_addresses(found)
    assert found.feasible, (found.height, found.lower_bound)


@pytest.mark.parametrize(("over", "ends"), [(0, True), (10, True), (11, False)])
def test_without_a_capacity_a_search_ends_where_what_is_left_is_negligible(over: int, ends: bool) -> None:
    never = Deadline(3600.0)
    assert NEGLIGIBLE * 100_000 == 10
    assert Aim(100_000, None, never, never).met(100_000 + over) is ends
    # Where there is one, what does not fit into it is never near enough.
    assert not Aim(100_000, 100_000, never, never).met(100_000 + max(over, 1))


def test_a_search_does_not_spend_its_time_on_what_is_negligible() -> None:
    # The second begins at a multiple of 2, so that one byte of 40,003 is nobody's: no layout reaches the bound.
    pair = (Buffer("a", 0, 2, 20_001, alignment=2), Buffer("b", 1, 3, 20_001, alignment=2))
    found = lay_out(BufferSet(pair), seconds=60)
    assert (found.height, found.lower_bound, found.proven) == (40_003, 40_002, False)
    assert found.solve_seconds < 30


def test_many_buffers_come_within_one_percent_of_the_bound() -> None:
    given = random_buffers(3000, seed=1)
    found = lay_out(given, seconds=5)
    check_addresses(found)
    assert found.gap <= 0.01


def test_instances_fit_as_they_were_cut() -> None:
    # What is cut from a rectangle is never more than the rectangle, and most of it is there.
    for seed in range(5):
        given = instance(seed, Kind(count=200))
        assert 0.9 * given.capacity <= given.lower_bound <= given.capacity  # type: ignore[operator]
        assert 150 <= len(given.buffers) <= 220
    full = instance(7, Kind(count=60, slack=0.0))
    times = sorted({b.lower for b in full.buffers})
    assert {sum(b.size for b in full.buffers if b.lower <= at < b.upper) for at in times} == {full.capacity}


def test_misuse_is_refused() -> None:
    for layout, seconds in (("worst-fit", 1.0), ("arena", 0.0), ("arena", float("nan"))):
        with pytest.raises(ConfigError):
            lay_out(BufferSet(()), layout, seconds)
    for wrong in ({"lower": 3}, {"size": -1}, {"alignment": 0}, {"size": 1 << 60}):
        with pytest.raises(ConfigError, match="buffer b"):
            Buffer(**({"id": "b", "lower": 0, "upper": 3, "size": 1} | wrong))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="id of its own"):
        BufferSet((Buffer("b", 0, 1, 1), Buffer("b", 1, 2, 1)))
    assert lay_out(BufferSet(())).height == 0


@settings(max_examples=40, deadline=None)
@given(buffers=buffer_tuples(alignments=(1, 1, 4)))
def test_as_time_goes(buffers: tuple[Buffer, ...]) -> None:
    offsets = np.zeros(len(buffers), np.int64)
    for part in parts_of(Table.of(buffers)):
        found = flowed(part)
        assert found.height == int((found.offsets + part.size).max())
        offsets[part.number] = found.offsets
    check_addresses(Addresses(BufferSet(buffers), tuple(offsets.tolist()), "", False, 0.0))


@pytest.mark.parametrize("layout", ["arena", "best-fit"])
def test_what_is_too_much_to_search_is_placed_as_time_goes(layout: str) -> None:
    given = random_buffers(100_000, seed=0)
    start = time.process_time()
    found = lay_out(given, layout, seconds=1.0)
    assert time.process_time() - start < 20
    check_addresses(found)
    assert "as time goes" in found.found_by and found.gap < 0.5


def test_of_many_buffers_the_largest_go_first_and_the_others_fill_their_gaps() -> None:
    def gap(table: Table, names: Iterable[str]) -> float:
        heights = [fitted(table, order_by(table, name), "", best).height for name in names for best in (BEST, FIRST)]
        return min(heights) / table.peak - 1

    tables = [Table.of(random_buffers(4000, seed=seed, times=400).buffers) for seed in range(1, 5)]
    gaps, others = ([gap(table, names) for table in tables] for names in (LARGEST, ORDERS))
    assert sum(gaps) / 4 <= 0.01
    assert sum(gaps) < 0.7 * sum(others)
