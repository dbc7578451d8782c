"""Orders of what is live when memory is fullest, drawn at random, of many buffers. No torch.

How high a layout of thousands of buffers is, those decide that meet the times at which nearly as much is live as at the
peak, and those that are large beside what these times leave free: its *core*. There are some thousand of them, so that
an order of theirs is tried in some milliseconds, where all buffers take a hundred times that. What is left comes behind
them and finds room in their gaps.

What is scarce is memory in those times. So lives are best counted in the fullest of them only: a buffer that is live
for long, but mostly at other times, need not come before one that is not.
"""

from __future__ import annotations

from typing import NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from forebay.planners.layout.aim import Found
from forebay.planners.layout.fits import ANY
from forebay.planners.layout.greedy import fitted_below
from forebay.planners.layout.orders import LARGEST, SHARES, largest_share, order_by
from forebay.planners.layout.table import Column, Table

__all__ = ["Cores"]

SHARE = 0.95
"""Of the peak: who is live when no less is live belongs to the core. Of 20,000 buffers with lives of all kinds these
are 1,000 to 3,000, and the others mostly lie within the height of the core's layout."""

WIDER = 0.05
"""By how much that share is lower where the others did not find room."""

BESIDE = 4
"""How many times a buffer's size is added to what is live with it, before that is compared. A buffer that has the 64th
part of the peak, and has to find a gap when 94 % is live, often finds none behind the others."""

LARGE = (0.5, 0.98)
"""From and up to which share of the area those may have that come first (``orders.LARGEST``), drawn anew each time."""

FULLEST = (0.98, 0.97, 0.95, 0.99)
"""Shares of the peak; a time at which no less is live is one of the fullest. The first orders have these shares, the
likeliest first."""

FULL = (0.94, 0.995)
"""From and up to which share that is drawn."""

WHOLE = 0.25
"""The share of the drawn orders that count whole lives."""

NOISE = (0.05, 0.1, 0.2, 0.3)
"""How far sizes and lives that an order is made of are off, in natural logarithms (a standard deviation)."""

FRESH = 0.25
"""The share of the drawn orders that begin anew."""

KEPT = (0.6, 0.85, 0.95, 0.99)
"""Shares of those errors that the next order has from the best one, where it begins with that."""

GRADES = (0.001, 0.02, 0.1)
"""Shares of the peak within which pressures are one."""

BEHIND = ("area", "length", next(iter(LARGEST)))
"""Orders of those that come behind, until one of them is no higher than the core."""

PATIENCE = 100
"""Orders without a lower core before the others come behind the lowest, at most: that takes as long as some hundred
cores, and where one core was lower, the next one often is soon."""

WORK = 10_000_000
"""Pairs of buffers that are looked at in one go, between two looks at the clock: some tens of milliseconds."""

MADE = 200_000
"""As many pairs take as long as making an order of few buffers."""


class _Drawn(NamedTuple):
    """What an order is made of: the share of the area that comes first, a grade of pressure, the share of the peak of
    the fullest times, in which lives are counted (0: in all), whether of equal pressures among those that come first
    the largest area is next and not the longest life, and of each buffer the error of its size and of its life."""

    share: float
    grade: float
    fullest: float
    area: bool
    size: NDArray[np.float64]
    life: NDArray[np.float64]


@final
class _Core:
    """Those of ``table`` that meet ``share`` of its peak, or are too large to come behind these: ``rows``, as a table
    ``part``, and the others in several orders, ``behind``."""

    def __init__(self, table: Table, share: float) -> None:
        inside = table.pressure + BESIDE * table.size >= share * table.peak
        self.rows, others = np.flatnonzero(inside), np.flatnonzero(~inside)
        self.part, rest = table.rows(self.rows), table.rows(others)
        self.behind = [others[order_by(rest, name)] for name in BEHIND] if len(others) else [others]
        self.tries = max(1, WORK // (len(self.part) ** 2 + MADE))
        self.patience = max(1, min(PATIENCE, (len(table) // len(self.part)) ** 2))
        self._live, self._peak = table.live, table.peak

    def __len__(self) -> int:
        return len(self.part)

    def ordered(self, drawn: _Drawn) -> Column:
        """The rows of ``part`` in an order as those of ``LARGEST``, from what was drawn."""
        size, life = np.log(self.part.size) + drawn.size, np.log(self._lives(drawn.fullest)) + drawn.life
        large, small = largest_share(self.part, np.argsort(-size, kind="stable"), drawn.share)
        found = []
        for rows, then in ((large, life + size if drawn.area else life), (small, life)):
            some = self.part.rows(rows)  # as if the others were not there
            pressure = some.pressure // max(1, int(drawn.grade * some.peak))
            found.append(rows[np.lexsort((-size[rows], -then[rows], -pressure))])
        return np.concatenate(found).astype(np.int64)

    def _lives(self, fullest: float) -> NDArray[np.float64]:
        """For how many ranks of time with no less live than the share ``fullest`` of the peak each row is live; of
        equal ones that of the longest life has the most."""
        before = np.concatenate([[0], np.cumsum(self._live >= fullest * self._peak)])
        length = self.part.length
        found: NDArray[np.float64] = before[self.part.upper] - before[self.part.lower] + length / (length.max() + 1)
        return found


@final
class Cores:
    """Searches orders of the core of one table for layouts that are lower than ``best``, which becomes the lowest of
    them: first in the built-in orders, then in drawn ones, most of which begin with the best so far."""

    def __init__(self, table: Table, best: Found) -> None:
        self._table, self.best = table, best
        self._draw = np.random.default_rng(1)
        self._start(SHARE)

    def _start(self, share: float) -> None:
        """Begins with the core of those that meet ``share`` of the peak."""
        self._share, self._core = share, _Core(self._table, share)
        exact = np.zeros(len(self._core))
        whole = [_Drawn(first, 0.0, 0.0, area, exact, exact) for first in SHARES for area in (False, True)]
        full = [_Drawn(first, 0.0, fullest, False, exact, exact) for fullest in FULLEST for first in SHARES]
        self._built_in = whole + full
        self._drawn, self._height, self._stale = whole[0], ANY, 0
        self._waiting: list[Column] = []
        self._before = self.best.height

    def advance(self) -> None:
        """Some orders of the core more, or all others behind the best of them where that is lower than ``best``."""
        if self._waiting:
            self._extend(self._waiting.pop(0))
            return
        for _ in range(self._core.tries):
            drawn = self._built_in.pop(0) if self._built_in else self._next()
            found = fitted_below(self._core.part, self._core.ordered(drawn), "", self._height)
            self._stale += 1
            if found is not None:
                self._height, self._drawn, self._stale = found.height, drawn, 0
            if self._stale == self._core.patience and self._height < self.best.height:
                self._waiting, self._before = list(self._core.behind), self.best.height
                return

    def _extend(self, behind: Column) -> None:
        """The others, in the order ``behind``, after the best order of the core. If none of their orders gave anything,
        and most of what is over the bound is theirs, a wider core begins."""
        order = np.concatenate([self._core.rows[self._core.ordered(self._drawn)], behind])
        found = fitted_below(self._table, order, "best fit, the fullest first", self.best.height)
        if found is not None:
            self.best = found
        if self.best.height <= self._height:
            self._waiting.clear()
        peak = self._table.peak
        theirs = self.best.height - self._height > self._height - peak
        if not self._waiting and self.best.height == self._before and theirs:
            self._start(max(0.0, self._share - WIDER))

    def _next(self) -> _Drawn:
        fresh = self._fresh()
        if self._draw.random() < FRESH:
            return fresh
        kept, best = self._draw.random(len(self._core)) < self._draw.choice(KEPT), self._drawn
        size, life = np.where(kept, best.size, fresh.size), np.where(kept, best.life, fresh.life)
        return best._replace(size=size, life=life)

    def _fresh(self) -> _Drawn:
        draw, noise = self._draw, self._draw.choice(NOISE)
        size, life = noise * draw.standard_normal((2, len(self._core)))
        fullest = 0.0 if draw.random() < WHOLE else draw.uniform(*FULL)
        return _Drawn(draw.uniform(*LARGE), draw.choice(GRADES), fullest, bool(draw.random() < 0.5), size, life)
