"""How a weight is cut into tiles (``tiles.py``)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import final

import torch

from forebay.errors import ConfigError, ModelError
from forebay.loss import VOCABULARY, pieces
from forebay.units import format_apart

__all__ = ["GRAIN", "Grid", "Span", "grid_of", "longest"]

GRAIN = VOCABULARY
"""Tiles have so many rows and columns at least, and a multiple of them where another follows (``loss.VOCABULARY``)."""

Span = tuple[int, int]


@final
@dataclass(frozen=True)
class Grid:
    """How a weight of ``shape`` is cut: ``rows`` and ``columns`` are (first, end). Tiles are numbered row by row."""

    shape: tuple[int, int]
    rows: tuple[Span, ...]
    columns: tuple[Span, ...]

    @property
    def tiles(self) -> tuple[tuple[Span, Span], ...]:
        """Rows and columns of each tile."""
        return tuple((row, column) for row in self.rows for column in self.columns)

    @property
    def panel(self) -> int:
        """Elements of the largest panel of a linear layer."""
        return max(longest(self.rows) * self.shape[1], longest(self.columns) * self.shape[0])

    def cut(self, whole: torch.Tensor, number: int) -> torch.Tensor:
        """The elements of one tile: a view of ``whole``."""
        (top, bottom), (left, right) = self.tiles[number]
        return whole[top:bottom, left:right]

    def joined(self, parts: Iterable[torch.Tensor]) -> torch.Tensor:
        """The whole that ``parts``, one for each tile, were cut from. One of them is there at a time."""
        whole: torch.Tensor | None = None
        for number, part in enumerate(parts):
            if whole is None:
                whole = torch.empty(self.shape, dtype=part.dtype, device=part.device)
            self.cut(whole, number).copy_(part.detach())
        if whole is None:
            raise ModelError("a weight has no tiles")
        return whole


def longest(spans: Iterable[Span]) -> int:
    """The length of the longest of ``spans``."""
    return max(end - first for first, end in spans)


def grid_of(name: str, shape: tuple[int, int], itemsize: int, most: int, *, by_rows: bool) -> Grid:
    """Cuts a weight of ``shape``, the one of layer ``name``, so that no panel is more than ``most`` bytes. ``by_rows``:
    into parts of some rows and all columns, which is what an embedding needs; half as large, since a gradient is too.

    Raises ``ConfigError`` where parts of ``GRAIN`` rows or columns are still too large.
    """
    rows, columns = shape
    if by_rows:
        parts = 2 * max(1, -(-rows * columns * itemsize // most))
        found = pieces(rows, -(-rows // parts), GRAIN)
        _expect(name, longest(found) * columns * itemsize, most)
        return Grid(shape, found, ((0, columns),))
    return Grid(shape, _spans(name, rows, columns * itemsize, most), _spans(name, columns, rows * itemsize, most))


def _spans(name: str, total: int, nbytes: int, most: int) -> tuple[Span, ...]:
    """``total`` rows or columns of ``nbytes`` each in parts of at most ``most`` bytes, as few as there can be."""
    count = max(1, -(-total * nbytes // most))
    while True:
        size = -(-total // count)
        made = pieces(total, size, GRAIN)
        # The last one may be a little larger than the others.
        if size <= GRAIN:
            _expect(name, longest(made) * nbytes, most)
        if longest(made) * nbytes <= most:
            return made
        count += 1


def _expect(name: str, nbytes: int, most: int) -> None:
    if nbytes > most:
        least, asked = format_apart(nbytes, most)
        raise ConfigError(f"{name} cannot be cut to {asked}: {least} is the least; give that size, or a larger one")
