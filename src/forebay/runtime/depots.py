"""Where bytes are that have left the device: an arena on the host, or a file on disk that is reached through a ring.

What leaves is 1-D uint8 on the device: the storage of an activation, the first part of it, or codes. A *depot* has
bytes of one tier; a *range* are those of one thing that has left.

    host    device -> range                   range -> device
    disk    device -> ring -> range           range -> ring -> device

Bytes of the ring are free for others as soon as they are on disk, or on the device again. What failed with a range, in
either direction, is told to whoever waits for that range, and to nobody who has its bytes of the ring next.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch

from forebay.device.base import Completion, Device
from forebay.device.completions import LaneCompletion, dependency_failure
from forebay.errors import SessionClosed
from forebay.layout import PAGE
from forebay.scheduling.activations import DiskRing, Ranges, ReadAhead, RingPlace
from forebay.tiers.diskfile import TierFile
from forebay.timeline import Lane

__all__ = ["Depot", "DepotRow", "DiskDepot", "HostDepot", "Range"]


class Range(ABC):
    """``nbytes`` of a depot that hold what is called ``what`` in the events. ``left`` is the copy that brings it off
    the device."""

    what: str
    nbytes: int
    left: Completion

    @property
    @abstractmethod
    def at_rest(self) -> bool:
        """Whether no job uses the bytes any longer, but for the copy that ``back`` returned."""

    @abstractmethod
    def failure(self) -> BaseException | None:
        """Waits until it is at rest; what one of the jobs has raised, if one has."""

    @abstractmethod
    def back(self, target: torch.Tensor) -> Completion:
        """Queues the copy to ``target`` on the device, whose memory compute may still use; once at most."""

    @abstractmethod
    def forget(self) -> None:
        """Nobody will ask for it any more."""

    @abstractmethod
    def give_back(self) -> None:
        """The bytes, forgotten and at rest, are for others."""


class Depot(ABC):
    """Bytes of a tier for what leaves the device. Used from one thread at a time."""

    @property
    @abstractmethod
    def taken(self) -> int:
        """Bytes that are in use."""

    @property
    @abstractmethod
    def most(self) -> int:
        """The most bytes that were in use at a time."""

    @abstractmethod
    def send(self, origin: torch.Tensor, what: str) -> Range | None:
        """Queues the way here of ``origin``, which compute was asked to make; the job holds it for as long as it reads
        it. None: there is no room."""

    @abstractmethod
    def fill(self) -> None:
        """Backward runs: begins whatever brings closer what it asks for next."""

    @abstractmethod
    def tidy(self) -> None:
        """Lets go of jobs that are done, and of the errors of those that failed."""

    @abstractmethod
    def close(self) -> None:
        """Lets go of memory and file. The caller has waited for all jobs."""


@final
class DepotRow(Depot):
    """Several depots of one tier: what leaves goes to the one at ``place``, or else to the first that has room."""

    def __init__(self, depots: Sequence[Depot]) -> None:
        self._depots = tuple(depots)
        self.place = 0

    @property
    def taken(self) -> int:
        return sum(depot.taken for depot in self._depots)

    @property
    def most(self) -> int:
        return sum(depot.most for depot in self._depots)

    def send(self, origin: torch.Tensor, what: str) -> Range | None:
        first = self._depots[self.place :]
        ways = (depot.send(origin, what) for depot in (*first, *self._depots[: self.place]))
        return next((way for way in ways if way is not None), None)

    def fill(self) -> None:
        for depot in self._depots:
            depot.fill()

    def tidy(self) -> None:
        for depot in self._depots:
            depot.tidy()

    def close(self) -> None:
        for depot in self._depots:
            depot.close()


# On the host.


@final
class HostDepot(Depot):
    """``arena`` (1-D uint8) on the host."""

    def __init__(self, device: Device, arena: torch.Tensor) -> None:
        self.device = device
        self.arena = arena
        self.ranges = Ranges(arena.numel())

    @property
    def taken(self) -> int:
        return self.ranges.taken

    @property
    def most(self) -> int:
        return self.ranges.most

    def send(self, origin: torch.Tensor, what: str) -> Range | None:
        nbytes = origin.numel()
        offset = self.ranges.take(nbytes)
        if offset is None:
            return None
        target = self.arena[offset : offset + nbytes]
        try:
            # The mark: the copy must not start before the kernel that makes the bytes is done.
            after = (self.device.mark(),)
            left = self.device.copy(Lane.D2H, target, origin, after=after, what=f"offload {what}", inline=True)
        except BaseException:
            self.ranges.give_back(offset)  # no lane has taken it
            raise
        return _HostRange(self, offset, nbytes, what, left)

    def fill(self) -> None:
        return

    def tidy(self) -> None:
        return

    def close(self) -> None:
        self.arena = self.arena.new_empty(0)


@final
@dataclass(slots=True, eq=False)
class _HostRange(Range):
    depot: HostDepot
    offset: int
    nbytes: int
    what: str
    left: Completion

    @property
    def at_rest(self) -> bool:
        return self.left.done()

    def failure(self) -> BaseException | None:
        return dependency_failure(self.left)

    def back(self, target: torch.Tensor) -> Completion:
        device = self.depot.device
        source = self.depot.arena[self.offset : self.offset + self.nbytes]
        # The bytes must be on the host before they are read there. And the mark: the memory may have been given back
        # by an op that compute has not come to yet.
        after = (self.left, device.mark())
        return device.copy(Lane.H2D, target, source, after=after, what=f"reload {self.what}", inline=True)

    def forget(self) -> None:
        return

    def give_back(self) -> None:
        self.depot.ranges.give_back(self.offset)


# On disk.


@final
class DiskDepot(Depot):
    """``file``, reached through ``ring`` (1-D uint8 on the host, from an address that O_DIRECT takes)."""

    def __init__(self, device: Device, ring: torch.Tensor, file: TierFile) -> None:
        self.device = device
        self.ranges = Ranges(file.nbytes, PAGE)
        self._memory = ring
        self._file: TierFile | None = file
        self._ring = DiskRing(ring.numel())
        self.ahead = ReadAhead[_DiskRange](self._ring, self._read)

    @property
    def taken(self) -> int:
        return self.ranges.taken

    @property
    def most(self) -> int:
        return self.ranges.most

    def send(self, origin: torch.Tensor, what: str) -> Range | None:
        nbytes, file = origin.numel(), self._file
        offset = None if nbytes > self._ring.capacity else self.ranges.take(nbytes)
        if offset is None or file is None:
            return None
        place, before = self.ahead.take(nbytes)
        place.busy = before  # as long as no job of ours is queued
        whole = self.of_ring(place, place.nbytes)
        try:
            # The mark: as on the host. And whoever had these bytes of the ring must have written or read them.
            after = (self.device.mark(), *map(_Regardless, before))
            left = self.device.copy(Lane.D2H, whole[:nbytes], origin, after=after, what=f"offload {what}", inline=True)
            place.busy = (left,)
            written = self.device.submit(
                Lane.DISK_WRITE,
                lambda: file.write(offset, whole),
                after=(left,),
                nbytes=whole.numel(),
                what=f"write {what}",
            )
        except BaseException:
            self.ranges.give_back(offset)  # nobody writes there
            raise
        place.busy = (written,)
        held = _DiskRange(self, offset, nbytes, what, left, written)
        self.ahead.left(held, nbytes)
        return held

    def fill(self) -> None:
        self.ahead.fill()

    def tidy(self) -> None:
        self._ring.tidy()

    def close(self) -> None:
        self._memory = self._memory.new_empty(0)
        self._file = None

    def of_ring(self, place: RingPlace, nbytes: int) -> torch.Tensor:
        """The first ``nbytes`` of ``place``."""
        return self._memory[place.offset : place.offset + nbytes]

    def _read(self, held: _DiskRange, place: RingPlace, before: tuple[Completion, ...]) -> Completion:
        file, offset, whole = self._file, held.offset, self.of_ring(place, place.nbytes)
        if file is None:
            raise SessionClosed(f"{held.what} went with its file when the model was closed; prepare it again")
        # Only what is written can be read, and only into bytes that nobody writes or reads any longer.
        held.read = self.device.submit(
            Lane.DISK_READ,
            lambda: file.read(offset, whole),
            after=(held.written, *map(_Regardless, before)),
            nbytes=whole.numel(),
            what=f"read {held.what}",
        )
        return held.read


@final
@dataclass(slots=True, eq=False)
class _DiskRange(Range):
    depot: DiskDepot
    offset: int
    nbytes: int
    what: str
    left: Completion
    written: Completion
    read: Completion | None = None

    @property
    def at_rest(self) -> bool:
        # The last read stands for those before it: a lane does one job after the other.
        return self.written.done() and (self.read is None or self.read.done())

    def failure(self) -> BaseException | None:
        written = dependency_failure(self.written)
        read = None if self.read is None else dependency_failure(self.read)
        return written or read

    def back(self, target: torch.Tensor) -> Completion:
        device, ahead = self.depot.device, self.depot.ahead
        place, read = ahead.demand(self)
        source = self.depot.of_ring(place, self.nbytes)
        # The mark: as on the host.
        copied = device.copy(
            Lane.H2D, target, source, after=(read, device.mark()), what=f"reload {self.what}", inline=True
        )
        ahead.sent(self, copied)
        return copied

    def forget(self) -> None:
        self.depot.ahead.forget(self)

    def give_back(self) -> None:
        self.depot.ranges.give_back(self.offset)


@final
class _Regardless(LaneCompletion):
    """Done when another completion is, and never failed: what went wrong with bytes of the ring is not the fault of
    whoever has them next."""

    __slots__ = ("_other",)

    def __init__(self, other: Completion) -> None:
        self._other = other

    def wait(self) -> None:
        dependency_failure(self._other)

    def done(self) -> bool:
        return self._other.done()

    def failure(self) -> None:
        dependency_failure(self._other)
