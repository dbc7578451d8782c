"""Exact searches that begin again and again, each with another order. No torch.

A search that decides wrongly at the start comes back to that last of all, while one with another order may have no such
choice to make: the time that a search takes has a heavy tail, and many short ones beat a long one (Gomes, Selman,
Kautz, "Boosting combinatorial search through randomization", AAAI 1998). How long each may take follows Luby's
sequence.
"""

from __future__ import annotations

from typing import final

import numpy as np

from forebay.planners.layout.exact import Search
from forebay.planners.layout.placing import Outcome, Task
from forebay.planners.layout.table import Column, Table

__all__ = ["Restarts", "luby"]

SEED = 1
"""Where the pseudo-random orders begin: the same search for the same buffers."""

UNIT = 5000
"""Nodes of the shortest searches: some tens of milliseconds."""


@final
class Restarts:
    """Searches for a layout of ``table`` within ``capacity`` bytes; ``task`` is that of the table
    (``exact.task_of``)."""

    def __init__(self, table: Table, task: Task, capacity: int) -> None:
        self._table, self._task, self._capacity = table, task, capacity
        self._draw = np.random.default_rng(SEED)
        self._count = 0
        self._keys = tuple(np.log(column.astype(float)) for column in (table.size, table.length, table.pressure))
        self._search = self._next()

    @property
    def offsets(self) -> Column:
        """The addresses that were found last (bytes)."""
        return self._search.offsets

    def advance(self) -> Outcome:
        """One search more, with another order than those before."""
        self._search = self._next()
        return self._search.advance(UNIT * luby(self._count))

    def _next(self) -> Search:
        self._count += 1
        return Search(self._table, self._task, self._capacity, self._order())

    def _order(self) -> Column:
        """The largest first, by a product of powers of bytes, length and pressure drawn at random; or those first (or
        last) that live near some time; with some noise."""
        draw, table = self._draw, self._table
        size, length, pressure = self._keys
        by_size, by_length, by_pressure = draw.uniform(0.0, 1.5, 3)
        keys = by_size * size + by_length * length
        if draw.random() < 0.75:
            keys = keys + draw.choice([0.0, 20.0]) * by_pressure * pressure
            noise = float(draw.choice([0.0, 0.1, 0.5]))
        else:
            focus = draw.integers(0, int(table.upper.max()))
            away = np.maximum(0, np.maximum(table.lower - focus, focus - table.upper))
            keys = 5.0 * keys + draw.choice([-1.0, 1.0]) * away
            noise = 0.1 * float(keys.std())
        return np.argsort(-(keys + noise * draw.normal(size=len(table))), kind="stable").astype(np.int64)


def luby(number: int) -> int:
    """The ``number``-th of 1, 1, 2, 1, 1, 2, 4 ... (Luby, Sinclair, Zuckerman, "Optimal speedup of Las Vegas
    algorithms", 1993), from 1 on."""
    power = 1
    while 2 * power - 1 < number:
        power *= 2
    return power if 2 * power - 1 == number else luby(number - power + 1)
