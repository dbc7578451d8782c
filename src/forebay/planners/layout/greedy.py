"""Layouts that place one buffer after the other, without a way back. No torch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from forebay.planners.layout.aim import Aim, Found, empty, lower_of
from forebay.planners.layout.fits import ANY, BEST, FIRST, fit, flow, stack
from forebay.planners.layout.orders import LARGEST, ORDERS, order_by
from forebay.planners.layout.table import Column, Table

__all__ = ["best_fit", "fitted", "fitted_below", "flowed", "portfolio"]


def fitted(table: Table, order: Column, by: str, best: bool = BEST) -> Found:
    """The buffers placed in ``order``, each where it fits best, or first."""
    offsets = empty(table)
    height = fit(order, table.lives, best, ANY, offsets)
    return Found(offsets, int(height), by)


def fitted_below(table: Table, order: Column, by: str, limit: int) -> Found | None:
    """The buffers placed in ``order``, each where it fits best; None as soon as one of them ends at ``limit`` bytes or
    above."""
    offsets = empty(table)
    height = int(fit(order, table.lives, BEST, limit, offsets))
    return Found(offsets, height, by) if height < limit else None


def stacked(table: Table, order: Column, by: str) -> Found:
    """Memory filled from below, where several could be next by the first in ``order``."""
    rank = np.empty(len(table), np.int64)
    rank[order] = np.arange(len(table))
    offsets = empty(table)
    return Found(offsets, int(stack(rank, table.lives, offsets)), by)


def flowed(table: Table) -> Found:
    """The buffers placed as time goes."""
    rows = np.arange(len(table))
    times = np.concatenate([table.lower, table.upper])
    events = np.concatenate([rows, -1 - rows])
    order = np.lexsort((events >= 0, times))  # of one time, those that end are gone before others begin
    offsets = empty(table)
    return Found(offsets, int(flow(events[order], table.lives, offsets)), "as time goes")


def best_fit(table: Table, aim: Aim) -> Found:
    """The lowest of best fit in several orders (Pisarchyk and Lee 2020; the orders are named in ``orders``)."""
    best: Found | None = None
    for name in (*ORDERS, *LARGEST):
        best = lower_of(best, fitted(table, order_by(table, name), f"best fit by {name}"))
        if aim.met(best.height):
            break
    assert best is not None  # there are orders
    return best


def portfolio(table: Table) -> Iterator[Found]:
    """Best fit by length; best and first fit with the largest first; then skylines, best fit and first fit in the other
    orders: of few buffers all are made in no time, and of many the first ones are the lowest most often."""
    orders = {name: order_by(table, name) for name in ORDERS}
    yield fitted(table, orders["length"], "best fit by length")
    for name in LARGEST:
        order = order_by(table, name)
        yield fitted(table, order, f"best fit by {name}")
        yield fitted(table, order, f"first fit by {name}", FIRST)
    for name, order in orders.items():
        yield stacked(table, order, f"skyline by {name}")
    for name, order in orders.items():
        if name != "length":
            yield fitted(table, order, f"best fit by {name}")
    for name, order in orders.items():
        yield fitted(table, order, f"first fit by {name}", FIRST)
