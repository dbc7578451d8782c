"""Exact searches on blocks that buffers are joined to. No torch.

Pairs of buffers are joined (``joining``) until a fraction as many are left, and these are searched for a short time, at
the capacity that there is. A layout of the blocks is one of what they are made of; that there is none proves nothing,
since the wrong ones may have been joined, and the next time they are chosen a little differently. (Multilevel search:
Walshaw, "Multilevel refinement for combinatorial optimisation problems", Annals of Operations Research, 2004.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np

from forebay.planners.layout.aim import Deadline, Found
from forebay.planners.layout.draws import sown
from forebay.planners.layout.exact import Search, task_of
from forebay.planners.layout.ground import grounded
from forebay.planners.layout.joining import Blocks, Taste, join
from forebay.planners.layout.orders import order_by
from forebay.planners.layout.placing import Outcome
from forebay.planners.layout.table import Column, Table

__all__ = ["Multilevel"]

SEED = 1
"""Where the pseudo-random numbers begin: the same search for the same buffers."""

NOISE = (0.1, 0.3, 1.0)
"""By how much scores are made worse at random."""

GRAIN = 64
"""The part of the capacity that counts beside the room of a section."""

ORDERS = ("pressure-length", "area", "pressure", "length")
"""What the searches prefer."""


@final
@dataclass(frozen=True)
class Manner:
    """How far buffers are joined, and how long the blocks are searched: ``shares`` are the blocks that are left, as a
    share of the buffers (0: as long as any two have room), ``calm`` how much the area of a block counts beside what it
    wastes, ``nodes`` those of one search, some milliseconds."""

    shares: tuple[float, ...]
    calm: tuple[float, ...]
    nodes: int


MANNERS = (
    Manner((0.0, 0.15, 0.45, 0.6, 0.75), (0.0, 0.0, 0.1, 1.0), 2000),
    Manner((0.3, 0.45, 0.6, 0.75, 0.9), (0.0, 0.1, 1.0, 10.0), 8000),
)
"""In turn. What straight cuts take apart is put together again by joining alone, or all but a few blocks; other sets
are found by the longer search of less joined blocks alone (docs/log.md, 2026-11-22)."""

TRIES = 4
"""Sets of blocks in one go, if there is time, as many of each manner: 80 to 110 milliseconds (CPU, medians) of
220 to 420 buffers, 180 at most."""


@final
class Multilevel:
    """Searches for a layout of ``table`` within ``capacity`` bytes, which ``best`` becomes; no alignment may be asked
    for that not all sizes have. When ``deadline`` is over, a turn ends with the set of blocks that it is at."""

    def __init__(self, table: Table, best: Found, capacity: int, deadline: Deadline) -> None:
        self._table, self._capacity, self.best, self._deadline = table, capacity, best, deadline
        self._tries = 0
        self._draw, self._state = np.random.default_rng(SEED), sown()
        self._start, self._stop = table.sections
        self._room = np.full(int(self._stop.max()), capacity, np.int64)
        for row in range(len(table)):
            self._room[self._start[row] : self._stop[row]] -= table.size[row]
        self._area = float((table.size * (self._stop - self._start)).sum())

    def advance(self) -> None:
        """Some sets of blocks more, at least one."""
        for tried in range(TRIES):
            if self.best.height <= self._capacity or (tried and self._deadline.over):
                break
            self._try()

    def _try(self) -> None:
        draw, count = self._draw, len(self._table)
        manner = MANNERS[self._tries % len(MANNERS)]
        self._tries += 1
        taste = Taste(
            max(1, self._capacity // GRAIN), float(draw.choice(manner.calm)), self._area, float(draw.choice(NOISE))
        )
        blocks = self._unjoined()
        fewest = max(1, int(draw.choice(manner.shares) * count))
        made = join(blocks, count, self._room.copy(), fewest, taste, self._state)
        offsets = self._laid_out(blocks, made, manner.nodes)
        if offsets is not None:
            self.best = Found(offsets, int((offsets + self._table.size).max()), "joined blocks")

    def _unjoined(self) -> Blocks:
        """The buffers, and room for as many blocks."""
        count = len(self._table)
        start, stop, size, whole = np.zeros((4, 2 * count), np.int64)
        start[:count], stop[:count], size[:count], whole[:count] = self._start, self._stop, self._table.size, 1
        lower, upper = np.full((2, 2 * count), -1, np.int64)
        return Blocks(start, stop, size, lower, upper, np.zeros(2 * count, np.uint8), whole.astype(np.uint8))

    def _laid_out(self, blocks: Blocks, made: int, nodes: int) -> Column | None:
        """The addresses of all buffers by those of the blocks; None where none were found."""
        rows = np.flatnonzero(blocks.whole)
        start, stop, free = blocks.start[rows], blocks.stop[rows], np.ones(len(rows), np.int64)
        whole = Table(rows, start, stop, blocks.size[rows], free, stop - start)
        offsets = np.zeros(made, np.int64)
        for one in sorted(grounded(whole, offsets), key=lambda one: -one.peak):
            order = order_by(one.part, str(self._draw.choice(ORDERS)))
            search = Search(one.part, task_of(one.part), self._capacity - one.base, order)
            if search.advance(nodes) is not Outcome.FOUND:
                return None
            offsets[one.part.number] = one.base + search.offsets
        for block in range(made - 1, len(self._table) - 1, -1):  # blocks come after what they are made of
            lower, upper = blocks.lower[block], blocks.upper[block]
            offsets[lower] = offsets[block]
            offsets[upper] = offsets[block] + (blocks.size[lower] if blocks.stacked[block] else 0)
        return offsets[: len(self._table)].copy()
