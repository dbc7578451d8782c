"""PyTorch's caching allocator with expandable segments. No torch.

Every stream has one segment for small and one for large requests, whose addresses go on for as long as the device has
memory, and whose pages (2 and 20 MiB) are mapped as they are needed. So a request that no free block holds does not
need a segment of its own: the free bytes at the end of what is mapped are a part of it. The block at the end counts as
one without an end: a larger one that has an end is taken before it. Pages are given back only when memory is short,
which is not modelled (``ExpandableSegment``, ``get_free_block`` and ``try_allocate_expandable_block`` of
``c10/cuda/CUDACachingAllocator.cpp``).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from typing import final

from forebay.recording import Box
from forebay.simulation.allocators.base import (
    LARGE_SEGMENT,
    SMALL_LIMIT,
    SMALL_SEGMENT,
    Allocator,
    Segment,
    rounded,
)

__all__ = ["ExpandableAllocator"]

APART = 1 << 50
"""Bytes of addresses between two segments."""


@final
class _Range:
    """One segment: its first address, the bytes that are mapped, and what of them is free."""

    def __init__(self, base: int, page: int) -> None:
        self.base, self._page, self.mapped = base, page, 0
        self._holes: list[tuple[int, int]] = []  # address and bytes, by address
        self.boxes: dict[int, Box] = {}

    def take(self, number: int, size: int) -> Box:
        address = self._found(size)
        if address is None:
            address = self._grown(size)
        at = bisect_left(self._holes, (address, 0))
        _, nbytes = self._holes.pop(at)
        if nbytes > size:
            self._holes.insert(at, (address + size, nbytes - size))
        self.boxes[number] = Box(number, address, size)
        return self.boxes[number]

    def _found(self, size: int) -> int | None:
        """The address of the smallest hole that holds ``size`` bytes, if it is not the one at the end; then of the next
        larger one, if there is one."""
        fitting = sorted((nbytes, address) for address, nbytes in self._holes if nbytes >= size)
        if len(fitting) > 1 and sum(fitting[0]) == self.base + self.mapped:
            return fitting[1][1]
        return fitting[0][1] if fitting else None

    def give_back(self, number: int) -> None:
        box = self.boxes.pop(number)
        address, nbytes = box.address, box.nbytes
        at = bisect_right(self._holes, (address, 0))
        if at < len(self._holes) and self._holes[at][0] == address + nbytes:
            nbytes += self._holes.pop(at)[1]
        if at and sum(self._holes[at - 1]) == address:
            before = self._holes.pop(at - 1)
            address, nbytes = before[0], before[1] + nbytes
        insort(self._holes, (address, nbytes))

    def _grown(self, size: int) -> int:
        """Maps pages so that a hole at the end holds ``size`` bytes; returns its address."""
        end = self.base + self.mapped
        start = end
        if self._holes and sum(self._holes[-1]) == end:
            start = self._holes.pop()[0]
        pages = -(-(start + size - end) // self._page)
        self.mapped += pages * self._page
        self._holes.append((start, self.base + self.mapped - start))
        return start


@final
class ExpandableAllocator(Allocator):
    """The model."""

    def __init__(self) -> None:
        self._ranges: dict[tuple[int, bool], _Range] = {}
        self._owner: dict[int, _Range] = {}

    @property
    def reserved(self) -> int:
        """Bytes of all pages that are mapped."""
        return sum(one.mapped for one in self._ranges.values())

    def allocate(self, number: int, nbytes: int, stream: int) -> tuple[Box, ...]:
        """See ``Allocator``."""
        if nbytes == 0:
            return ()
        size = rounded(nbytes)
        key = stream, size <= SMALL_LIMIT
        if key not in self._ranges:
            page = SMALL_SEGMENT if key[1] else LARGE_SEGMENT
            self._ranges[key] = _Range(len(self._ranges) * APART, page)
        self._owner[number] = self._ranges[key]
        return (self._ranges[key].take(number, size),)

    def free(self, number: int) -> None:
        """See ``Allocator``."""
        owner = self._owner.pop(number, None)
        if owner is not None:
            owner.give_back(number)

    def segments(self) -> Iterator[Segment]:
        """See ``Allocator``."""
        for one in self._ranges.values():
            yield Segment(one.base, one.mapped, tuple(one.boxes.values()))
