"""A fit in a sorted order, the order improved by local search. No torch.

Imanishi and Xu, "A heuristic for periodic memory allocation with little fragmentation to train neural networks" (ISMM
2024): the requests of one iteration of training come again in every one, so that their addresses are worth some seconds
of search before the second. Here a layout is an order in which buffers are placed, which a fit turns into addresses,
and what is searched are orders (``shaking``). Requests that the recorded iteration did not have go to a second pool,
which is the runtime's to keep, not this planner's.
"""

from __future__ import annotations

from typing import final

import numpy as np

from forebay.planners.layout.aim import Found
from forebay.planners.layout.draws import sown
from forebay.planners.layout.fits import BEST
from forebay.planners.layout.greedy import fitted
from forebay.planners.layout.shaking import HISTORY, shake
from forebay.planners.layout.table import Column, Table

__all__ = ["Shaker"]

STALE = 3000
"""Rounds without anything better after which the search begins again from the best order, by other numbers."""

WORK = 10_000_000
"""Pairs of buffers that are looked at in one go, between two looks at the clock: some tens of milliseconds."""


@final
class Shaker:
    """The local search on one table towards ``target`` bytes, from the layout that ``order`` gives."""

    def __init__(self, table: Table, order: Column, target: int) -> None:
        self._table, self._target = table, target
        self._order, self._from = order.copy(), order
        self._state = sown()
        self.rounds = max(1, WORK // (len(table) ** 2 + 1))
        self._stale = 0
        self._restart()
        self.best = Found(self._offsets.copy(), self._height, "local search")

    def advance(self) -> None:
        """Some rounds more; ``best`` may be lower afterwards."""
        table = self._table
        height = int(
            shake(
                self._order,
                table.lives,
                BEST,
                self._target,
                self.rounds,
                self._state,
                self._history,
                self._offsets,
            )
        )
        self._stale += self.rounds
        if height < self.best.height:
            self.best = Found(self._offsets.copy(), height, "local search")
            self._stale, self._from = 0, self._order.copy()
        if self._stale >= STALE:
            self._stale = 0
            self._restart()

    def _restart(self) -> None:
        self._order[:] = self._from
        made = fitted(self._table, self._order, "")
        self._offsets, self._height = made.offsets, made.height
        over = np.maximum(0, self._offsets + self._table.size - self._target)
        self._history = np.full(HISTORY, int(over.sum()), np.int64)
