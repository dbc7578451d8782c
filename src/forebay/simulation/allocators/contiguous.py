"""What lives long in a region of its own. No torch.

Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models" (SC 2020), section 6.3: what
fragments memory is that short lives and long ones alternate. So contiguous memory is set aside before the run for what
lives long (there: checkpoints of activations, and gradients), and these are copied into it as they are made; all others
are the caching allocator's. A recording does not say what is a checkpoint: here a request lives long if it is there for
more than a tenth of all events.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

from forebay.recording import Box, Recording
from forebay.simulation.allocators.base import LARGE_ROUND, Allocator, Ranges, Segment, rounded
from forebay.simulation.allocators.caching import CachingAllocator, CachingSettings

__all__ = ["ContiguousAllocator"]

LONG = 0.1
"""The share of the events of a recording after which a life is long."""

REGION = 1 << 50
"""Where the addresses of the region begin in a picture."""


@final
class ContiguousAllocator(Allocator):
    """The model, for one recording. The region is as large as that needs, and is there from the first event on.
    ``limit``: bytes of the device (None: as many as are asked for)."""

    def __init__(self, recording: Recording, limit: int | None = None) -> None:
        least = LONG * len(recording.events)
        asked = recording.requests
        self._long = {n for n, (made, gone) in enumerate(recording.lives) if gone - made > least and asked[n].nbytes}
        self._region, self._boxes = Ranges(), dict[int, Box]()
        self._nbytes = rounded(self._needed(recording), LARGE_ROUND) if self._long else 0
        self._rest = CachingAllocator(CachingSettings(None if limit is None else limit - self._nbytes))

    def _needed(self, recording: Recording) -> int:
        region, places, most = Ranges(), dict[int, int](), 0
        for event in recording.events:
            number = event if event >= 0 else -1 - event
            if number not in self._long:
                continue
            if event >= 0:
                places[number] = region.take(rounded(recording.requests[number].nbytes))
                most = max(most, region.end)
            else:
                region.give_back(places[number])
        return most

    @property
    def reserved(self) -> int:
        """Bytes of the region and of the caching allocator's segments."""
        return self._nbytes + self._rest.reserved

    def allocate(self, number: int, nbytes: int, stream: int) -> tuple[Box, ...]:
        """See ``Allocator``."""
        if number not in self._long:
            return self._rest.allocate(number, nbytes, stream)
        size = rounded(nbytes)
        self._boxes[number] = Box(number, REGION + self._region.take(size), size)
        return (self._boxes[number],)

    def free(self, number: int) -> None:
        """See ``Allocator``."""
        if number in self._boxes:
            self._region.give_back(self._boxes.pop(number).address - REGION)
        else:
            self._rest.free(number)

    def segments(self) -> Iterator[Segment]:
        """See ``Allocator``."""
        if self._nbytes:
            yield Segment(REGION, self._nbytes, tuple(self._boxes.values()))
        yield from self._rest.segments()
