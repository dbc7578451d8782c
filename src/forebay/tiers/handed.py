"""A file of the disk tier in the hands of another process, which is given its descriptors.

The file has no name any more (``disk._make_file``): a descriptor is all that there is of it, and its space is free when
the last process that has one is gone, however it ends. Both may read and write; that they do not touch the same bytes
at one time is their own business.
"""

from __future__ import annotations

import mmap
import queue
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from forebay.errors import StorageError
from forebay.memory import Kind, Ledger, Tier
from forebay.tiers.callers import Callers
from forebay.tiers.diskfile import DiskFile, DiskPolicy, Meter, TierFile
from forebay.tiers.io import SystemIo
from forebay.tiers.pages import map_pages
from forebay.tiers.stripes import StripedFile, Zone
from forebay.tiers.sums import PageSums

__all__ = ["HandedFile", "HandedPart", "hand_over", "taken_over"]


@dataclass(frozen=True)
class HandedPart:
    """One file: its open ``descriptor``, its bytes, whether it goes past the page cache, and the descriptor of its
    ``sums`` (None: it has none)."""

    path: str
    descriptor: int
    nbytes: int
    direct: bool
    sums: int | None

    @property
    def descriptors(self) -> tuple[int, ...]:
        """What the other process has to be given."""
        return (self.descriptor,) if self.sums is None else (self.descriptor, self.sums)


@dataclass(frozen=True)
class HandedFile:
    """``parts`` of a file (None: nothing in that folder) and the ``zones`` in which it is spread over them (none: it is
    the one part)."""

    parts: tuple[HandedPart | None, ...]
    zones: tuple[Zone, ...]
    policy: DiskPolicy

    @property
    def descriptors(self) -> tuple[int, ...]:
        """What the other process has to be given."""
        return tuple(number for part in self.parts if part is not None for number in part.descriptors)


def hand_over(file: TierFile) -> HandedFile:
    """What another process needs to know of ``file``, which stays open here for as long as it is used there."""
    if isinstance(file, DiskFile):
        return HandedFile((_part(file),), (), file.policy)
    if isinstance(file, StripedFile):
        parts = tuple(None if part is None else _part(part) for part in file.parts)
        return HandedFile(parts, tuple(file.zones), file.policy)
    raise StorageError(f"a {type(file).__name__} cannot be used by another process")


@contextmanager
def taken_over(handed: HandedFile, meter: Meter) -> Iterator[TierFile]:
    """The file in the process that was given its descriptors, which are closed at the end. ``meter`` counts what is
    written here."""
    bounce: queue.SimpleQueue[mmap.mmap] = queue.SimpleQueue()
    # For memory that is not aligned, of which there is none: pages that nobody touches.
    bounce.put(map_pages(handed.policy.bounce_nbytes))
    ledger, io = Ledger(Tier.DISK, None), SystemIo()

    def opened(part: HandedPart) -> DiskFile:
        ledger.charge(Kind.STATE, part.nbytes, part.path)
        return DiskFile(
            Path(part.path),
            part.descriptor,
            part.nbytes,
            kind=Kind.STATE,
            direct=part.direct,
            ledger=ledger,
            policy=handed.policy,
            io=io,
            bounce=bounce,
            meter=meter,
            sums=None if part.sums is None else PageSums(part.nbytes, descriptor=part.sums),
            frees=False,
        )

    parts = [None if part is None else opened(part) for part in handed.parts]
    callers = Callers(len(parts), handed.policy, io)
    try:
        if not handed.zones and parts[0] is not None:
            yield parts[0]
        else:
            yield StripedFile(parts, handed.zones, handed.policy, callers)
    finally:
        callers.close()
        for file in parts:
            if file is not None:
                file.close()


def _part(file: DiskFile) -> HandedPart:
    sums = None if file.sums is None else file.sums.descriptor
    return HandedPart(str(file.path), file.descriptor, file.nbytes, file.direct, sums)
