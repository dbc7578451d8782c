"""The default: the best that is found in the time that there is. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count

from forebay.planners.layout.aim import Aim, Found, lower_of
from forebay.planners.layout.canonical import Outcome
from forebay.planners.layout.exact import Search, task_of
from forebay.planners.layout.greedy import portfolio
from forebay.planners.layout.orders import order_by
from forebay.planners.layout.periodic import Shaker
from forebay.planners.layout.restarts import Restarts
from forebay.planners.layout.table import Column, Table

__all__ = ["arena", "exact"]

EXACT_MOST = 2000
"""Buffers of the largest part that is searched exactly: the pairs of those that meet are listed."""

LASTING = ("pressure", "length")
"""Orders of exact searches that go on until they have seen everything: one that ends without a layout is the proof."""

NODES = 4000
"""Nodes of one of their turns: some tens of milliseconds."""

RESTARTS = 3
"""Searches with orders of their own between two turns of those."""

SHAKEN = ("area", "pressure-length")
"""Orders that local searches begin with."""


def exact(table: Table, aim: Aim) -> Found:
    """A layout within the target, or the proof that there is none; if neither is found in time, or the part is too
    large for that, the best of the greedy ones."""
    best = _greedy(table, aim)
    return best if aim.met(best.height) else _searched(table, aim, best, ())


def arena(table: Table, aim: Aim) -> Found:
    """Greedy layouts first; then exact searches and local ones take turns."""
    best = _greedy(table, aim)
    if aim.met(best.height):
        return best
    target = aim.target(best.height)
    return _searched(table, aim, best, [Shaker(table, order_by(table, name), target) for name in SHAKEN])


def _greedy(table: Table, aim: Aim) -> Found:
    best: Found | None = None
    for found in portfolio(table):
        best = lower_of(best, found)
        if aim.met(best.height):
            break
    assert best is not None  # a portfolio is not empty
    return best


def _searched(table: Table, aim: Aim, best: Found, shakers: Sequence[Shaker]) -> Found:
    """The better of ``best`` and what searches find until the aim is met."""
    turns = _exact_turns(table, aim.target(best.height)) if len(table) <= EXACT_MOST else None
    for turn in count():
        if turns is None and not shakers:
            break
        outcome, offsets = next(turns) if turns is not None else (Outcome.PAUSED, None)
        if offsets is not None:
            return lower_of(best, Found(offsets, int((offsets + table.size).max()), "exact search"))
        if outcome is Outcome.NONE:
            if not aim.fits(best.height):
                return replace(best, exhausted=True)
            turns = None  # nothing reaches the bound, and there may be something between that and the best
        if shakers:
            shaker = shakers[turn % len(shakers)]
            shaker.advance()
            best = lower_of(best, shaker.best)
        if aim.met(best.height):
            return best
    return best


def _exact_turns(table: Table, target: int) -> Iterator[tuple[Outcome, Column | None]]:
    """Exact searches for ``target`` bytes in turns: what each turn ended with, and the addresses where it has found
    some."""
    task = task_of(table)
    lasting = [Search(table, task, target, order_by(table, name)) for name in LASTING]
    restarts = Restarts(table, task, target)
    while True:
        for _ in range(RESTARTS):
            outcome = restarts.advance()
            yield outcome, restarts.offsets if outcome is Outcome.FOUND else None
        for search in lasting:
            outcome = search.advance(NODES)
            yield outcome, search.offsets if outcome is Outcome.FOUND else None
