"""Searches that take turns on one table, until an aim is met. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import cycle
from typing import Protocol, final

from forebay.planners.layout.aim import Aim, Found, lower_of
from forebay.planners.layout.exact import Search, task_of
from forebay.planners.layout.orders import order_by
from forebay.planners.layout.placing import Outcome
from forebay.planners.layout.restarts import Restarts
from forebay.planners.layout.table import Column, Table

__all__ = ["Improver", "Turns"]

EXACT_MOST = 2000
"""Buffers of the largest part that is searched exactly: the pairs of those that meet are listed."""

LASTING = (("fullest-longest", True), ("fullest-largest", True), ("longest", False), ("area", True))
"""Orders of exact searches that go on until they have seen everything (one that ends without a layout is the proof),
and whether the fullest section comes first where a part is entered: minimalloc's three preorders, and ``area``, which
finds its instances B and D after 648 and 7,946 nodes, where those take 184,210 and 39,468."""

SPRINTS = (500, 1000, 2000, 4000, 8000, 16_000)
"""Nodes that each of them has, by turns, before anything else is tried: a tenth of a second in all. What minimalloc's
search finds is mostly found by one of its preorders soon, and each other search takes as long for one turn."""

NODES = 64_000
"""Nodes of one of their turns after that: some tens of milliseconds, as long as a turn of the others."""

RESTARTS = 3
"""Searches with orders of their own between two turns of those."""


class Improver(Protocol):
    """A search that keeps the lowest layout that it has seen."""

    best: Found

    def advance(self) -> None:
        """Goes on for some tens of milliseconds."""


@final
class Turns:
    """Exact searches, where ``table`` is no larger than ``EXACT_MOST``, and ``improvers``: first all of the exact ones
    for a short while (``SPRINTS``), then a turn of the one, a turn of the other. ``best`` is the lowest layout so far;
    the exact ones search for what ``aim`` wants where that is known. They can be halted, and go on later from where
    they were."""

    def __init__(self, table: Table, aim: Aim, best: Found, improvers: Sequence[Improver]) -> None:
        self.best = best
        self._improvers, self._next = len(improvers), cycle(improvers)
        small = len(table) <= EXACT_MOST
        self._exact = _exact_turns(table, aim.target(best.height)) if small else None
        self._sprints = len(SPRINTS) * len(LASTING) if small else 0

    def advance(self, aim: Aim) -> Found:
        """Goes on until ``aim`` is met, or nothing is left to search. Returns the best, ``exhausted`` where it is
        proven that none is within the capacity."""
        while (self._exact is not None or self._improvers) and not aim.met(self.best.height):
            if self._settled(aim) or aim.met(self.best.height):
                break
            if self._sprints and self._exact is not None:
                self._sprints -= 1
            elif self._improvers:
                improver = next(self._next)
                improver.advance()
                self.best = lower_of(self.best, improver.best)
        return self.best

    def _settled(self, aim: Aim) -> bool:
        """A turn of the exact searches; whether they have found what they were to find, or that there is none."""
        outcome, found = next(self._exact) if self._exact is not None else (Outcome.PAUSED, None)
        if outcome is Outcome.PAUSED:
            return False
        self._exact = None
        if found is not None:
            self.best = lower_of(self.best, found)
        elif aim.fits(self.best.height):
            return False  # nothing reaches the bound, and there may be something between that and the best
        else:
            self.best = replace(self.best, exhausted=True)
        return True


def _exact_turns(table: Table, target: int) -> Iterator[tuple[Outcome, Found | None]]:
    """Exact searches for ``target`` bytes in turns: what each turn ended with, and the layout where it has found
    one."""
    task = task_of(table)
    lasting = [
        Search(table, task._replace(fullest=fullest), target, order_by(table, name)) for name, fullest in LASTING
    ]
    restarts = Restarts(table, task, target)

    def told(outcome: Outcome, offsets: Column) -> tuple[Outcome, Found | None]:
        if outcome is not Outcome.FOUND:
            return outcome, None
        return outcome, Found(offsets, int((offsets + table.size).max()), "exact search")

    for nodes in SPRINTS:
        for search in lasting:
            yield told(search.advance(nodes), search.offsets)
    while True:
        for search in lasting:
            yield told(search.advance(NODES), search.offsets)
        for _ in range(RESTARTS):
            yield told(restarts.advance(), restarts.offsets)
