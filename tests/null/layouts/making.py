"""Buffers for tests, the least height that any layout of a few of them has, and what is expected of a search."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations

import numpy as np
from hypothesis import strategies as st

from forebay.buffers import Addresses, Buffer, BufferSet
from forebay.checking.addresses import check_addresses
from forebay.planners.layout.aim import Found
from forebay.planners.layout.table import Column, Table, parts_of
from forebay.planners.layout.turns import Improver

__all__ = ["buffer_tuples", "expect_found", "expect_within", "least_height", "none_yet"]

SearchOn = Callable[[Table, int], Improver]
"""Makes a search for a layout of a table within so many bytes, which knows of ``none_yet``."""


@st.composite
def buffer_tuples(draw: st.DrawFn, most: int = 30, alignments: tuple[int, ...] = (1,)) -> tuple[Buffer, ...]:
    """Up to ``most`` buffers whose lives often touch, of sizes that often repeat."""
    count = draw(st.integers(0, most))
    made = []
    for number in range(count):
        start = draw(st.integers(0, 12))
        life, size = draw(st.integers(1, 8)), draw(st.integers(0, 9))
        made.append(Buffer(f"b{number}", start, start + life, size, draw(st.sampled_from(alignments))))
    return tuple(made)


def least_height(buffers: tuple[Buffer, ...]) -> int:
    """By trying every order: in one of them, placing each buffer on top of those that are live together with it is as
    low as anything."""
    best = sum(one.size + one.alignment for one in buffers)
    for order in permutations(buffers):
        placed: list[tuple[Buffer, int]] = []
        for one in order:
            under = [at + other.size for other, at in placed if other.lower < one.upper and one.lower < other.upper]
            top = max(under, default=0)
            placed.append((one, -(-top // one.alignment) * one.alignment))
        best = min(best, max((at + one.size for one, at in placed if one.size), default=0))
    return best


def none_yet(table: Table) -> Found:
    """In the place of a layout: 2^40 bytes."""
    return Found(np.zeros(len(table), np.int64), 1 << 40, "none yet")


def expect_within(search_on: SearchOn, buffers: tuple[Buffer, ...], more: int, *, turns: int = 1) -> None:
    """Whatever is found of each part of a few ``buffers`` is a layout within a capacity of one byte below the least
    height, and ``more``; below the least nothing is."""
    for part in parts_of(Table.of(buffers)):
        rows = tuple(buffers[number] for number in part.number)
        least = least_height(rows)
        capacity = max(part.peak, least - 1 + more)
        found = _advanced(search_on(part, capacity), capacity, turns)
        if capacity < least:
            assert found.by == "none yet"
        elif found.by != "none yet":
            assert found.height <= capacity
            _expect_layout(BufferSet(rows, capacity), found.offsets)


def expect_found(search_on: SearchOn, given: BufferSet, by: str, *, turns: int) -> None:
    """Every part of ``given`` is found within its capacity, in so many turns at most."""
    assert given.capacity is not None
    offsets = np.zeros(len(given.buffers), np.int64)
    for part in parts_of(Table.of(given.buffers)):
        found = _advanced(search_on(part, given.capacity), given.capacity, turns)
        assert found.by == by
        offsets[part.number] = found.offsets
    _expect_layout(given, offsets)


def _advanced(search: Improver, capacity: int, turns: int) -> Found:
    for _ in range(turns):
        search.advance()
        if search.best.height <= capacity:
            break
    return search.best


def _expect_layout(given: BufferSet, offsets: Column) -> None:
    check_addresses(Addresses(given, tuple(offsets.tolist()), "", False, 0.0))
