"""Local search with a pool of what is left out: what it finds is a layout, at every target, and as low as can be."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.layout.instances import Kind, instance
from forebay.buffers import Addresses, Buffer, BufferSet
from forebay.checking.addresses import check_addresses
from forebay.planners.layout.aim import Aim, Deadline
from forebay.planners.layout.greedy import stacked
from forebay.planners.layout.orders import order_by
from forebay.planners.layout.pools import Pools
from forebay.planners.layout.table import Table, parts_of
from tests.null.layouts.making import buffer_tuples, least_height

NEVER = Deadline(3600.0)


def pools_on(table: Table, capacity: int | None) -> Pools:
    """A search that begins with a skyline."""
    return Pools(table, stacked(table, order_by(table, "area"), "skyline"), Aim(table.peak, capacity, NEVER, NEVER))


@settings(max_examples=30, deadline=None)
@given(buffers=buffer_tuples(6, alignments=(1, 1, 4)), limited=st.booleans())
def test_so_few_are_laid_out_as_low_as_can_be(buffers: tuple[Buffer, ...], limited: bool) -> None:
    for part in parts_of(Table.of(buffers)):
        rows = tuple(buffers[number] for number in part.number)
        least = least_height(rows)
        search = pools_on(part, least if limited else None)
        before = search.best.height
        for _ in range(6):
            search.advance()
        found = search.best
        assert found.height <= before and (found.height == least or not limited)
        check_addresses(Addresses(BufferSet(rows), tuple(found.offsets.tolist()), "", False, 0.0))


@pytest.mark.parametrize(("count", "seed"), [(60, 1), (120, 0)])
def test_tight_instances_are_found(count: int, seed: int) -> None:
    given = instance(seed, Kind(count=count))
    assert given.capacity is not None
    (part,) = parts_of(Table.of(given.buffers))
    search = pools_on(part, given.capacity)
    for _ in range(200):
        search.advance()
        if search.best.height <= given.capacity:
            break
    assert search.best.height <= given.capacity
    offsets = np.zeros(len(given.buffers), np.int64)
    offsets[part.number] = search.best.offsets
    check_addresses(Addresses(given, tuple(offsets.tolist()), "", False, 0.0))
