"""GMLake's allocator. No torch.

Guo et al., "GMLake: efficient and transparent GPU memory defragmentation for large-scale DNN training with virtual
memory stitching" (ASPLOS 2024), section 4. Memory is made of *primitive* blocks, which are physical chunks of 2 MiB
under one range of addresses. A request takes, in this order: a free block of its size; the smallest larger one, which
is split; several free ones, the largest first, *stitched* under one range of addresses, the last one split; all that
are free and a new one for what is missing. Requests below 2 MiB go to the caching allocator.

The paper keeps stitched blocks for the next time and bounds how many there are; what that saves is time, and this model
counts bytes. It does not stitch blocks below a limit that is to be set; here that is one chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

from forebay.recording import Box
from forebay.simulation.allocators.base import SMALL_SEGMENT, Allocator, Segment, rounded
from forebay.simulation.allocators.caching import CachingAllocator

__all__ = ["CHUNK", "GmlakeAllocator"]

CHUNK = SMALL_SEGMENT
"""Bytes of a physical chunk, the least that a device maps; smaller requests are not GMLake's."""

LAKE = 1 << 50
"""Where the addresses of primitive blocks begin in a picture: behind those of the caching allocator."""


@final
class GmlakeAllocator(Allocator):
    """The model. Addresses are physical: a stitched request has several boxes."""

    def __init__(self) -> None:
        self._small = CachingAllocator()
        self._free: list[tuple[int, int]] = []  # bytes and address of primitive blocks
        self._owned: dict[int, list[tuple[int, int]]] = {}
        self._end = 0

    @property
    def reserved(self) -> int:
        """Bytes of all chunks, and of the caching allocator's segments."""
        return self._end + self._small.reserved

    def allocate(self, number: int, nbytes: int, stream: int) -> tuple[Box, ...]:
        """See ``Allocator``. Streams have no pools of their own in the model."""
        if nbytes < CHUNK:
            return self._small.allocate(number, nbytes, stream)
        size = rounded(nbytes, CHUNK)
        found = min((block for block in self._free if block[0] >= size), default=None)
        taken = [] if found is None else [found]
        if found is not None:
            self._free.remove(found)
        else:
            self._free.sort()
            while self._free and sum(block[0] for block in taken) < size:
                taken.append(self._free.pop())
        over = sum(block[0] for block in taken) - size
        if over > 0:
            last = taken.pop()
            taken.append((last[0] - over, last[1]))
            self._free.append((over, last[1] + last[0] - over))
        elif over < 0:
            taken.append((-over, LAKE + self._end))
            self._end -= over
        self._owned[number] = taken
        return tuple(Box(number, address, block) for block, address in taken)

    def free(self, number: int) -> None:
        """See ``Allocator``."""
        if number in self._owned:
            self._free += self._owned.pop(number)
        else:
            self._small.free(number)

    def segments(self) -> Iterator[Segment]:
        """See ``Allocator``: every primitive block is one."""
        yield from self._small.segments()
        for number, blocks in self._owned.items():
            for nbytes, address in blocks:
                yield Segment(address, nbytes, (Box(number, address, nbytes),))
        for nbytes, address in self._free:
            yield Segment(address, nbytes, ())
