"""One file of the disk tier: read and written past the page cache where the file system allows it.

Going past the page cache (O_DIRECT) spares the CPU a copy of every byte and keeps the kernel from filling host memory
with bytes that the plan put on disk on purpose. It wants offsets, sizes and memory addresses aligned.

Calls block, and release the interpreter's lock while the kernel works: they are meant for jobs on the device's
``DISK_READ`` and ``DISK_WRITE`` lanes. Nothing is synced: these files do not outlive the run, checkpoints do.
"""

from __future__ import annotations

import errno
import mmap
import os
import queue
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TypeAlias, final

import torch

from forebay.calls import CHECKSUMS, Calls
from forebay.errors import ConfigError, StorageError
from forebay.memory import Kind, Ledger
from forebay.tiers.io import Io, preallocate, storage_error
from forebay.tiers.kernel_queue import Verb, address_of
from forebay.tiers.sums import SUMMED, PageSums
from forebay.units import MiB, format_bytes

__all__ = [
    "Buffer",
    "DiskFile",
    "DiskPolicy",
    "Meter",
    "TierFile",
    "bytes_of",
]

Buffer: TypeAlias = torch.Tensor | memoryview
"""A contiguous uint8 CPU tensor, or a contiguous memoryview of bytes."""


@dataclass(frozen=True)
class DiskPolicy:
    """How files are read and written. Sizes in bytes.

    ``reads`` and ``writes`` are the calls into which a transfer is cut, ``alignment`` what O_DIRECT wants of offsets,
    sizes and addresses, ``direct`` False keeps to the page cache. ``bounce_buffers``, each of the larger block and of
    ``bounce_block`` at most, serve the callers whose own memory is not aligned; more callers than that at one time wait
    for each other. Of a file over several folders, ``stripe`` bytes go to each in turn. ``verified``: what is read of
    parameters and states is held against what was written; ``alignment`` is whole pages of ``SUMMED`` bytes then.
    """

    reads: Calls = field(default_factory=Calls)
    writes: Calls = field(default_factory=Calls)
    stripe: int = 4 * MiB
    alignment: int = 4096
    direct: bool = True
    bounce_buffers: int = 2
    bounce_block: int = 4 * MiB
    verified: bool = CHECKSUMS

    def __post_init__(self) -> None:
        if self.alignment < 512 or self.alignment & (self.alignment - 1) or self.alignment > mmap.PAGESIZE:
            raise ConfigError(
                f"alignment must be a power of two from 512 to the page size {mmap.PAGESIZE}, got {self.alignment}"
            )
        sizes = (("the block of reads", self.reads.block), ("the block of writes", self.writes.block))
        for name, nbytes in (*sizes, ("stripe", self.stripe), ("bounce_block", self.bounce_block)):
            if nbytes <= 0 or nbytes % self.alignment:
                raise ConfigError(f"{name} must be a multiple of the alignment {self.alignment}, got {nbytes}")
        if self.verified and self.alignment % SUMMED:
            raise ConfigError(f"what is verified is whole pages of {SUMMED} bytes, the alignment is {self.alignment}")
        if self.bounce_buffers < 1:
            raise ConfigError(f"bounce_buffers must be 1 or more, got {self.bounce_buffers}")

    def padded(self, nbytes: int) -> int:
        """``nbytes`` rounded up to the alignment."""
        return -(-nbytes // self.alignment) * self.alignment

    def calls(self, verb: Verb) -> Calls:
        """Those of one direction."""
        return self.reads if verb == "read" else self.writes

    @property
    def bounce_nbytes(self) -> int:
        """Bytes of one bounce buffer."""
        return min(self.bounce_block, max(self.reads.block, self.writes.block))

    @property
    def staging_nbytes(self) -> int:
        """Host memory of the bounce buffers."""
        return self.bounce_buffers * self.bounce_nbytes if self.direct else 0


@final
class Meter:
    """Counts bytes, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.nbytes = 0

    def add(self, nbytes: int) -> None:
        """Counts ``nbytes`` more."""
        with self._lock:
            self.nbytes += nbytes


class TierFile(ABC):
    """``nbytes`` on disk that are read and written at offsets and in sizes that are multiples of the alignment."""

    nbytes: int

    @abstractmethod
    def read(self, offset: int, buffer: Buffer) -> None:
        """Fills ``buffer`` with the bytes from ``offset`` on; blocks until they are there."""

    @abstractmethod
    def write(self, offset: int, buffer: Buffer) -> None:
        """Writes ``buffer`` to ``offset`` and after; blocks until the kernel has taken all of it."""

    @abstractmethod
    def reserve(self) -> None:
        """Has the file system set aside what it has not yet of the space. Raises ``DiskFull``, ``StorageError``."""

    @abstractmethod
    def close(self) -> None:
        """Waits for the calls that are under way, gives the space back; a second call does nothing."""


@final
class DiskFile(TierFile):
    """One file of a ``DiskFolder``, made by ``DiskFolder.create``.

    ``nbytes`` is its size, a multiple of the alignment. ``direct`` says whether it goes past the page cache: it turns
    False for good at the first refusal by the file system. ``ledger`` counts ``nbytes`` as ``kind`` until the file is
    closed or collected; ``meter`` the bytes that are written. ``sums`` are of what was written (None: nobody compares).
    With ``frees`` its space is free when it is closed where it was made, whichever processes have it open too.
    Several threads may read and write at one time; that they do not touch the same bytes is the caller's business.
    ``check``, ``in_use``, ``note``, ``move``, ``moved`` and ``compare`` are the parts of a transfer, for ``callers``.
    """

    def __init__(
        self,
        path: Path,
        fd: int,
        nbytes: int,
        *,
        kind: Kind,
        direct: bool,
        ledger: Ledger,
        policy: DiskPolicy,
        io: Io,
        bounce: queue.SimpleQueue[mmap.mmap],
        meter: Meter,
        sums: PageSums | None,
        frees: bool,
    ) -> None:
        self.path = path
        self.nbytes = nbytes
        self.direct = direct
        self.descriptor = fd
        self.policy = policy
        self.sums = sums
        self._io = io
        self._bounce = bounce
        self._meter = meter
        self._idle = threading.Condition()
        # Of each thread that has any, how many.
        self._transfers: dict[int, int] = {}
        self._closed = False
        # Runs once: at close, or when a file that nobody closed is collected (then no transfer holds it). Not at
        # exit, where a lane's thread may still be writing and the kernel closes everything anyway.
        self._release = weakref.finalize(self, _release, fd, os.getpid() if frees else None, ledger, kind, nbytes)
        self._release.atexit = False

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closed

    def padded(self, nbytes: int) -> int:
        """``nbytes`` rounded up to what ``read`` and ``write`` accept as a size or an offset."""
        return self.policy.padded(nbytes)

    def read(self, offset: int, buffer: Buffer) -> None:
        """Fills ``buffer`` with the bytes from ``offset`` on; blocks until they are there.

        Offset and size are multiples of the alignment. Raises ``StorageError`` for misuse, for an I/O error, at an
        early end of the file and for bytes that are not those that were written; ``buffer`` is then partly filled.
        """
        self._transfer("read", offset, buffer)

    def write(self, offset: int, buffer: Buffer) -> None:
        """Writes ``buffer`` to ``offset`` and after; blocks until the kernel has taken all of it.

        Offset and size are multiples of the alignment. Raises ``StorageError`` for misuse and for an I/O error,
        ``DiskFull`` when there is no room; the bytes of the range are then undefined.
        """
        self._transfer("write", offset, buffer)

    def reserve(self) -> None:
        """Has the file system set aside what it has not yet of the space. Raises ``DiskFull``, ``StorageError``."""
        with self.in_use():
            try:
                preallocate(self.descriptor, self.nbytes, self.nbytes, self._io)
            except OSError as error:
                action = f"reserve {format_bytes(self.nbytes)} of"
                raise storage_error(self._io, action, self.path, error, self.nbytes) from error

    def close(self) -> None:
        """Waits for the calls that are under way, gives the space back; a second call does nothing."""
        with self._idle:
            if self._closed:
                return
            self._closed = True
            # The number of a closed descriptor is given to the next file that anyone opens. A transfer that still
            # used it would write into that file, so the last one has to be out first. Those of this thread are: it is
            # here. An interrupt may have ended one before it could say so.
            me = threading.get_ident()
            self._idle.wait_for(lambda: self._transfers.keys() <= {me})
        self._release()
        if self.sums is not None:
            self.sums.close()

    def __enter__(self) -> DiskFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _transfer(self, verb: Verb, offset: int, buffer: Buffer) -> None:
        view = bytes_of(buffer)
        self.check(verb, offset, view)
        with self.in_use():
            block = self.policy.calls(verb).block
            for begin in range(0, len(view), block):
                part = view[begin : begin + block]
                self.note(verb, offset + begin, part)
                self.move(verb, offset + begin, part)
                # Block by block: they are in the cache still.
                self.compare(verb, offset + begin, part)

    def note(self, verb: Verb, offset: int, part: memoryview) -> None:
        """Sums up what is about to be written: what changes it on its way to the kernel is found too."""
        if verb == "write" and self.sums is not None:
            self.sums.note(offset, part)

    def compare(self, verb: Verb, offset: int, part: memoryview) -> None:
        """Holds what was read against what was written there. Raises ``StorageError``."""
        damaged = self.sums.damaged(offset, part) if verb == "read" and self.sums is not None else None
        if damaged is not None:
            raise StorageError(
                f"{self.path}: the bytes at offset {damaged} are not those that were written there; the disk, or the "
                f"memory on the way, has changed them, and nothing was trained on them. Check the disk, or name "
                f"another, and go on from what was saved"
            )

    def move(self, verb: Verb, offset: int, part: memoryview) -> None:
        """Moves ``part`` in calls of this thread, one after the other; whoever asks has the file ``in_use``."""
        done = 0
        while done < len(part):
            direct = self.direct
            result = self._call(verb, offset + done, part[done:], direct)
            done += self.moved(verb, offset + done, part[done:], result, direct)

    def moved(self, verb: Verb, offset: int, piece: memoryview, result: int, direct: bool) -> int:
        """How much of ``piece`` a call has moved that ended with ``result``, bytes or a negative error number, and was
        made past the page cache or not (``direct``). Raises ``StorageError``, ``DiskFull``."""
        if result < 0:
            # Everything is aligned, so this can only mean that the file system has no O_DIRECT after all.
            if direct and result == -errno.EINVAL:
                self._leave_direct()
                return 0
            error = OSError(-result, os.strerror(-result))
            action = f"{verb} {len(piece)} bytes at offset {offset} of"
            raise storage_error(self._io, action, self.path, error, len(piece)) from error
        if verb == "write":
            self._meter.add(result)
        if result == 0:
            raise StorageError(
                f"cannot {verb} {len(piece)} bytes at offset {offset} of {self.path}: the file ends there, although "
                f"it was made with {self.nbytes} bytes; check the disk, or name another"
            )
        if direct and result % self.policy.alignment:
            # O_DIRECT cannot go on from inside an aligned unit; the page cache can, to the end or to the error.
            self._leave_direct()
        return result

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Holds back ``close`` in other threads."""
        me = threading.get_ident()
        with self._idle:
            if self._closed:
                raise StorageError(f"{self.path} is closed; it can no longer be read or written")
            before = self._transfers.get(me, 0)
            self._transfers[me] = before + 1
        try:
            yield
        finally:
            with self._idle:
                if before:
                    self._transfers[me] = before
                else:
                    self._transfers.pop(me, None)
                self._idle.notify_all()

    def check(self, verb: Verb, offset: int, view: memoryview) -> None:
        """Raises ``StorageError`` for a transfer that this file cannot make."""
        if verb == "read" and view.readonly:
            raise StorageError(f"cannot read from {self.path} into memory that is read-only; give a writable buffer")
        for name, value in (("offset", offset), ("size", len(view))):
            if value % self.policy.alignment:
                raise StorageError(
                    f"cannot {verb} {self.path}: the {name} must be a multiple of {self.policy.alignment}, "
                    f"got {value}; use padded()"
                )
        if offset < 0 or offset + len(view) > self.nbytes:
            raise StorageError(
                f"cannot {verb} {self.path}: bytes {offset} to {offset + len(view)} are not inside a file of "
                f"{self.nbytes} bytes"
            )

    def _call(self, verb: Verb, offset: int, piece: memoryview, direct: bool) -> int:
        """What one system call makes of ``piece``: bytes, or a negative error number."""
        try:
            if direct and not self.aligned(piece):
                return self._bounced(verb, offset, piece)
            return self._made(verb, offset, piece)
        except OSError as error:
            return -(error.errno or errno.EIO)

    def _made(self, verb: Verb, offset: int, piece: memoryview) -> int:
        call = self._io.preadv if verb == "read" else self._io.pwritev
        return call(self.descriptor, piece, offset)

    def _bounced(self, verb: Verb, offset: int, piece: memoryview) -> int:
        """``_made``, for as much as goes into an aligned block, by way of that; nobody else has it until it is back."""
        block = self._bounce.get()
        piece = piece[: len(block)]
        try:
            with memoryview(block) as whole, whole[: len(piece)] as aligned:
                if verb == "write":
                    aligned[:] = piece
                done = self._made(verb, offset, aligned)
                if verb == "read":
                    piece[:done] = aligned[:done]
            return done
        finally:
            self._bounce.put(block)

    def aligned(self, view: memoryview) -> bool:
        """Whether O_DIRECT takes memory that starts where ``view`` does."""
        return address_of(view) % self.policy.alignment == 0

    def _leave_direct(self) -> None:
        # The descriptor is switched before the flag: whoever sees ``direct`` False may send unaligned memory at once.
        self._io.set_direct(self.descriptor, False)
        self.direct = False


def bytes_of(buffer: Buffer) -> memoryview:
    """The memory of ``buffer`` as bytes. Raises ``StorageError`` for misuse."""
    if isinstance(buffer, torch.Tensor):
        if buffer.dtype is not torch.uint8 or buffer.device.type != "cpu" or not buffer.is_contiguous():
            raise StorageError(
                f"a disk transfer needs a contiguous uint8 tensor on the CPU, got {buffer.dtype} on {buffer.device} "
                f"with strides {tuple(buffer.stride())}"
            )
        return buffer.reshape(-1).numpy().data
    if not buffer.c_contiguous:
        raise StorageError("a disk transfer needs a contiguous memoryview")
    return buffer.cast("B") if buffer.nbytes else memoryview(bytearray())


def _release(fd: int, owner: int | None, ledger: Ledger, kind: Kind, nbytes: int) -> None:
    if owner == os.getpid():
        # Forked children have the descriptor too (the workers of a DataLoader, say), and with it all of the space.
        with suppress(OSError):  # it goes with the last of them then
            os.ftruncate(fd, 0)
    try:
        os.close(fd)
    finally:
        ledger.discharge(kind, nbytes)
