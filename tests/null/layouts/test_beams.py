"""Many partial layouts at a time: what is found is a layout within what was asked for, and time to compile is free."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.layout.instances import Kind, instance
from forebay.buffers import Addresses, Buffer, BufferSet
from forebay.checking.addresses import check_addresses
from forebay.planners.layout.aim import Aim, Deadline, Found
from forebay.planners.layout.beams import Beams
from forebay.planners.layout.exact import task_of
from forebay.planners.layout.table import Table, parts_of
from tests.null.layouts.making import buffer_tuples, least_height

NEVER = Deadline(3600.0)


def beams_on(table: Table, capacity: int | None) -> Beams:
    """A search that knows of no layout below 2^40 bytes."""
    none_yet = Found(np.zeros(len(table), np.int64), 1 << 40, "none yet")
    return Beams(table, task_of(table), none_yet, Aim(table.peak, capacity, NEVER, NEVER))


@settings(max_examples=12, deadline=None)
@given(buffers=buffer_tuples(6, alignments=(1, 1, 4)), more=st.integers(0, 6))
def test_what_is_found_is_within_the_capacity_and_so_few_are_all_seen(buffers: tuple[Buffer, ...], more: int) -> None:
    for part in parts_of(Table.of(buffers)):
        rows = tuple(buffers[number] for number in part.number)
        least = least_height(rows)
        capacity = max(part.peak, least - 1 + more)
        search = beams_on(part, capacity)
        for _ in range(2):
            search.advance()
        found = search.best
        if capacity < least:
            assert found.by == "none yet"
            continue
        # Of 6 buffers no partial layout has ever to be forgotten.
        assert found.height <= capacity
        check_addresses(Addresses(BufferSet(rows, capacity), tuple(found.offsets.tolist()), "", False, 0.0))


@pytest.mark.parametrize("seed", [0, 2])
def test_a_tight_instance_is_found(seed: int) -> None:
    given = instance(seed, Kind(count=60))
    assert given.capacity is not None
    (part,) = parts_of(Table.of(given.buffers))
    search = beams_on(part, given.capacity)
    for _ in range(60):
        search.advance()
        if search.best.height <= given.capacity:
            break
    offsets = np.zeros(len(given.buffers), np.int64)
    offsets[part.number] = search.best.offsets
    found = Addresses(given, tuple(offsets.tolist()), "", False, 0.0)
    check_addresses(found)
    assert found.feasible


def test_time_that_is_spent_on_compiling_does_not_count() -> None:
    aim = Aim(0, None, Deadline(0.2), Deadline(0.2))
    with aim.untimed():
        time.sleep(0.3)
    assert not aim.deadline.over and not aim.polish.over and aim.deadline.spent < 0.2
    time.sleep(0.21)
    assert aim.deadline.over and aim.polish.over
