"""The roots of a trace as columns, so that the lives of all of them are worked out at once. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, final

import numpy as np
from numpy.typing import NDArray

from forebay.lowering.index import TraceIndex
from forebay.memory import Kind

__all__ = ["KINDS", "Column", "Columns", "Levels", "Lives", "column"]

Column = NDArray[np.int64]

KINDS = tuple(Kind)
"""The kinds by their numbers in ``Columns.kind``."""


@final
class Columns:
    """Of every root of ``index``, in the order of ``TraceIndex.roots``: what ``Root`` says of it, its ``number``, the
    place of its ``kind`` in ``KINDS``, and whether it is ``internal`` to its visit (``TraceIndex.is_internal``)."""

    def __init__(self, index: TraceIndex) -> None:
        kinds = {kind: place for place, kind in enumerate(KINDS)}
        rows = [
            (
                number,
                root.nbytes,
                kinds[root.kind],
                root.saved,
                root.visit,
                root.birth,
                root.drop,
                root.unsave,
                root.spent,
                root.released,
                root.completes,
                index.is_internal(root),
            )
            for number, root in index.roots.items()
        ]
        table: NDArray[Any] = np.array(rows, dtype=np.int64).reshape(-1, 12).T
        self.number, self.nbytes, self.kind, saved, self.visit, self.birth = table[:6]
        self.drop, self.unsave, self.spent, self.released, self.completes, internal = table[6:]
        self.saved, self.internal = saved.astype(bool), internal.astype(bool)
        self.row = {int(number): row for row, number in enumerate(self.number)}


class Lives(Protocol):
    """Is told of lives: ``nbytes`` of ``kind`` from one position to another, both included."""

    def add(self, kind: Kind, start: int, end: int, nbytes: int) -> None:
        """One life."""

    def add_all(self, kind: Kind, starts: Column, ends: Column, nbytes: Column) -> None:
        """One life for each of several."""


@final
class Levels:
    """Adds up lives: bytes of every kind from one of ``end`` positions to another, both included."""

    def __init__(self, end: int) -> None:
        self._end = end
        self._made: dict[Kind, Column] = {}
        self._gone: dict[Kind, Column] = {}

    def add(self, kind: Kind, start: int, end: int, nbytes: int) -> None:
        """``nbytes`` of ``kind`` more."""
        self._open(kind)
        self._made[kind][start] += nbytes
        self._gone[kind][end + 1] += nbytes

    def add_all(self, kind: Kind, starts: Column, ends: Column, nbytes: Column) -> None:
        """The same for each of several."""
        self._open(kind)
        np.add.at(self._made[kind], starts, nbytes)
        np.add.at(self._gone[kind], ends + 1, nbytes)

    def _open(self, kind: Kind) -> None:
        if kind not in self._made:
            self._made[kind] = np.zeros(self._end + 1, np.int64)
            self._gone[kind] = np.zeros(self._end + 1, np.int64)

    def before(self) -> dict[Kind, Column]:
        """Of each kind the bytes before each position, and at the end; what is made at one is there before the next."""
        levels = {}
        for kind, made in self._made.items():
            change = -self._gone[kind]
            change[1:] += made[:-1]
            levels[kind] = np.cumsum(change)
        return levels

    def during(self, levels: Mapping[Kind, Column]) -> Column:
        """The bytes of all kinds at each position; ``levels`` are those before it."""
        total = np.zeros(self._end, np.int64)
        for kind, level in levels.items():
            total += level[: self._end] + self._made[kind][: self._end]
        return total


def column(numbers: Sequence[int]) -> Column:
    """``numbers`` in a row."""
    return np.array(numbers, dtype=np.int64)
