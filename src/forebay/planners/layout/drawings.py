"""A search for layouts that leave nothing free, or little, by drawing a graph without crossings. No torch.

``dissections`` says which graph: where it is known of all times how what ends and begins is shared among segments, one
test tells whether there is a layout, and gives it. At most times there is one way. Those at which there are more are
decided one after the other, and what cannot be drawn together is remembered (``conflicts``).
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import final

import numpy as np

from forebay.planners.layout.aim import Found
from forebay.planners.layout.conflicts import Choice, Conflicts, Steps
from forebay.planners.layout.dissections import Edge, Moment, Way, addresses, drawn, edges_of, moments_of
from forebay.planners.layout.table import Table

__all__ = ["Drawings"]

WORK = 240_000
"""Edges that are drawn in one go, at half a microsecond each: a tenth of a second, three turns of most others, since
where as much comes as goes nothing else finds as many."""

BALANCED = 0.3
"""The share of the times at which as many bytes come as go, below which nothing is tried: memory that is free there
would be taken for the wrong pieces."""

Decided = list[tuple[int, Way]]


@final
class Drawings:
    """Searches for a layout of ``table`` within ``capacity`` bytes, which ``best`` becomes; no alignment may be asked
    for that not all sizes have."""

    def __init__(self, table: Table, best: Found, capacity: int) -> None:
        self._table, self._capacity, self.best = table, capacity // table.unit * table.unit, best
        self._steps = self._search()

    def advance(self) -> None:
        """Goes on for a tenth of a second; does nothing once there is nothing left to try."""
        done = 0
        while done < WORK and next(self._steps, True) is None:
            done += len(self._table)

    def _search(self) -> Generator[None, None, None]:
        if self._table.peak > self._capacity or not _is_even(self._table):
            return
        edges = edges_of(self._table, self._capacity)
        moments = moments_of(edges)
        decided: Decided = [(one.time, one.ways[0]) for one in moments if len(one.ways) == 1]
        unsure = [one for one in moments if len(one.ways) > 1]
        yield
        if not drawn(edges, decided) or not (yield from _narrowed(edges, decided, unsure)):
            return

        def decisions(choices: Sequence[Choice]) -> Decided:
            return [*decided, *((unsure[place].time, unsure[place].ways[way]) for place, way in choices)]

        search = Conflicts([len(one.ways) for one in unsure], lambda choices: drawn(edges, decisions(choices)))
        choices = yield from search.solve()
        if choices is not None:
            offsets = addresses(edges, decisions(choices), len(self._table))
            self.best = Found(offsets, int((offsets + self._table.size).max()), "drawing")


def _narrowed(edges: Sequence[Edge], decided: Decided, unsure: list[Moment]) -> Steps[bool]:
    """Leaves of the ways of each moment those that can be drawn with what is ``decided``, and moves those that have one
    left to there, until that changes nothing. Whether all have one."""
    before = -1
    while before != len(decided):
        before = len(decided)
        for place in reversed(range(len(unsure))):
            moment, ways = unsure.pop(place), list[Way]()
            for way in moment.ways:
                yield
                if drawn(edges, [*decided, (moment.time, way)]):
                    ways.append(way)
            if not ways:
                return False
            if len(ways) == 1:
                decided.append((moment.time, ways[0]))
            else:
                unsure.insert(place, replace(moment, ways=tuple(ways)))
    return True


def _is_even(table: Table) -> bool:
    """Whether as much comes as goes at enough times."""
    times = np.unique(np.concatenate([table.lower, table.upper]))
    inner = np.diff(table.live[times])[:-1]
    return bool((inner == 0).sum() >= BALANCED * len(inner))
