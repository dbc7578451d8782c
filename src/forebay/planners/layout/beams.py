"""Searches with many partial layouts at a time, each with more of them than the one before. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

import numpy as np

from forebay.planners.layout.aim import Aim, Found
from forebay.planners.layout.beam import FEWEST, Children, Level, grow, keep
from forebay.planners.layout.placing import Task
from forebay.planners.layout.table import Column, Table

__all__ = ["Beams"]

WIDTH = 64
"""Partial layouts that the first search keeps."""

WIDER = 2
"""How many times as many are kept once a height was not reached."""

WIDEST = 1 << 23
"""Bytes that the partial layouts of one search take at most."""

CHILD = 32
"""Bytes of one child."""

WORK = 6000
"""Children that are looked at in one go, between two looks at the clock: some tens of milliseconds."""

CALM = (0.2, 0.05)
"""How much area counts beside waste: one after the other."""

NOISE = 0.1
"""The most by which the score of a child is made worse at random, as a share: those that are as good as each other are
mostly alike, and have the same faults."""

GRAIN = 64
"""The part of the capacity that counts beside the bytes that a section may waste, so that the tightest sections do not
decide alone."""

NEAR = 0.002
"""Heights that are nearer than this share of the bound are not told apart until more partial layouts are kept."""

SEED = 1
"""Where the pseudo-random numbers begin: the same search for the same buffers."""


@dataclass
class _Run:
    """One search for a layout of ``target`` bytes: its partial layouts (the first ``count`` of ``level``), room for
    those that come of them, and of each step so far the parents, rows and addresses of those that were kept."""

    target: int
    level: Level
    following: Level
    children: Children
    count: int = 1
    steps: list[tuple[Column, Column, Column]] = field(default_factory=list)


@final
class Beams:
    """Searches on one table (its ``task``: ``exact.task_of``) for layouts that are lower than ``best``, which becomes
    the lowest of them: within the capacity of ``aim``, as long as there is none; else half way between the best and the
    highest that was tried in vain."""

    def __init__(self, table: Table, task: Task, best: Found, aim: Aim) -> None:
        self._table, self._task, self._aim = table, task, aim
        self._draw = np.random.default_rng(SEED)
        count, sections = len(table), len(task.members_at) - 1
        self._total = np.zeros(sections, np.int64)
        for row in range(count):
            self._total[task.start[row] : task.stop[row]] += task.size[row]
        area = table.size.astype(float) * table.length
        self._areas = area / area.sum()
        self._marks = self._draw.integers(1, 1 << 63, count).astype(np.uint64)
        self._widest = max(WIDTH, WIDEST // (8 * sections + count + CHILD * min(FEWEST, count)))
        self._width, self._turn, self._missed = WIDTH, 0, aim.bound
        self.best = best
        self._run = self._begun()

    def advance(self) -> None:
        """Goes on for some tens of milliseconds."""
        done = 0
        while done < WORK:
            made, kept = self._further()
            done += made + 1
            if kept and len(self._run.steps) < len(self._table):
                continue
            if kept:
                offsets = self._offsets()
                self.best = Found(offsets, int((offsets + self._table.size).max()), "beam search")
            else:
                self._miss()
            self._run = self._begun()
            if self.best.height <= self._aim.bound:
                return

    def _further(self) -> tuple[int, int]:
        """One buffer more for all partial layouts; how many there were then, and how many are kept."""
        run, children, task = self._run, self._run.children, self._task
        room, calm, grain = run.target - self._total, CALM[self._turn % len(CALM)], max(1, run.target // GRAIN)
        made = grow(task, run.level, run.count, self._areas, room, run.target, calm, grain, children)
        children.score[:made] *= 1 + NOISE * self._draw.random(made)
        chosen = np.empty(self._width, np.int64)
        kept = keep(task, run.level, children, made, self._marks, self._areas, chosen, run.following)
        which = chosen[:kept]
        run.steps.append((children.parent[which], children.row[which], children.place[which]))
        run.level, run.following, run.count = run.following, run.level, kept
        return made, kept

    def _miss(self) -> None:
        """There was no layout as low as was tried, among those that were kept."""
        self._turn += 1
        self._missed = self._run.target
        near = self.best.height - self._run.target <= NEAR * self._aim.bound
        if near or not self._aim.fits(self.best.height):
            self._width = min(self._widest, self._width * WIDER)
            self._missed = self._aim.bound

    def _offsets(self) -> Column:
        """The addresses of the first partial layout, which is whole."""
        found, at = np.zeros(len(self._table), np.int64), 0
        for parents, rows, places in reversed(self._run.steps):
            found[rows[at]] = places[at]
            at = parents[at]
        return found

    def _begun(self) -> _Run:
        """A search in which nothing has found a place yet."""
        within = self._aim.next_target(self.best.height, self._missed)
        count, sections, width = len(self._areas), len(self._total), self._width
        most = width * min(FEWEST, count)
        parent, row, place = (np.empty(most, np.int64) for _ in range(3))
        children = Children(parent, row, place, np.empty(most))
        levels = [_level(width, count, sections) for _ in range(2)]
        return _Run(max(within, self._table.peak), levels[0], levels[1], children)


def _level(width: int, count: int, sections: int) -> Level:
    """Room for as many partial layouts as ``width``; in the first nothing has found a place yet."""
    return Level(
        np.zeros((width, sections), np.int64),
        np.ones((width, count), np.uint8),
        np.zeros(width, np.int64),
        np.zeros(width, np.uint64),
        np.zeros(width),
    )
