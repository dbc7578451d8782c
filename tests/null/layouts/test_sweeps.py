"""Searches through time: what is found is a layout within what was asked for, and aligned."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.layout.unseen import unseen
from forebay.buffers import Buffer
from forebay.planners.layout.sweeping import Course, look_ahead, room_for_needs
from forebay.planners.layout.sweeps import AHEAD, Sweeps
from forebay.planners.layout.table import Table, parts_of
from tests.null.layouts.making import buffer_tuples, expect_found, expect_within, none_yet


def sweeps_on(table: Table, capacity: int) -> Sweeps:
    """A search that knows of no layout."""
    return Sweeps(table, none_yet(table), capacity)


@settings(max_examples=60, deadline=None)
@given(buffers=buffer_tuples(6), more=st.integers(0, 6))
def test_what_is_found_is_within_the_capacity(buffers: tuple[Buffer, ...], more: int) -> None:
    expect_within(sweeps_on, buffers, more)


@pytest.mark.parametrize("seed", [1000, 1003])
def test_an_unseen_set_is_found_by_sweeps_alone(seed: int) -> None:
    expect_found(sweeps_on, unseen("loose", seed), "sweep", turns=300)


def test_alignment_is_that_of_all_sizes_below_an_odd_capacity() -> None:
    """The wall above is where the last whole unit ends: what touches it is aligned."""
    buffers = tuple(Buffer(str(n), n, n + 3, 64 * (1 + n % 3), alignment=64) for n in range(20))
    (part,) = parts_of(Table.of(buffers))
    search = sweeps_on(part, part.peak + 127)
    search.advance()
    assert search.best.height <= part.peak + 127
    assert not (search.best.offsets % 64).any()


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    lives=st.lists(st.integers(1, 4), min_size=8, max_size=8),
    placed=st.integers(1, 8),
)
def test_what_those_in_wait_need_is_every_sum_of_their_sizes(sizes: list[int], lives: list[int], placed: int) -> None:
    """Buffer n comes in section n."""
    count, capacity = len(sizes), 20
    placed = min(placed, count)
    start = np.arange(count)
    stop = start + np.array(lives[:count])
    course = Course(start, stop, np.array(sizes), np.arange(count), capacity)
    needs = room_for_needs(AHEAD)
    look_ahead(course, placed, needs)
    for ahead in range(AHEAD):
        at = placed - 1 + ahead
        waiting = [sizes[n] for n in range(placed, count) if start[n] <= at < stop[n]]
        sums = {0}
        for size in waiting:
            sums |= {one + size for one in sums if one + size <= capacity}
        assert needs.nbytes[ahead] == sum(waiting)
        assert needs.most[ahead] == max(waiting, default=0)
        assert needs.sums[ahead, : needs.known[ahead]].tolist() == sorted(sums)
