"""The layout half of ROAM: what lives long first, then each stretch of time by itself. No torch.

Shu et al., "ROAM: memory-efficient large DNN training via optimized operator ordering and memory layout" (2023): the
graph is cut into a tree of subgraphs, what crosses a cut is laid out so that what is made and gone inside a leaf finds
room in one piece, and leaves are solved by themselves and put together. The paper gives each leaf to an integer
programme; here a leaf takes the lowest of best fit in several orders. The order of ops is the trace's: this planner is
given lives, and leaves them as they are.
"""

from __future__ import annotations

import numpy as np

from forebay.planners.layout.aim import Aim, Found
from forebay.planners.layout.greedy import fitted
from forebay.planners.layout.orders import ORDERS, order_by
from forebay.planners.layout.table import Column, Table

__all__ = ["roam"]

LEAF = 100
"""Buffers in a stretch of time that is not cut any further."""


def roam(table: Table, aim: Aim) -> Found:
    """What crosses a cut longest life first, then the best order for each stretch between cuts. Takes no notice of
    ``aim``: there is nothing to stop."""
    leaf = _leaves(table)
    crossing = order_by(table, "length")
    crossing = crossing[leaf[crossing] < 0]
    best, tops = np.zeros(len(table), np.int64), np.full(int(leaf.max(initial=-1)) + 1, 1 << 62, np.int64)
    for name in ORDERS:
        inner = order_by(table, name)
        offsets = fitted(table, np.concatenate([crossing, inner[leaf[inner] >= 0]]), name).offsets
        # What crosses lies at the same addresses whatever the order of the rest, and leaves share no time: so each may
        # be taken from another layout.
        reached = np.zeros_like(tops)
        np.maximum.at(reached, leaf[leaf >= 0], (offsets + table.size)[leaf >= 0])
        better = reached < tops
        taken = (leaf < 0) | better[leaf]
        best[taken] = offsets[taken]
        tops = np.minimum(tops, reached)
    return Found(best, int((best + table.size).max()), "roam")


def _leaves(table: Table) -> Column:
    """Of each buffer the number of the stretch of time that it lives in; -1 if it crosses a cut."""
    leaf = np.full(len(table), -1, np.int64)
    waiting = [np.arange(len(table))]
    count = 0
    while waiting:
        rows = waiting.pop()
        cut = _cut(table, rows)
        if cut is None:
            leaf[rows] = count
            count += 1
            continue
        waiting += [side for side in (rows[table.upper[rows] <= cut], rows[table.lower[rows] >= cut]) if len(side)]
    return leaf


def _cut(table: Table, rows: Column) -> int | None:
    """The time in the middle half of ``rows`` that the fewest bytes cross; None: they are few enough, or no time is
    crossed by fewer than all of them."""
    if len(rows) <= LEAF:
        return None
    lower, upper = table.lower[rows], table.upper[rows]
    begins = np.sort(lower)
    first, last = int(begins[len(rows) // 4]), int(begins[3 * len(rows) // 4])
    change = np.zeros(int(upper.max()) + 2, np.int64)
    # A time is crossed by what begins before it and ends after it.
    np.add.at(change, lower + 1, table.size[rows])
    np.subtract.at(change, upper, table.size[rows])
    crossed = np.cumsum(change)[first : last + 1]
    cut = first + int(np.argmin(crossed))
    return None if not np.any((upper <= cut) | (lower >= cut)) else cut
