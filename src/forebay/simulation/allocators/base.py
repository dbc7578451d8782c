"""What every model of an allocator has. No torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, final

from forebay.recording import Box

__all__ = [
    "LARGE_LIMIT",
    "LARGE_ROUND",
    "LARGE_SEGMENT",
    "MIN_BLOCK",
    "SMALL_LIMIT",
    "SMALL_SEGMENT",
    "Allocator",
    "Places",
    "Ranges",
    "Segment",
    "rounded",
    "segment_nbytes",
]

MIN_BLOCK = 512
SMALL_LIMIT = 1 << 20
SMALL_SEGMENT = 2 << 20
LARGE_SEGMENT = 20 << 20
LARGE_LIMIT = 10 << 20
LARGE_ROUND = 2 << 20
"""``kMinBlockSize``, ``kSmallSize``, ``kSmallBuffer``, ``kLargeBuffer``, ``kMinLargeAlloc`` and ``kRoundLarge`` of
``c10/cuda/CUDACachingAllocator.cpp`` and ``c10/core/AllocatorConfig.h`` (PyTorch 2.x), in bytes."""


def rounded(nbytes: int, to: int = MIN_BLOCK) -> int:
    """The bytes that a request gets: a multiple of ``to``, and at least that."""
    return max(1, -(-nbytes // to)) * to


def segment_nbytes(size: int) -> int:
    """The bytes that PyTorch's allocator asks the device for where it has nothing for a request of ``size``, rounded,
    bytes (``get_allocation_size``)."""
    if size <= SMALL_LIMIT:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size < LARGE_LIMIT else rounded(size, LARGE_ROUND)


@dataclass(frozen=True, slots=True)
class Segment:
    """Memory that was reserved in one piece, and what is in it."""

    address: int
    nbytes: int
    boxes: tuple[Box, ...]

    @property
    def free(self) -> int:
        """Bytes that nobody has."""
        return self.nbytes - sum(box.nbytes for box in self.boxes)


class Allocator(ABC):
    """Serves requests by their numbers, and never refuses one: ``out_of_memory`` counts those that a model with a limit
    had no room for. Bytes and addresses are those of the device."""

    out_of_memory: int = 0

    @property
    @abstractmethod
    def reserved(self) -> int:
        """Bytes that are taken from the device now."""

    @abstractmethod
    def allocate(self, number: int, nbytes: int, stream: int) -> tuple[Box, ...]:
        """Gives request ``number`` its bytes, and says where they lie."""

    @abstractmethod
    def free(self, number: int) -> None:
        """Takes the bytes of request ``number`` back."""

    @abstractmethod
    def segments(self) -> Iterable[Segment]:
        """What is reserved now."""


class Places(Protocol):
    """Says where segments lie."""

    def take(self, nbytes: int) -> int:
        """The address of ``nbytes`` that were free."""

    def give_back(self, address: int) -> None:
        """Frees what begins at ``address``."""


@final
class Ranges(Places):
    """Ranges of addresses that are taken; a new one gets the lowest place that holds it."""

    def __init__(self) -> None:
        self._taken: list[tuple[int, int]] = []

    def take(self, nbytes: int) -> int:
        """The address of ``nbytes`` that were free."""
        address = 0
        for start, end in self._taken:
            if start - address >= nbytes:
                break
            address = max(address, end)
        insort(self._taken, (address, address + nbytes))
        return address

    def give_back(self, address: int) -> None:
        """Frees the range that begins at ``address``."""
        del self._taken[bisect_left(self._taken, (address, 0))]

    @property
    def end(self) -> int:
        """The end of the last range."""
        return max((end for _, end in self._taken), default=0)
