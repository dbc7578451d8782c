"""Searches through time with many partial layouts, each with more of them than those before. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np

from forebay.planners.layout.aim import Found
from forebay.planners.layout.draws import sown
from forebay.planners.layout.sweeping import (
    FEWEST,
    WAITING,
    Course,
    Fronts,
    Offers,
    choose,
    look_ahead,
    offer,
    room_for_needs,
)
from forebay.planners.layout.table import Column, Table

__all__ = ["Sweeps"]

WIDTH = 30
"""Partial layouts that the first searches keep."""

WIDER = 3
"""How many times as many the next ones keep, once each order was tried in both directions."""

WIDEST = 1 << 26
"""Bytes that one search takes at most: its partial layouts, those that come of them, and addresses to choose from."""

OFFER = 24
"""Bytes of one such address."""

AHEAD = 8
"""Sections in which room for those in wait is looked for, which takes most of the time: with 25 and 60 three sets of
``loose`` took 2.1 to 2.6 and 4.6 to 14 times as long (docs/log.md, 2026-11-23)."""

NOISE = 6.0
"""Sections by which an address is made worse at random, from the second width on: what is as good as another is mostly
like it."""

WORK = 10_000
"""Addresses that are looked at in one go, between two looks at the clock: some tens of milliseconds."""

SEED = 1
"""Where the pseudo-random numbers begin: the same search for the same buffers."""


@dataclass
class _Run:
    """One search: where it goes, its partial layouts (the first ``count`` of ``fronts``), room for those that come of
    them, and how many buffers have found a place in each."""

    course: Course
    fronts: Fronts
    following: Fronts
    offers: Offers
    count: int = 1
    placed: int = 0


@final
class Sweeps:
    """Searches for a layout of ``table`` within ``capacity`` bytes, which ``best`` becomes; no alignment may be asked
    for that not all sizes have. They go forwards and backwards through time; of those that come together the longest
    lives are placed first, or the most bytes."""

    def __init__(self, table: Table, best: Found, capacity: int) -> None:
        self._table, self._capacity, self.best = table, capacity // table.unit * table.unit, best
        spans = _spans(table.lower, table.upper), _spans(-table.upper, -table.lower)
        self._ways = [(start, stop, first) for start, stop in spans for first in (stop - start, table.size)]
        draw = np.random.default_rng(SEED)
        self._marks = draw.integers(1, 1 << 63, len(table)).astype(np.uint64)
        self._state = sown()
        self._widest = max(WIDTH, WIDEST // (2 * 8 * len(table) + OFFER * FEWEST))
        self._needs = room_for_needs(AHEAD)
        self._width, self._turn = WIDTH, 0
        self._run = self._begun()

    def advance(self) -> None:
        """Goes on for some tens of milliseconds."""
        if self.best.height <= self._capacity or self._table.peak > self._capacity:
            return
        done = 0
        while done < WORK:
            made, kept = self._further()
            done += made + 1
            if kept and self._run.placed < len(self._table):
                continue
            if kept:
                offsets = self._run.fronts.offsets[0].copy()
                self.best = Found(offsets, int((offsets + self._table.size).max()), "sweep")
                return
            self._turn += 1
            if self._turn % len(self._ways) == 0:
                self._width = min(self._widest, self._width * WIDER)
            self._run = self._begun()

    def _further(self) -> tuple[int, int]:
        """One buffer more for all partial layouts; how many addresses there were, and how many are kept."""
        run = self._run
        noise = NOISE if self._turn >= len(self._ways) else 0.0
        made = offer(run.course, run.placed, run.fronts, run.count, noise, self._state, run.offers)
        look_ahead(run.course, run.placed + 1, self._needs)
        kept = choose(run.course, run.placed, run.fronts, run.offers, made, self._needs, self._marks, run.following)
        run.fronts, run.following = run.following, run.fronts
        run.count, run.placed = kept, run.placed + 1
        return made, kept

    def _begun(self) -> _Run:
        """A search in which nothing has found a place yet, the next way through time."""
        start, stop, first = self._ways[self._turn % len(self._ways)]
        order: Column = np.lexsort((-first, start)).astype(np.int64)
        course = Course(start, stop, self._table.size, order, self._capacity)
        most = self._width * FEWEST
        offers = Offers(np.empty(most, np.int64), np.empty(most, np.int64), np.empty(most))
        fronts = [_fronts(self._width, len(order)) for _ in range(2)]
        return _Run(course, fronts[0], fronts[1], offers)


def _spans(lower: Column, upper: Column) -> tuple[Column, Column]:
    """Of each buffer the place, among the times at which any comes, at which it comes, and of the first at which it is
    gone."""
    begins = np.unique(lower)
    return np.searchsorted(begins, lower).astype(np.int64), np.searchsorted(begins, upper).astype(np.int64)


def _fronts(width: int, count: int) -> Fronts:
    """Room for as many partial layouts as ``width``, in which nobody has an address."""
    return Fronts(np.full((width, count), WAITING, np.int64), np.zeros(width))
