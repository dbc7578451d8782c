"""What lies at the bottom without any loss, and the parts that are left above it. No torch.

Of a part of time take a buffer that is live in all of its sections. In any layout it divides the memory of the part in
two: what is below it can be moved up by its size, and it down to the bottom, and the height stays the same. So it is
given the bottom, and no search need ask where it goes. What it held together may now fall into parts that share no
time, of which the same is true again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from math import lcm

import numpy as np
from numpy.typing import NDArray

from forebay.planners.layout.table import Column, Table, parts_of

__all__ = ["Raised", "grounded"]

NEVER = 1 << 62
"""No buffer has a multiple of so many bytes."""

WORK = 300_000
"""Rows that are looked at, each part's anew where one is given the bottom: a tenth of a second. Where lives are nested,
each part is but one row smaller than that before it, and all of them are as many rows as there are pairs."""


@dataclass(frozen=True, eq=False)
class Raised:
    """A part whose addresses begin at ``base`` bytes."""

    part: Table
    base: int

    @property
    def peak(self) -> int:
        """Bytes that it reaches at least."""
        return self.base + self.part.peak


def grounded(table: Table, offsets: Column) -> Iterator[Raised]:
    """Writes the addresses of all buffers of ``table`` that can have the bottom into ``offsets``, at their numbers, and
    gives the parts that are left, in no order. After ``WORK`` rows these are left as they are: nothing is lost by that
    but what a search is spared."""
    waiting = deque(Raised(part, 0) for part in parts_of(table))
    work = 0
    while waiting and work < WORK:
        one = waiting.popleft()  # level by level: no part uses up what others are looked at with
        work += len(one.part)
        through = _through(one.part)
        if not through.any():
            yield one
            continue
        sizes = one.part.size[through]
        tops = one.base + np.cumsum(sizes)
        offsets[one.part.number[through]] = tops - sizes
        waiting += [Raised(part, int(tops[-1])) for part in parts_of(one.part.rows(~through))]
    yield from waiting


def _through(part: Table) -> NDArray[np.bool_]:
    """The buffers that are live in all sections, and after whose bytes every address is as well aligned as before."""
    start, stop = part.sections
    step = min(lcm(*np.unique(part.alignment).tolist()), NEVER)
    found: NDArray[np.bool_] = (start == 0) & (stop == stop.max()) & (part.size % step == 0)
    return found
