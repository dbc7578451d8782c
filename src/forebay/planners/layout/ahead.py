"""Compiling what a search runs before its time runs. No torch.

The first call of a compiled function on a machine takes seconds, later ones in other processes read it from a cache
(``kernels.jit``). None of that is to count against the time that a search has.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from forebay.buffers import Buffer
from forebay.planners.layout.aim import Aim, Deadline, Found
from forebay.planners.layout.beams import Beams
from forebay.planners.layout.exact import Search, task_of
from forebay.planners.layout.greedy import fitted, flowed, stacked
from forebay.planners.layout.multilevel import Multilevel
from forebay.planners.layout.orders import order_by
from forebay.planners.layout.periodic import Shaker
from forebay.planners.layout.pools import Pools
from forebay.planners.layout.sweeps import Sweeps
from forebay.planners.layout.table import Table

__all__ = ["compile_greedy", "compile_searches"]


def _table() -> Table:
    """Two buffers that meet: enough for every function to be called."""
    return Table.of((Buffer("a", 0, 2, 1), Buffer("b", 1, 3, 1)))


@cache
def compile_greedy() -> None:
    """Has everything compiled that places buffers one after the other."""
    table = _table()
    order = order_by(table, "size")
    fitted(table, order, "")
    stacked(table, order, "")
    flowed(table)


@cache
def compile_searches() -> None:
    """Has everything compiled that searches."""
    table = _table()
    order = order_by(table, "size")
    Shaker(table, order, 1).advance()
    task = task_of(table)
    Search(table, task, 2, order).advance(1)
    none_yet = Found(np.arange(2), 3, "")
    aim = Aim(2, 2, Deadline(0), Deadline(0))
    Beams(table, task, none_yet, aim).advance()
    Pools(table, none_yet, aim).advance()
    Sweeps(table, none_yet, 2).advance()
    Multilevel(table, none_yet, 2, aim.deadline).advance()
