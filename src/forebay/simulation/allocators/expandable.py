"""PyTorch's caching allocator with expandable segments. No torch.

Every stream has one segment for small and one for large requests, whose addresses go on for as long as the device has
memory, and whose pages (2 and 20 MiB) are mapped as they are needed. So a request that no free block holds does not
need a segment of its own: free bytes before pages that are not mapped are a part of it. Such a block counts with what
is not mapped behind it, the one at the end as one without an end: a larger one that has less is taken before it. Where
there is a limit, and one more segment would be over it, all pages that nobody has a byte of are given back first
(``ExpandableSegment``, ``get_free_block``, ``find_expandable_block``, ``try_allocate_expandable_block`` and
``release_cached_blocks`` of ``c10/cuda/CUDACachingAllocator.cpp``).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from math import inf
from typing import final

from forebay.recording import Box
from forebay.simulation.allocators.base import (
    LARGE_SEGMENT,
    SMALL_LIMIT,
    SMALL_SEGMENT,
    Allocator,
    Segment,
    rounded,
    segment_nbytes,
)

__all__ = ["ExpandableAllocator"]

APART = 1 << 50
"""Bytes of addresses between two segments."""


@final
class _Spans:
    """Ranges of addresses that do not touch: those that come to touch are one."""

    def __init__(self) -> None:
        self._spans: list[tuple[int, int]] = []  # address and bytes, by address

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self._spans)

    def at(self, address: int) -> int:
        """Bytes of the one that begins at ``address``; 0 if none does."""
        place = bisect_left(self._spans, (address, 0))
        found = self._spans[place : place + 1]
        return found[0][1] if found and found[0][0] == address else 0

    def before(self, address: int) -> int:
        """Where the one begins that ends at ``address``; ``address`` if none does."""
        place = bisect_left(self._spans, (address, 0)) - 1
        return self._spans[place][0] if place >= 0 and sum(self._spans[place]) == address else address

    def add(self, address: int, nbytes: int) -> None:
        """Puts ``nbytes`` from ``address`` on in."""
        place = bisect_right(self._spans, (address, 0))
        if place < len(self._spans) and self._spans[place][0] == address + nbytes:
            nbytes += self._spans.pop(place)[1]
        if place and sum(self._spans[place - 1]) == address:
            before = self._spans.pop(place - 1)
            address, nbytes = before[0], before[1] + nbytes
        insort(self._spans, (address, nbytes))

    def take(self, address: int, nbytes: int) -> None:
        """Takes the first ``nbytes`` of the one at ``address`` out."""
        place = bisect_left(self._spans, (address, 0))
        _, whole = self._spans.pop(place)
        if whole > nbytes:
            self._spans.insert(place, (address + nbytes, whole - nbytes))


@final
class _Range:
    """One segment: its first address, how many bytes are mapped, what of them is free (``holes``), and what lies
    between mapped pages and is not mapped (``gaps``). Behind ``top`` nothing is."""

    def __init__(self, base: int, page: int) -> None:
        self.base, self._page, self.mapped, self._top = base, page, 0, base
        self._holes, self._gaps = _Spans(), _Spans()
        self.boxes: dict[int, Box] = {}

    def holds(self, size: int) -> int | None:
        """The address of the free block that a request of ``size`` bytes gets; None if there is none."""
        fitting = [(nbytes, address) for address, nbytes in self._holes if nbytes >= size]
        if len(fitting) < 2:
            return fitting[0][1] if fitting else None
        fitting.sort()
        best: int | None = None
        reach: float = inf
        for nbytes, address in fitting:
            further = self._reach(address, nbytes)
            if best is not None and further >= reach:
                break
            best, reach = address, further
        return best

    def take(self, number: int, address: int, size: int) -> Box:
        """Gives request ``number`` the first ``size`` bytes of the free block at ``address``."""
        self._holes.take(address, size)
        self.boxes[number] = Box(number, address, size)
        return self.boxes[number]

    def give_back(self, number: int) -> None:
        """Frees the bytes of request ``number``."""
        box = self.boxes.pop(number)
        self._holes.add(box.address, box.nbytes)

    def grown(self, size: int) -> int:
        """Maps pages so that a free block holds ``size`` bytes; returns its address."""
        start = next((self._holes.before(gap) for gap, _ in self._gaps if self._room(gap) >= size), None)
        if start is None:
            start = self._holes.before(self._top)
        while (there := self._holes.at(start)) < size:
            self._map(start + there, size - there)
        return start

    def shrink(self) -> None:
        """Gives back all pages that are free as a whole."""
        for address, nbytes in list(self._holes):
            first = self.base + rounded(address - self.base, self._page) if address > self.base else address
            last = self.base + (address + nbytes - self.base) // self._page * self._page
            if first >= last:
                continue
            self._holes.take(address, nbytes)
            for begin, end in ((address, first), (last, address + nbytes)):
                if begin < end:
                    self._holes.add(begin, end - begin)
            self.mapped -= last - first
            self._gaps.add(first, last - first)
            if last == self._top:
                self._top = self._gaps.before(last)
                self._gaps.take(self._top, last - self._top)

    def _reach(self, address: int, nbytes: int) -> float:
        """Bytes of a free block with what is not mapped behind it."""
        end = address + nbytes
        return inf if end == self._top else nbytes + self._gaps.at(end)

    def _room(self, gap: int) -> float:
        """Bytes from the free block before a gap on to the next byte that somebody has."""
        start = at = self._holes.before(gap)
        while at < self._top:
            nbytes = self._holes.at(at) or self._gaps.at(at)
            if not nbytes:
                return at - start
            at += nbytes
        return inf

    def _map(self, address: int, wanted: int) -> None:
        """Maps pages from ``address`` on, of the gap there or behind the top, for ``wanted`` bytes."""
        gap = self._gaps.at(address)
        nbytes = min(gap or rounded(wanted, self._page), rounded(wanted, self._page))
        if gap:
            self._gaps.take(address, nbytes)
        else:
            self._top += nbytes
        self.mapped += nbytes
        self._holes.add(address, nbytes)


@final
class ExpandableAllocator(Allocator):
    """The model. ``limit``: bytes of the device (None: as many as are asked for). ``out_of_memory`` counts requests
    that go over it; they are served all the same."""

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit
        self._ranges: dict[tuple[int, bool], _Range] = {}
        self._owner: dict[int, _Range] = {}
        self.out_of_memory = 0

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
        one = self._owner[number] = self._ranges[key]
        address = one.holds(size)
        if address is None:
            self._make_room(segment_nbytes(size))
            address = one.grown(size)
        return (one.take(number, address, size),)

    def free(self, number: int) -> None:
        """See ``Allocator``."""
        owner = self._owner.pop(number, None)
        if owner is not None:
            owner.give_back(number)

    def segments(self) -> Iterator[Segment]:
        """See ``Allocator``. What is not mapped of a segment is no part of it."""
        for one in self._ranges.values():
            yield Segment(one.base, one.mapped, tuple(one.boxes.values()))

    def _make_room(self, nbytes: int) -> None:
        """Gives pages back where ``nbytes`` more would be over the limit."""
        if self._limit is not None and self.reserved + nbytes > self._limit:
            for one in self._ranges.values():
                one.shrink()
            self.out_of_memory += self.reserved + nbytes > self._limit
