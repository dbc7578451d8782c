"""Orders of what is live when memory is fullest."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.layout.instances import random_buffers
from forebay.buffers import Addresses, Buffer, BufferSet
from forebay.checking.addresses import check_addresses
from forebay.planners.layout.aim import Found
from forebay.planners.layout.cores import Cores
from forebay.planners.layout.fits import BEST, FIRST
from forebay.planners.layout.greedy import fitted, fitted_below
from forebay.planners.layout.orders import LARGEST, order_by
from forebay.planners.layout.table import Table
from tests.null.layouts.making import buffer_tuples


def _check(buffers: tuple[Buffer, ...], table: Table, found: Found) -> None:
    assert found.height == int((found.offsets + table.size).max())
    offsets = np.zeros(len(buffers), np.int64)
    offsets[table.number] = found.offsets
    check_addresses(Addresses(BufferSet(buffers), tuple(offsets.tolist()), "", False, 0.0))


def test_orders_of_the_core_are_lower_than_the_same_orders_of_all_buffers() -> None:
    buffers = random_buffers(4000, seed=5, times=400).buffers
    table = Table.of(buffers)
    greedy = [fitted(table, order_by(table, name), name, best) for name in LARGEST for best in (BEST, FIRST)]
    lowest = min(one.height for one in greedy)
    search = Cores(table, greedy[0])
    heights = []
    for _ in range(25):
        search.advance()
        heights.append(search.best.height)
    assert heights == sorted(heights, reverse=True)
    assert heights[-1] - table.peak < 0.5 * (lowest - table.peak)
    _check(buffers, table, search.best)


@pytest.mark.parametrize("seed", [1, 2, 3, 11])
def test_lives_in_the_fullest_times_lead_to_the_bound(seed: int) -> None:
    buffers = random_buffers(4000, seed=seed, times=400).buffers
    table = Table.of(buffers)
    search = Cores(table, fitted(table, order_by(table, "length"), ""))
    for _ in range(25):
        search.advance()
    assert search.best.height <= 1.001 * table.peak  # with whole lives 1.0020, 1.0015, 1.0134 and 1.0021
    _check(buffers, table, search.best)


@settings(max_examples=30, deadline=None)
@given(buffer_tuples(alignments=(1, 1, 4)), st.integers(1, 4))
def test_cores_of_any_size(buffers: tuple[Buffer, ...], turns: int) -> None:
    table = Table.of(buffers)
    if not len(table):
        return
    first = fitted(table, order_by(table, "time"), "")
    search = Cores(table, first)
    for _ in range(turns):
        search.advance()
    assert search.best.height <= first.height
    _check(buffers, table, search.best)


def test_a_layout_is_given_up_as_soon_as_it_is_no_lower_than_another() -> None:
    table = Table.of(random_buffers(300, seed=2, times=40).buffers)
    order = order_by(table, "area")
    found = fitted(table, order, "")
    again = fitted_below(table, order, "", found.height + 1)
    assert again is not None and again.offsets.tolist() == found.offsets.tolist()
    assert fitted_below(table, order, "", found.height) is None


@given(buffer_tuples())
def test_pressure_is_the_most_that_is_live_in_a_life(buffers: tuple[Buffer, ...]) -> None:
    table = Table.of(buffers)
    some = [one for one in buffers if one.size > 0]
    live = {time: sum(one.size for one in some if one.lower <= time < one.upper) for time in range(30)}
    assert table.pressure.tolist() == [max(live[time] for time in range(one.lower, one.upper)) for one in some]
