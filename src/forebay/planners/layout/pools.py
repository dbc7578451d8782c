"""Local searches over layouts that leave some buffers out, one after the other. No torch."""

from __future__ import annotations

from typing import final

import numpy as np

from forebay.planners.layout.aim import Aim, Found
from forebay.planners.layout.draws import sown
from forebay.planners.layout.ejecting import OUT, Pool, eject
from forebay.planners.layout.table import Table

__all__ = ["Pools"]

WORK = 10_000_000
"""Buffers that are looked at in one go, between two looks at the clock: some tens of milliseconds."""

PATIENCE = 200
"""Goes after which a search begins anew."""

POWER = 0.5
"""What a buffer counts at the start is this power of its area, as a share of the mean."""

MORE = 1.0
"""How much more a buffer counts each time that it finds no gap."""

SHAKES = 5
"""Buffers that move to other gaps after each that others had to go for."""


@final
class Pools:
    """Searches on one table for layouts that are lower than ``best``, which becomes the lowest of them: within the
    capacity of ``aim``, as long as there is none; else half way between the best and the highest that was tried in
    vain."""

    def __init__(self, table: Table, best: Found, aim: Aim) -> None:
        self._table, self._aim, self.best = table, aim, best
        self._state = sown()
        self._missed = aim.bound
        self._rounds = max(1, WORK // (20 * len(table)))
        self._begin()

    def advance(self) -> None:
        """Goes on for some tens of milliseconds."""
        if self.best.height <= self._aim.bound:
            return
        pool = self._pool
        left = eject(self._table.lives, pool, self._target, self._rounds, SHAKES, MORE, self._state)
        self._gone += 1
        if not left:
            offsets = pool.offsets.copy()
            self.best = Found(offsets, int((offsets + self._table.size).max()), "ejection search")
            self._begin()
        elif self._gone == PATIENCE:
            if self._aim.fits(self.best.height):
                self._missed = self._target
            self._begin()

    def _begin(self) -> None:
        """A new search: all below the target that the best layout has there have an address."""
        table, best = self._table, self.best
        self._gone = 0
        self._target = max(table.peak, self._aim.next_target(best.height, self._missed))
        area = table.size.astype(float) * table.length
        inside = best.offsets + table.size <= self._target
        offsets = np.where(inside, best.offsets, OUT)
        there, out = np.flatnonzero(inside), np.flatnonzero(~inside)
        by_address, left = np.zeros((2, len(table)), np.int64)
        by_address[: len(there)] = there[np.argsort(offsets[there], kind="stable")]
        left[: len(out)] = out
        weight = (area / area.mean()) ** POWER
        self._pool = Pool(offsets, by_address, left, np.array([len(there), len(out)]), weight)
