"""What a planner of addresses is asked for, and what it answers. No torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import final

import numpy as np

from forebay.planners.layout.table import Column, Table

__all__ = ["Aim", "Deadline", "Found", "Planner", "lower_of"]


NEGLIGIBLE = 1e-4
"""Where no capacity is given: the share of the bound that a layout may be higher and is not searched for any further. A
hundredth of the 1 % that a planned run may reserve beside what is live, and less than its peak is known to."""


@final
class Deadline:
    """So many seconds from when it is made."""

    def __init__(self, seconds: float) -> None:
        self._start = time.perf_counter()
        self._end = self._start + seconds

    @property
    def spent(self) -> float:
        """Seconds since it was made."""
        return time.perf_counter() - self._start

    @property
    def over(self) -> bool:
        """Whether the seconds are gone."""
        return time.perf_counter() >= self._end

    @property
    def left(self) -> float:
        """Seconds that there are still, 0 where it is over."""
        return max(0.0, self._end - time.perf_counter())

    def put_off(self, seconds: float) -> None:
        """So many seconds were spent on something else: they do not count."""
        self._start += seconds
        self._end += seconds


@dataclass(frozen=True)
class Aim:
    """How low a layout is to be: below ``bound`` bytes there is none, and none is asked for; up to ``capacity`` bytes
    it is good enough once ``polish`` is over (None: once no more than ``NEGLIGIBLE`` is left). After ``deadline`` the
    best is taken. ``base`` bytes lie below all that, and count where shares are asked for."""

    bound: int
    capacity: int | None
    polish: Deadline
    deadline: Deadline
    base: int = 0

    @contextmanager
    def untimed(self) -> Iterator[None]:
        """What is done in the body takes nothing of the time that there is."""
        start = time.perf_counter()
        yield
        for deadline in (self.polish, self.deadline):
            deadline.put_off(time.perf_counter() - start)

    def above(self, base: int) -> Aim:
        """The same for what lies above ``base`` bytes."""
        room = None if self.capacity is None else self.capacity - base
        return replace(self, bound=self.bound - base, capacity=room, base=base)

    def within(self, seconds: float) -> Aim:
        """The same with so many seconds from now on, and no more than there are."""
        return replace(self, deadline=Deadline(min(seconds, self.deadline.left)))

    def fits(self, height: int) -> bool:
        """Whether a layout of so many bytes is good enough in the end."""
        return self.capacity is None or height <= self.capacity

    def target(self, height: int) -> int:
        """Bytes that a search is to reach, where a layout of ``height`` bytes is known."""
        return self.bound if self.capacity is None or self.fits(height) else self.capacity

    def next_target(self, height: int, missed: int) -> int:
        """Bytes that are to be tried where a layout of ``height`` is known, and ``missed`` bytes were tried in vain:
        what is wanted, and half way between the two where that is there."""
        return (missed + height) // 2 if self.fits(height) else self.target(height)

    def met(self, height: int) -> bool:
        """Whether a layout of so many bytes needs no further search now."""
        if height <= self.bound or self.deadline.over:
            return True
        if self.capacity is None:
            return height - self.bound <= NEGLIGIBLE * (self.base + self.bound)
        return height <= self.capacity and self.polish.over


@dataclass(frozen=True, eq=False)
class Found:
    """A layout of a table: the ``offsets`` of its rows and its ``height`` (bytes), and who found it. ``exhausted``: the
    search has proven that there is none within the capacity that was asked for."""

    offsets: Column = field(repr=False)
    height: int
    by: str
    exhausted: bool = False


Planner = Callable[[Table, Aim], Found]
"""Finds addresses for the rows of one part."""


def lower_of(one: Found | None, other: Found) -> Found:
    """The lower layout of two; of equal ones the first."""
    return other if one is None or other.height < one.height else one


def empty(table: Table) -> Column:
    """Room for the offsets of a table."""
    return np.zeros(len(table), np.int64)
