"""Buffers as columns, and the parts of time in which they lie. No torch.

Times are replaced by their ranks. A *part* is a set of buffers whose lives hang together: at no time is a buffer of one
part live together with one of another, so every part has the whole memory for itself. A *section* is a time at which
no further buffer can be added to those that are live: a maximal clique of the interval graph. What holds at all
sections holds at all times, and every buffer is live in consecutive ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd
from typing import NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from forebay.buffers import Buffer

__all__ = ["Column", "Lives", "Table", "parts_of"]

Column = NDArray[np.int64]


class Lives(NamedTuple):
    """What compiled code reads of buffers: from when and up to when each is live, its bytes, and of what its address is
    to be a multiple."""

    lower: Column
    upper: Column
    size: Column
    alignment: Column


@final
@dataclass(frozen=True, eq=False)
class Table:
    """Some buffers, one in a row: the ranks of the times from which and up to which each is live, its bytes, of what
    its address is to be a multiple, and its ``life`` in the time that it was given in. ``number`` is its place among
    all buffers that were asked about."""

    number: Column
    lower: Column
    upper: Column
    size: Column
    alignment: Column
    life: Column

    @classmethod
    def of(cls, buffers: Sequence[Buffer]) -> Table:
        """Those of ``buffers`` that have a size: an address for the others is never wrong."""
        rows = [
            (number, one.lower, one.upper, one.size, one.alignment)
            for number, one in enumerate(buffers)
            if one.size > 0
        ]
        columns = np.array(rows, dtype=np.int64).reshape(-1, 5)
        number, lower, upper, size, alignment = (np.ascontiguousarray(column) for column in columns.T)
        times = np.unique(np.concatenate([lower, upper]))
        return cls(number, np.searchsorted(times, lower), np.searchsorted(times, upper), size, alignment, upper - lower)

    def __len__(self) -> int:
        return len(self.number)

    def rows(self, chosen: NDArray[np.int64] | NDArray[np.bool_]) -> Table:
        """The rows ``chosen``, by their places or as a mask."""
        columns = (self.number, self.lower, self.upper, self.size, self.alignment, self.life)
        return Table(*(column[chosen] for column in columns))

    @property
    def lives(self) -> Lives:
        """The columns that compiled code reads."""
        return Lives(self.lower, self.upper, self.size, self.alignment)

    @property
    def length(self) -> Column:
        """Of each buffer the ranks of time that it is live for."""
        return self.upper - self.lower

    @cached_property
    def unit(self) -> int:
        """The most bytes of which all sizes are multiples."""
        return gcd(*self.size.tolist())

    @property
    def aligned(self) -> bool:
        """Whether any sum of sizes is an address that is as well aligned as all have to be."""
        return not np.any(self.unit % self.alignment)

    @cached_property
    def live(self) -> Column:
        """Bytes that are live from each rank of time up to the next."""
        change = np.zeros(int(self.upper.max(initial=0)) + 1, np.int64)
        np.add.at(change, self.lower, self.size)
        np.subtract.at(change, self.upper, self.size)
        return np.cumsum(change)

    @property
    def peak(self) -> int:
        """The most bytes that are live at one time: no layout takes less."""
        return int(self.live.max(initial=0))

    @cached_property
    def pressure(self) -> Column:
        """Of each buffer the most bytes that are live, itself counted, at a time at which it is."""
        return _most(self.live, self.lower, self.upper)

    @cached_property
    def sections(self) -> tuple[Column, Column]:
        """Of each buffer the first of the sections that it is live in, and the one after the last."""
        # A section ends where a buffer goes after one has come: nobody who comes later meets all who are there.
        ends = np.unique(self.upper)
        begins = np.unique(self.lower)
        before = np.searchsorted(begins, ends, side="left")  # how many starts lie before each end
        new = np.diff(before, prepend=0) > 0
        closing = ends[new]  # the time at which each section closes
        first = np.searchsorted(closing, self.lower, side="right")
        last = np.searchsorted(closing, self.upper, side="right")
        return first.astype(np.int64), last.astype(np.int64)


def parts_of(table: Table) -> list[Table]:
    """The parts of ``table``, in the order of time."""
    if not len(table):
        return []
    order = np.argsort(table.lower, kind="stable")
    reached = np.maximum.accumulate(table.upper[order])
    cuts = np.flatnonzero(table.lower[order][1:] >= reached[:-1]) + 1
    return [table.rows(np.sort(rows)) for rows in np.split(order, cuts)]


def _most(column: Column, first: Column, end: Column) -> Column:
    """Of each stretch from ``first`` up to ``end``, of one place at least, the largest number of ``column``.

    Of all stretches of 1, 2, 4, ... places the largest is made once; two of them, which may lie over each other, cover
    any stretch."""
    found, length, span = np.zeros(len(first), np.int64), end - first, 1
    while span <= length.max(initial=0):
        rows = np.flatnonzero((span <= length) & (length < 2 * span))
        found[rows] = np.maximum(column[first[rows]], column[end[rows] - span])
        column = np.maximum(column[:-span], column[span:])
        span *= 2
    return found
