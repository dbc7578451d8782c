"""Memory as addresses, for policies to which free bytes at different places are not the same."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

__all__ = ["FREE", "Pool"]

FREE = -1
"""The holder of what nobody has."""


@final
class Pool:
    """Neighbouring pieces of memory in the order of their addresses: ``holders`` have them, and ``sizes`` are their
    bytes. No two that are free are neighbours; ``free`` are the bytes of all of these."""

    def __init__(self, nbytes: int) -> None:
        self.free = max(0, nbytes)
        self.holders = [FREE] if self.free else []
        self.sizes = [self.free] if self.free else []

    def place(self, holder: int, nbytes: int, *, high: bool = False) -> bool:
        """Gives ``holder`` the lowest free addresses of so many bytes, one or more, or the highest ones; False where
        there are none that are neighbours."""
        places = range(len(self.sizes))
        for at in reversed(places) if high else places:
            if self.holders[at] == FREE and self.sizes[at] >= nbytes:
                rest = self.sizes[at] - nbytes
                # What is left is free on the side that was not asked for.
                self.holders[at : at + 1] = ([FREE, holder] if high else [holder, FREE]) if rest else [holder]
                self.sizes[at : at + 1] = ([rest, nbytes] if high else [nbytes, rest]) if rest else [nbytes]
                self.free -= nbytes
                return True
        return False

    def release(self, holder: int) -> None:
        """Takes from ``holder`` what it has, if anything."""
        if holder not in self.holders:
            return
        at = self.holders.index(holder)
        self.free += self.sizes[at]
        first = at - 1 if at and self.holders[at - 1] == FREE else at
        behind = at + 2 if self.holders[at + 1 : at + 2] == [FREE] else at + 1
        self.sizes[first:behind] = [sum(self.sizes[first:behind])]
        self.holders[first:behind] = [FREE]

    def compact(self) -> None:
        """Moves all to the lowest addresses, in their order."""
        kept = [(holder, size) for holder, size in zip(self.holders, self.sizes, strict=True) if holder != FREE]
        kept += [(FREE, self.free)] if self.free else []
        self.holders, self.sizes = [holder for holder, _ in kept], [size for _, size in kept]

    def beside(self, count: int) -> NDArray[Any]:
        """Of each of so many holders the free bytes on either side; 0 of those that have nothing."""
        holders, sizes = np.array([FREE, *self.holders, FREE]), np.array([0, *self.sizes, 0], dtype=np.float64)
        free = np.where(holders == FREE, sizes, 0.0)
        around = free[:-2] + free[2:]
        found = np.zeros(count)
        held = holders[1:-1] != FREE
        found[holders[1:-1][held]] = around[held]
        return found

    def window(self, nbytes: int, costs: Sequence[float]) -> list[int] | None:
        """The holders of the neighbouring pieces of ``nbytes`` together at least that cost the least together, by the
        ``costs`` of each; those of infinite costs have to stay. None where they leave no such window."""
        owns = np.array([0.0 if holder == FREE else costs[holder] for holder in self.holders])
        stay = owns == inf
        bytes_before, costs_before, staying = (
            np.concatenate([[0], np.cumsum(row)]) for row in (self.sizes, np.where(stay, 0.0, owns), stay)
        )
        # Of all windows that begin with one piece the shortest costs the least.
        ends = np.searchsorted(bytes_before, bytes_before[:-1] + nbytes)
        firsts = np.flatnonzero(ends < len(bytes_before))
        firsts = firsts[staying[ends[firsts]] == staying[firsts]]
        if not len(firsts):
            return None
        first = firsts[np.argmin(costs_before[ends[firsts]] - costs_before[firsts])]
        return [holder for holder in self.holders[first : ends[first]] if holder != FREE]
