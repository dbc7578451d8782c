"""The system calls of the disk tier, as a seam: tests put short transfers and faults here."""

from __future__ import annotations

import errno
import fcntl
import os
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Final, final

from forebay.errors import DiskFull, ForebayError, StorageError
from forebay.tiers.host import available_disk
from forebay.tiers.kernel_queue import CallQueue, KernelQueue
from forebay.units import format_bytes

__all__ = ["NO_SPACE", "Io", "SystemIo", "errno_words", "preallocate", "storage_error"]

NO_SPACE: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Error numbers that mean: the disk is full, or the user's share of it."""

# EINVAL: where a file system cannot preallocate, glibc writes a byte into every block instead, which O_DIRECT refuses.
_CANNOT_PREALLOCATE: Final = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})


class Io(ABC):
    """What the disk tier asks of the operating system. Every method raises ``OSError`` as the system call does."""

    @abstractmethod
    def free_bytes(self, path: Path) -> int:
        """Bytes that may still be written to the file system of ``path``; ``ConfigError`` if nobody can say."""

    @abstractmethod
    def make_folder(self, path: Path) -> None:
        """Makes a folder that only its owner can use (mode 0700)."""

    @abstractmethod
    def open_new(self, path: Path, direct: bool) -> int:
        """Makes a file that was not there (mode 0600) and opens it for reading and writing."""

    @abstractmethod
    def allocate(self, fd: int, nbytes: int) -> None:
        """Gives the file ``nbytes`` of real space."""

    @abstractmethod
    def set_direct(self, fd: int, direct: bool) -> None:
        """Turns O_DIRECT of an open file on or off."""

    @abstractmethod
    def preadv(self, fd: int, buffer: memoryview, offset: int) -> int:
        """Reads at most ``len(buffer)`` bytes; returns how many, 0 at the end of the file."""

    @abstractmethod
    def pwritev(self, fd: int, buffer: memoryview, offset: int) -> int:
        """Writes at most ``len(buffer)`` bytes; returns how many."""

    @abstractmethod
    def open_queue(self, size: int) -> CallQueue:
        """A queue for ``size`` calls at a time, which one thread makes. ``OSError`` where the kernel gives none."""


@final
class SystemIo(Io):
    """The calls themselves."""

    def free_bytes(self, path: Path) -> int:
        return available_disk(path)

    def make_folder(self, path: Path) -> None:
        os.mkdir(path, mode=0o700)

    def open_new(self, path: Path, direct: bool) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | (os.O_DIRECT if direct else 0)
        return os.open(path, flags, mode=0o600)

    def allocate(self, fd: int, nbytes: int) -> None:
        os.posix_fallocate(fd, 0, nbytes)

    def set_direct(self, fd: int, direct: bool) -> None:
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if direct else flags & ~os.O_DIRECT)

    def preadv(self, fd: int, buffer: memoryview, offset: int) -> int:
        return os.preadv(fd, [buffer], offset)

    def pwritev(self, fd: int, buffer: memoryview, offset: int) -> int:
        return os.pwritev(fd, [buffer], offset)

    def open_queue(self, size: int) -> CallQueue:
        return KernelQueue(size)


def preallocate(fd: int, nbytes: int, at_first: int, io: Io) -> None:
    """Gives a file ``nbytes``, and space for the first ``at_first`` of them. Raises ``OSError``."""
    try:
        io.allocate(fd, at_first)
    except OSError as error:
        if error.errno not in _CANNOT_PREALLOCATE:
            raise
        at_first = 0
    if at_first < nbytes:
        os.ftruncate(fd, nbytes)


def storage_error(io: Io, action: str, path: Path, error: OSError, needed: int = 0) -> ForebayError:
    """The error for a refused ``action`` (verb and object) on ``path``."""
    message = f"cannot {action} {path}: {errno_words(error)}"
    if error.errno not in NO_SPACE:
        return StorageError(f"{message}; check the disk, or name another")
    free = io.free_bytes(path.parent)
    return DiskFull(
        f"{message}, {format_bytes(free)} are free; make room, or name another disk", needed=needed, allowed=free
    )


def errno_words(error: OSError) -> str:
    """What the operating system says, with the name of its error number."""
    number = error.errno or 0
    return f"{os.strerror(number)} ({errno.errorcode.get(number, number)})"
