"""Layouts as drawings without crossings: what is found is a layout, and dissections of a rectangle are found again."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.layout.instances import Kind, instance
from benchmarks.layout.unseen import unseen
from forebay.buffers import Buffer, BufferSet
from forebay.planners.layout.dissections import drawn, edges_of, moments_of
from forebay.planners.layout.drawings import Drawings
from forebay.planners.layout.table import Table, parts_of
from tests.null.layouts.making import buffer_tuples, expect_found, expect_within, none_yet


def drawings_on(table: Table, capacity: int) -> Drawings:
    """A search that knows of no layout."""
    return Drawings(table, none_yet(table), capacity)


@settings(max_examples=100, deadline=None)
@given(buffers=buffer_tuples(6), more=st.integers(0, 6))
def test_what_is_found_is_within_the_capacity(buffers: tuple[Buffer, ...], more: int) -> None:
    expect_within(drawings_on, buffers, more, turns=20)


@pytest.mark.parametrize("pinwheel", [0.0, 0.3])
@pytest.mark.parametrize("seed", range(3))
def test_what_was_cut_from_a_rectangle_is_put_together_again(seed: int, pinwheel: float) -> None:
    given = instance(seed, Kind(count=60, through=2, pinwheel=pinwheel, slack=0.0))
    expect_found(drawings_on, given, "drawing", turns=100)


@pytest.mark.parametrize("seed", [1000, 1003])
def test_memory_that_is_free_for_a_while_is_a_piece_too(seed: int) -> None:
    """Half of the time every byte is in use, and at the others stripes have not begun yet, or are gone."""
    expect_found(drawings_on, unseen("few-long", seed), "drawing", turns=100)


def test_five_around_a_middle_are_no_straight_cuts() -> None:
    lives = ((0, 6, 3), (6, 9, 7), (3, 9, 3), (0, 3, 7), (3, 6, 4))
    pieces = tuple(Buffer(str(n), *life) for n, life in enumerate(lives))
    expect_found(drawings_on, BufferSet(pieces, 10), "drawing", turns=1)


def test_where_bytes_balance_in_several_ways_all_are_listed() -> None:
    """Two of one size go, and two come: at one segment, or at two, in either of two ways."""
    table = Table.of([Buffer("a", 0, 1, 5), Buffer("b", 0, 1, 5), Buffer("c", 1, 2, 5), Buffer("d", 1, 2, 5)])
    (moment,) = moments_of(edges_of(table, 10))
    shared = {frozenset(way) for way in moment.ways}
    one = frozenset({((0, 1), (2, 3))})
    assert shared == {one, frozenset({((0,), (2,)), ((1,), (3,))}), frozenset({((0,), (3,)), ((1,), (2,))})}
    assert all(drawn(edges_of(table, 10), [(moment.time, way)]) for way in moment.ways)


@settings(max_examples=100, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 6), min_size=2, max_size=8),
    others=st.lists(st.integers(1, 6), min_size=1, max_size=8),
)
def test_the_ways_to_share_are_those_that_balance(sizes: list[int], others: list[int]) -> None:
    """Against all pairs of a part of those that go and a part of those that come."""
    capacity = max(sum(sizes), sum(others))
    went = [Buffer(f"went {n}", 0, 1, size) for n, size in enumerate(sizes)]
    came = [Buffer(f"came {n}", 1, 2, size) for n, size in enumerate(others)]
    edges = edges_of(Table.of([*went, *came]), capacity)
    (moment,) = moments_of(edges)
    ends = [n for n, edge in enumerate(edges) if edge.upper == 1]
    begins = [n for n, edge in enumerate(edges) if edge.lower == 1]
    for way in moment.ways:
        assert sorted(n for ended, _ in way for n in ended) == ends
        assert sorted(n for _, begun in way for n in begun) == begins
        for ended, begun in way:
            assert sum(edges[n].size for n in ended) == sum(edges[n].size for n in begun)
    pairs = sum(
        sum(edges[n].size for n in some) == sum(edges[n].size for n in more)
        for count in range(1, len(ends))
        for some in combinations(ends[1:], count)
        for length in range(1, len(begins))
        for more in combinations(begins, length)
    )
    assert sum(len(way) == 2 for way in moment.ways) == min(pairs, 59)


def test_sets_that_are_hardly_ever_full_are_left_to_others() -> None:
    given = unseen("loose", 1000)
    assert given.capacity is not None
    (part, *_) = parts_of(Table.of(given.buffers))
    search = drawings_on(part, given.capacity)
    for _ in range(3):
        search.advance()
    assert search.best.by == "none yet"
