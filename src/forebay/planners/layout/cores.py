"""Orders of what is live when memory is fullest, drawn at random, of many buffers. No torch.

How high a layout of thousands of buffers is, those decide that meet the times at which nearly as much is live as at the
peak: its *core*. There are some thousand of them, so that an order of theirs is tried in some milliseconds, where all
buffers take a hundred times that. What is left comes behind them and finds room in their gaps.
"""

from __future__ import annotations

from typing import NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from forebay.planners.layout.aim import Found, lower_of
from forebay.planners.layout.greedy import fitted
from forebay.planners.layout.orders import LARGEST, SHARES, largest_share, order_by
from forebay.planners.layout.table import Column, Table

__all__ = ["Cores"]

SHARE = 0.95
"""Of the peak: who is live when no less is live belongs to the core. Of 20,000 buffers with lives of all kinds these
are 1,000 to 2,000, and the others mostly lie within the height of the core's layout."""

WIDER = 0.05
"""By how much that share is lower where the others did not find room."""

LARGE = (0.5, 0.98)
"""From and up to which share of the area those may have that come first (``orders.LARGEST``), drawn anew each time."""

NOISE = (0.05, 0.1, 0.2, 0.3)
"""How far sizes and lives that an order is made of are off, in natural logarithms (a standard deviation)."""

FRESH = 0.25
"""The share of the drawn orders that begin anew."""

KEPT = 0.85
"""The share of those errors that the next order has from the best one, where it begins with that."""

GRADES = (0.001, 0.02, 0.1)
"""Shares of the peak within which pressures are one."""

WORK = 10_000_000
"""Pairs of buffers that are looked at in one go, between two looks at the clock: some tens of milliseconds."""


class _Drawn(NamedTuple):
    """What an order is made of: the share of the area that comes first, a grade of pressure,
    whether of equal pressures among those the largest area comes first and not the longest life, and of each buffer the
    error of its size and of its life."""

    share: float
    grade: float
    area: bool
    size: NDArray[np.float64]
    life: NDArray[np.float64]


@final
class Cores:
    """Searches orders of the core of one table for layouts that are lower than ``best``, which becomes the lowest of
    them: first in the built-in orders, then in drawn ones, most of which begin with the best so far."""

    def __init__(self, table: Table, best: Found) -> None:
        self._table, self.best = table, best
        self._draw = np.random.default_rng(1)
        self._share, self._height = SHARE, 0
        self._begin()

    def advance(self) -> None:
        """Some orders more, and the others behind the best of them where that is lower than ``best``."""
        for _ in range(self._tries):
            drawn = self._built_in.pop(0) if self._built_in else self._next()
            order = _ordered(self._core, drawn)
            height = fitted(self._core, order, "").height
            if height < self._height:
                self._height, self._drawn = height, drawn
                if height < self.best.height:
                    self._extend(order)
                    return

    def _begin(self) -> None:
        table = self._table
        inside = table.pressure >= self._share * table.peak
        self._rows, others = np.flatnonzero(inside), np.flatnonzero(~inside)
        self._core = table.rows(self._rows)
        rest = table.rows(others)
        self._behind = others[order_by(rest, next(iter(LARGEST)))]
        self._tries = max(1, WORK // (len(self._core) ** 2 + 1))
        exact = np.zeros(len(self._core))
        self._built_in = [_Drawn(share, 0.0, area, exact, exact) for share in SHARES for area in (False, True)]
        self._drawn, self._height = self._built_in[0], int(np.iinfo(np.int64).max)

    def _extend(self, order: Column) -> None:
        found = fitted(self._table, np.concatenate([self._rows[order], self._behind]), "best fit, the fullest first")
        if found.height >= self.best.height and len(self._behind):
            self._share = max(0.0, self._share - WIDER)
            self._begin()
        self.best = lower_of(self.best, found)

    def _fresh(self) -> _Drawn:
        draw, noise = self._draw, self._draw.choice(NOISE)
        size, life = noise * draw.standard_normal((2, len(self._core)))
        return _Drawn(draw.uniform(*LARGE), draw.choice(GRADES), bool(draw.random() < 0.5), size, life)

    def _next(self) -> _Drawn:
        fresh = self._fresh()
        if self._draw.random() < FRESH:
            return fresh
        kept, best = self._draw.random(len(self._core)) < KEPT, self._drawn
        size, life = np.where(kept, best.size, fresh.size), np.where(kept, best.life, fresh.life)
        return best._replace(size=size, life=life)


def _ordered(table: Table, drawn: _Drawn) -> Column:
    """An order as those of ``LARGEST``, from what was drawn."""
    size, life = np.log(table.size) + drawn.size, np.log(table.length) + drawn.life
    large, small = largest_share(table, np.argsort(-size, kind="stable"), drawn.share)
    found = []
    for rows, then in ((large, life + size if drawn.area else life), (small, life)):
        some = table.rows(rows)  # as if the others were not there
        pressure = some.pressure // max(1, int(drawn.grade * some.peak))
        found.append(rows[np.lexsort((-size[rows], -then[rows], -pressure))])
    return np.concatenate(found).astype(np.int64)
