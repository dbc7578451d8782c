"""Searches on joined buffers: what they find is a layout, and they find what the others do not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.layout.instances import Kind, instance
from forebay.buffers import Addresses, Buffer, BufferSet
from forebay.checking.addresses import check_addresses
from forebay.planners.layout import multilevel
from forebay.planners.layout.aim import Deadline, Found
from forebay.planners.layout.draws import sown
from forebay.planners.layout.joining import Blocks, Taste, join
from forebay.planners.layout.multilevel import TRIES, Multilevel
from forebay.planners.layout.table import Column, Table, parts_of
from tests.null.layouts.making import buffer_tuples, least_height

LATER = Deadline(1e6)


def none_yet(table: Table) -> Found:
    return Found(np.zeros(len(table), np.int64), 1 << 60, "none yet")


@settings(max_examples=30, deadline=None)
@given(buffers=buffer_tuples(6), more=st.integers(0, 6))
def test_what_is_found_is_within_the_capacity(buffers: tuple[Buffer, ...], more: int) -> None:
    for part in parts_of(Table.of(buffers)):
        rows = tuple(buffers[number] for number in part.number)
        capacity = max(part.peak, least_height(rows) - 1 + more)
        search = Multilevel(part, none_yet(part), capacity, LATER)
        search.advance()
        if search.best.by != "none yet":
            assert search.best.height <= capacity
            check_addresses(Addresses(BufferSet(rows, capacity), tuple(search.best.offsets.tolist()), "", False, 0.0))


def test_blocks_of_what_has_no_other_place_are_joined_first() -> None:
    # Two lanes of equal bytes, each with one after the other, and a lane that nothing fills up.
    start, stop = [0, 2, 0, 3, 1], [2, 5, 3, 5, 2]
    size = [4, 4, 2, 2, 1]
    blocks = blocks_of(start, stop, size)
    room = np.array([1, 0, 1, 1, 1], np.int64)
    made = join(blocks, 5, room, 3, Taste(1, 0.0, 30.0, 0.0), sown())
    assert made == 7 and blocks.whole[:7].tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert sorted(zip(blocks.lower[5:7].tolist(), blocks.upper[5:7].tolist(), strict=True)) == [(0, 1), (2, 3)]
    assert not blocks.stacked[5:7].any() and blocks.size[5:7].tolist() == [4, 2]
    assert room.tolist() == [1, 0, 1, 1, 1]  # nothing is wasted


def test_no_section_wastes_more_than_it_has_room() -> None:
    room = np.array([0, 1], np.int64)
    # One on the other would waste 3 bytes in the second section; nothing is joined.
    assert join(blocks_of([0, 0], [2, 1], [4, 3]), 2, room, 1, Taste(1, 0.0, 11.0, 0.0), sown()) == 2
    room[1] = 3
    assert join(blocks_of([0, 0], [2, 1], [4, 3]), 2, room, 1, Taste(1, 0.0, 11.0, 0.0), sown()) == 3
    assert room.tolist() == [0, 0]


def blocks_of(start: list[int], stop: list[int], size: list[int]) -> Blocks:
    count = len(size)
    columns = [np.array([*column, *([0] * count)], np.int64) for column in (start, stop, size)]
    minus = np.full(2 * count, -1, np.int64)
    whole = np.array([1] * count + [0] * count, np.uint8)
    return Blocks(*columns, minus, minus.copy(), np.zeros(2 * count, np.uint8), whole)


@pytest.mark.parametrize(("count", "seed"), [(120, 0), (160, 0)])
def test_tight_instances_are_found(count: int, seed: int) -> None:
    given = instance(seed, Kind(count=count))
    assert given.capacity is not None
    (part,) = parts_of(Table.of(given.buffers))
    search = Multilevel(part, none_yet(part), given.capacity, LATER)
    for _ in range(300):
        search.advance()
        if search.best.height <= given.capacity:
            break
    offsets: Column = np.zeros(len(given.buffers), np.int64)
    offsets[part.number] = search.best.offsets
    found = Addresses(given, tuple(offsets.tolist()), "", False, 0.0)
    check_addresses(found)
    assert found.feasible


@pytest.mark.parametrize(("deadline", "tries"), [(LATER, TRIES), (Deadline(0), 1)])
def test_a_turn_ends_with_the_time(deadline: Deadline, tries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def counted(*given: Any) -> int:
        made.append(join(*given))
        return made[-1]

    monkeypatch.setattr(multilevel, "join", counted)
    given = instance(0, Kind(count=40))
    (part,) = parts_of(Table.of(given.buffers))
    search = Multilevel(part, none_yet(part), part.peak - 1, deadline)  # there is none
    search.advance()
    assert len(made) == tries and search.best.by == "none yet"
