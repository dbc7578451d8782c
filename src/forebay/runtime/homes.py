"""Home copies: where the parameters and the optimizer state of a block are between their uses.

Every home answers the same two questions, whatever tier it is on: *check out* some bytes for an update (the buffer,
and what to wait for before touching it) and *check in* what the update made of them. On the host both are views and
cost nothing; on disk the bytes pass through a staging ring.

Where the update of a block runs ahead of its step (``speculation.py``) there are two homes of it: an update checks
bytes out of the current one ``into`` the other, and checks them in there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Self, final

import torch

from forebay.device.base import Completion, Device
from forebay.errors import ForebayError
from forebay.layout import PAGE, align
from forebay.scheduling.staging import StagingBuffer, StagingRing
from forebay.tiers.diskfile import TierFile
from forebay.timeline import Lane

__all__ = ["Checkout", "DiskHome", "Home", "MemoryHome", "StorageHome"]


@final
class Checkout:
    """Bytes on loan from a home: the ``buffer`` that is written, and ``ready``, after which it may be. ``source`` is
    what is read: the buffer itself, or the other home of the block, whose bytes stay as they are."""

    def __init__(
        self,
        buffer: torch.Tensor,
        ready: tuple[Completion, ...],
        staging: StagingBuffer | None = None,
        source: torch.Tensor | None = None,
    ) -> None:
        self.buffer = buffer
        self.ready = ready
        self.staging = staging
        self.source = buffer if source is None else source

    @property
    def apart(self) -> bool:
        """Whether an update reads one place and writes another."""
        return self.source is not self.buffer


class Home(ABC):
    """A range of bytes on one tier. ``written`` is the last writer: every reader waits for it."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.written: Completion | None = None
        self._saved_by: Completion | None = None

    @abstractmethod
    def fetch(self, target: torch.Tensor, after: Sequence[Completion]) -> Completion:
        """Queues the copy of all bytes into the device buffer ``target``."""

    @abstractmethod
    def check_out(self, offset: int, nbytes: int, what: str, into: Self) -> Checkout:
        """Asks for ``nbytes`` from ``offset`` for an update that checks in at ``into``: this home, or the other one of
        its block."""

    @abstractmethod
    def check_in(self, loan: Checkout, offset: int, after: Completion, what: str) -> Completion:
        """Queues the way back of a loan once ``after``, its last writer, is done; sets ``written``."""

    @abstractmethod
    def read(self, offset: int = 0, nbytes: int | None = None) -> torch.Tensor:
        """``nbytes`` from ``offset`` (None: the rest), now: the bytes themselves, or a copy of them on the host."""

    @abstractmethod
    def look(self, offset: int, nbytes: int) -> torch.Tensor:
        """``nbytes`` from ``offset``, now, to be read before the next call: the bytes themselves, or a staging buffer.
        On disk both are those of something that is checked out, or of the whole home."""

    def held(self, offset: int, nbytes: int) -> torch.Tensor:
        """``look``, for somebody who has waited for the last writer."""
        return self.look(offset, nbytes)

    def saved_by(self, job: Completion) -> None:
        """``job`` reads all bytes, which are in memory, for a checkpoint: whoever writes them waits for it."""
        self._saved_by = job

    def settle_save(self) -> None:
        """Waits for the job of ``saved_by``."""
        if self._saved_by is not None:
            self._saved_by.wait()
            self._saved_by = None

    @abstractmethod
    def replace(self, offset: int, nbytes: int) -> AbstractContextManager[torch.Tensor]:
        """Gives a buffer, as ``look`` does, for other bytes in the place of ``nbytes`` from ``offset``; they are at
        home at its end. On disk it holds zeros at first."""

    @abstractmethod
    def edit(self, offset: int, nbytes: int) -> AbstractContextManager[torch.Tensor]:
        """Gives ``nbytes`` from ``offset``, as ``look`` does, to be changed; they are at home at its end."""

    def copy_from(self, other: Home, parts: Iterable[tuple[int, int]]) -> None:
        """Copies ``parts`` (offset and bytes) of ``other``, now; one of them at a time is in memory."""
        for offset, nbytes in parts:
            with self.replace(offset, nbytes) as buffer:
                buffer.copy_(other.read(offset, nbytes))

    def settle(self) -> None:
        """Waits for the last writer."""
        if self.written is not None:
            self.written.wait()
            self.written = None

    def _pending(self) -> tuple[Completion, ...]:
        return () if self.written is None else (self.written,)


@final
class MemoryHome(Home):
    """Bytes that are in memory all the time: a view of a host arena, or of a device buffer."""

    def __init__(self, device: Device, buffer: torch.Tensor, what: str) -> None:
        super().__init__(buffer.numel())
        self._device = device
        self._buffer = buffer
        self._what = what
        self._read_by: Completion | None = None

    def fetch(self, target: torch.Tensor, after: Sequence[Completion]) -> Completion:
        # The copy must see the last update of these bytes, and must not overtake the slot's last reader.
        after = (*after, *self._pending())
        self._read_by = self._device.copy(
            Lane.H2D, target[: self.nbytes], self._buffer, after=after, what=f"fetch {self._what}", inline=True
        )
        return self._read_by

    def check_out(self, offset: int, nbytes: int, what: str, into: Self) -> Checkout:
        # The last fetch may still be reading what is written to: a block can be read again after its gradients have
        # landed (where only some of its parameters are trained), and nothing else makes an update wait for that. An
        # update that still writes there comes before this one on its lane.
        # So may a checkpoint.
        readers = [job for job in (into._read_by, into._saved_by) if job is not None]
        ready = (*self._pending(), *readers)
        own = self._buffer[offset : offset + nbytes]
        if into is self:
            return Checkout(own, ready)
        return Checkout(into._buffer[offset : offset + nbytes], ready, source=own)

    def held(self, offset: int, nbytes: int) -> torch.Tensor:
        return self._buffer[offset : offset + nbytes]

    def check_in(self, loan: Checkout, offset: int, after: Completion, what: str) -> Completion:
        self.written = after
        return after

    def read(self, offset: int = 0, nbytes: int | None = None) -> torch.Tensor:
        self.settle()
        return self._buffer[offset:] if nbytes is None else self._buffer[offset : offset + nbytes]

    def look(self, offset: int, nbytes: int) -> torch.Tensor:
        self.settle()
        return self._buffer[offset : offset + nbytes]

    @contextmanager
    def replace(self, offset: int, nbytes: int) -> Iterator[torch.Tensor]:
        yield self.look(offset, nbytes)

    @contextmanager
    def edit(self, offset: int, nbytes: int) -> Iterator[torch.Tensor]:
        yield self.look(offset, nbytes)


@final
class DiskHome(Home):
    """A range of a file, ``offset`` and length multiples of the file's alignment; moves through ``ring``.

    What is checked out is always one of the same parts of it, which do not overlap: a part waits for its own last
    writer, so that the next one is read while this one is written.
    """

    def __init__(self, device: Device, file: TierFile, offset: int, nbytes: int, ring: StagingRing, what: str) -> None:
        super().__init__(nbytes)
        self._device = device
        self._file = file
        self.offset = offset
        self._ring = ring
        self._what = what
        self._part_written: dict[int, Completion] = {}  # by offset

    def fetch(self, target: torch.Tensor, after: Sequence[Completion]) -> Completion:
        loan = self.check_out(0, self.nbytes, f"read {self._what}", self)
        source = loan.buffer[: target.numel()]
        copied = self._device.copy(
            Lane.H2D, target[: self.nbytes], source, after=(*after, *loan.ready), what=f"fetch {self._what}"
        )
        self._release(loan, copied)
        return copied

    def check_out(self, offset: int, nbytes: int, what: str, into: Self) -> Checkout:
        # The same whichever range it is checked in at: all reads are on one lane, so that by the time this one is
        # done, nobody reads what was asked of the other range before.
        staging, after = self._ring.take(nbytes)
        buffer, start = staging.view(nbytes), self.offset + offset
        file = self._file
        written = self._part_written.get(offset)
        # The file is read after the last write of this part, and into a buffer that nobody reads any more.
        read = self._device.submit(
            Lane.DISK_READ,
            lambda: file.read(start, buffer),
            after=after if written is None else (*after, written),
            nbytes=nbytes,
            what=what,
        )
        staging.busy = read
        return Checkout(buffer, (read,), staging)

    def check_in(self, loan: Checkout, offset: int, after: Completion, what: str) -> Completion:
        file, buffer, start = self._file, loan.buffer, self.offset + offset
        # One writer at a time and in order: the lane is first in, first out, so the last write covers the others.
        written = self._device.submit(
            Lane.DISK_WRITE, lambda: file.write(start, buffer), after=(after,), nbytes=buffer.numel(), what=what
        )
        self._release(loan, written)
        self.written = self._part_written[offset] = written
        return written

    def settle(self) -> None:
        super().settle()
        self._part_written.clear()

    def read(self, offset: int = 0, nbytes: int | None = None) -> torch.Tensor:
        self.settle()
        length = self.nbytes - offset if nbytes is None else nbytes
        first = offset // PAGE * PAGE
        copy = torch.empty(align(offset + length, PAGE) - first, dtype=torch.uint8, device="cpu")
        self._file.read(self.offset + first, copy)
        return copy[offset - first : offset - first + length]

    def look(self, offset: int, nbytes: int) -> torch.Tensor:
        buffer = self._staging(nbytes)
        self._file.read(self.offset + offset, buffer)
        return buffer

    @contextmanager
    def replace(self, offset: int, nbytes: int) -> Iterator[torch.Tensor]:
        buffer = self._staging(nbytes).zero_()
        yield buffer
        self._file.write(self.offset + offset, buffer)

    @contextmanager
    def edit(self, offset: int, nbytes: int) -> Iterator[torch.Tensor]:
        buffer = self.look(offset, nbytes)
        yield buffer
        self._file.write(self.offset + offset, buffer)

    def _staging(self, nbytes: int) -> torch.Tensor:
        """A buffer of the ring that nobody reads or writes any more, when nobody writes here either."""
        self.settle()
        staging, after = self._ring.take(nbytes)
        for completion in after:
            completion.wait()
        buffer: torch.Tensor = staging.view(nbytes)
        return buffer

    @staticmethod
    def _release(loan: Checkout, after: Completion) -> None:
        if loan.staging is not None:
            loan.staging.busy = after


@final
class StorageHome(Home):
    """Optimizer states on disk that are updated where they lie: ``file`` has them, and an update asks for none. Who
    reads or writes them has waited for the last update, so that nobody else has the file then."""

    def __init__(self, file: DiskHome) -> None:
        super().__init__(file.nbytes)
        self._file = file

    @property
    def offset(self) -> int:
        """Where they begin in the file of states."""
        return self._file.offset

    def fetch(self, target: torch.Tensor, after: Sequence[Completion]) -> Completion:
        raise ForebayError("optimizer states are updated beside the storage; none of them is fetched")

    def check_out(self, offset: int, nbytes: int, what: str, into: Self) -> Checkout:
        return Checkout(torch.empty(0, dtype=torch.uint8, device="cpu"), ())

    def check_in(self, loan: Checkout, offset: int, after: Completion, what: str) -> Completion:
        self.written = after
        return after

    def read(self, offset: int = 0, nbytes: int | None = None) -> torch.Tensor:
        self.settle()
        return self._file.read(offset, nbytes)

    def look(self, offset: int, nbytes: int) -> torch.Tensor:
        self.settle()
        return self._file.look(offset, nbytes)

    @contextmanager
    def replace(self, offset: int, nbytes: int) -> Iterator[torch.Tensor]:
        self.settle()
        with self._file.replace(offset, nbytes) as buffer:
            yield buffer

    @contextmanager
    def edit(self, offset: int, nbytes: int) -> Iterator[torch.Tensor]:
        self.settle()
        with self._file.edit(offset, nbytes) as buffer:
            yield buffer
