"""Addresses that were planned before. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import final

from forebay.recording import Box
from forebay.simulation.allocators.base import Allocator, Segment

__all__ = ["PlannedAllocator"]


@final
class PlannedAllocator(Allocator):
    """One arena of ``nbytes``, in which each request has its address in ``offsets``, by its number."""

    def __init__(self, offsets: Mapping[int, int], nbytes: int) -> None:
        self._offsets, self._nbytes = offsets, nbytes
        self._boxes: dict[int, Box] = {}

    @property
    def reserved(self) -> int:
        """Bytes of the arena."""
        return self._nbytes

    def allocate(self, number: int, nbytes: int, stream: int) -> tuple[Box, ...]:
        """See ``Allocator``."""
        self._boxes[number] = Box(number, self._offsets[number], nbytes)
        return (self._boxes[number],)

    def free(self, number: int) -> None:
        """See ``Allocator``."""
        del self._boxes[number]

    def segments(self) -> Iterator[Segment]:
        """See ``Allocator``."""
        yield Segment(0, self._nbytes, tuple(self._boxes.values()))
