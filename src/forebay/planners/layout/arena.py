"""The planners that search: ``arena``, the default, takes the best that all of them find in the time that there is. No
torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from typing import Protocol

from forebay.planners.cpsat import cpsat_is_there
from forebay.planners.layout.ahead import compile_searches
from forebay.planners.layout.aim import Aim, Found, lower_of
from forebay.planners.layout.beams import Beams
from forebay.planners.layout.canonical import Outcome
from forebay.planners.layout.cpsat import solve
from forebay.planners.layout.exact import Search, task_of
from forebay.planners.layout.greedy import fitted, portfolio
from forebay.planners.layout.orders import order_by
from forebay.planners.layout.periodic import Shaker
from forebay.planners.layout.restarts import Restarts
from forebay.planners.layout.table import Column, Table

__all__ = ["arena", "exact", "periodic"]

EXACT_MOST = 2000
"""Buffers of the largest part that is searched exactly: the pairs of those that meet are listed."""

ALONE = 0.5
"""Seconds of the searches here before CP-SAT is asked, where it is installed: what is easy is found in less."""

CPSAT_MOST = 1000
"""Buffers of the largest part that CP-SAT is asked about."""

CPSAT_SHARE = 0.8
"""The share of the time left that it gets."""

BEAM_MOST = 500
"""Buffers of the largest part that is searched with many partial layouts at a time: what one more buffer takes for all
of them grows with the number of buffers, and a turn is to stay short."""

LASTING = ("pressure-length", "pressure", "length")
"""Orders of exact searches that go on until they have seen everything: one that ends without a layout is the proof."""

NODES = 4000
"""Nodes of one of their turns: some tens of milliseconds."""

RESTARTS = 3
"""Searches with orders of their own between two turns of those."""

SHAKEN = ("area", "pressure-length")
"""Orders that local searches begin with."""


class Improver(Protocol):
    """A search that keeps the lowest layout that it has seen."""

    best: Found

    def advance(self) -> None:
        """Goes on for some tens of milliseconds."""


def exact(table: Table, aim: Aim) -> Found:
    """A layout within the target, or the proof that there is none; if neither is found in time, or the part is too
    large for that, the best of the greedy ones."""
    best = _greedy(table, aim)
    if aim.met(best.height):
        return best
    with aim.untimed():
        compile_searches()
    return _searched(table, aim, best, ())


def arena(table: Table, aim: Aim) -> Found:
    """Greedy layouts first; then exact searches, local ones and beams take turns."""
    best = _greedy(table, aim)
    if aim.met(best.height):
        return best
    target = aim.target(best.height)
    with aim.untimed():
        compile_searches()
    improvers: list[Improver] = [Shaker(table, order_by(table, name), target) for name in SHAKEN]
    if len(table) <= BEAM_MOST:
        beams = Beams(table, task_of(table), best, aim)
        improvers = [one for shaker in improvers for one in (beams, shaker)]
    if aim.fits(best.height) or len(table) > CPSAT_MOST or not cpsat_is_there():
        return _searched(table, aim, best, improvers)
    best = _searched(table, aim.within(ALONE), best, improvers)
    if best.exhausted or aim.met(best.height):
        return best
    return _by_cpsat(table, aim, best, improvers)


def _by_cpsat(table: Table, aim: Aim, best: Found, improvers: Sequence[Improver]) -> Found:
    """CP-SAT for most of the time that is left; the searches go on where it finds nothing."""
    if not aim.fits(best.height):
        target = aim.target(best.height)
        outcome, offsets = solve(table, target, CPSAT_SHARE * aim.deadline.left)
        if outcome is Outcome.FOUND:
            return Found(offsets, int((offsets + table.size).max()), "CP-SAT")
        if outcome is Outcome.NONE:
            return replace(best, exhausted=True)
    return _searched(table, aim, best, improvers)


def periodic(table: Table, aim: Aim) -> Found:
    """Best fit by area, its order improved until the aim is met."""
    order = order_by(table, "area")
    found = fitted(table, order, "best fit by area")
    if aim.met(found.height):
        return found
    with aim.untimed():
        compile_searches()
    search = Shaker(table, order, aim.target(found.height))
    while not aim.met(lower_of(found, search.best).height):
        search.advance()
    return lower_of(found, search.best)


def _greedy(table: Table, aim: Aim) -> Found:
    best: Found | None = None
    for found in portfolio(table):
        best = lower_of(best, found)
        if aim.met(best.height):
            break
    assert best is not None  # a portfolio is not empty
    return best


def _searched(table: Table, aim: Aim, best: Found, improvers: Sequence[Improver]) -> Found:
    """The better of ``best`` and what searches find until the aim is met."""
    turns = _exact_turns(table, aim.target(best.height)) if len(table) <= EXACT_MOST else None
    for turn in count():
        if turns is None and not improvers:
            break
        outcome, offsets = next(turns) if turns is not None else (Outcome.PAUSED, None)
        if offsets is not None:
            return lower_of(best, Found(offsets, int((offsets + table.size).max()), "exact search"))
        if outcome is Outcome.NONE:
            if not aim.fits(best.height):
                return replace(best, exhausted=True)
            turns = None  # nothing reaches the bound, and there may be something between that and the best
        if improvers:
            improver = improvers[turn % len(improvers)]
            improver.advance()
            best = lower_of(best, improver.best)
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
