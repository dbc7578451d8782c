"""The file operations of checkpoints, as a seam: tests put faults and crashes between any two of them."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Final, final

from forebay.errors import DiskFull, ForebayError, StorageError
from forebay.tiers.io import NO_SPACE, errno_words
from forebay.units import format_bytes

__all__ = ["Files", "SystemFiles", "read_whole", "refused", "write_whole"]

# Python's own have no modes. FALLOC_FL_KEEP_SIZE and FALLOC_FL_PUNCH_HOLE of linux/falloc.h.
_fallocate = ctypes.CDLL(None, use_errno=True).fallocate64
_fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_PUNCH_HOLE: Final = 0x01 | 0x02
_CANNOT: Final = frozenset({errno.EOPNOTSUPP, errno.ENOSYS})


class Files(ABC):
    """What a checkpoint asks of the operating system. Every method raises ``OSError`` as the system call does."""

    @abstractmethod
    def make_folder(self, path: Path) -> None:
        """Makes a folder that was not there and that only its owner can use (mode 0700)."""

    @abstractmethod
    def create(self, path: Path) -> int:
        """Makes a file that was not there (mode 0600) and opens it for writing."""

    @abstractmethod
    def open(self, path: Path) -> int:
        """Opens a file, no link, for reading."""

    @abstractmethod
    def size(self, fd: int) -> int:
        """Bytes of an open file."""

    @abstractmethod
    def write(self, fd: int, buffer: memoryview, offset: int) -> int:
        """Writes at most ``len(buffer)`` bytes; returns how many."""

    @abstractmethod
    def read(self, fd: int, buffer: memoryview, offset: int) -> int:
        """Reads at most ``len(buffer)`` bytes; returns how many, 0 at the end of the file."""

    @abstractmethod
    def sync(self, fd: int) -> None:
        """Returns when what was written to a file is on the disk."""

    @abstractmethod
    def drop(self, fd: int) -> None:
        """Has a file that is on the disk leave the page cache."""

    @abstractmethod
    def close(self, fd: int) -> None:
        """Closes a file."""

    @abstractmethod
    def sync_folder(self, path: Path) -> None:
        """Returns when the names in a folder are on the disk."""

    @abstractmethod
    def replace(self, source: Path, target: Path) -> None:
        """Gives a file another name, in one step, in the place of what had that name."""

    @abstractmethod
    def remove(self, path: Path) -> None:
        """Removes a file, or a folder with all that is in it."""

    @abstractmethod
    def empty(self, path: Path, ranges: Sequence[tuple[int, int]]) -> None:
        """Gives back the space of ``ranges`` (offset and bytes) of a file, which read as zeros then; nothing happens
        where the file system cannot."""

    @abstractmethod
    def taken(self, path: Path) -> int:
        """Bytes that a file takes on the disk."""

    @abstractmethod
    def names(self, path: Path) -> list[str]:
        """The names in a folder."""

    @abstractmethod
    def free_bytes(self, path: Path) -> int:
        """Bytes that may still be written to the file system of ``path``."""


@final
class SystemFiles(Files):
    """The calls themselves."""

    def make_folder(self, path: Path) -> None:
        os.mkdir(path, mode=0o700)

    def create(self, path: Path) -> int:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode=0o600)

    def open(self, path: Path) -> int:
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW)

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def write(self, fd: int, buffer: memoryview, offset: int) -> int:
        return os.pwrite(fd, buffer, offset)

    def read(self, fd: int, buffer: memoryview, offset: int) -> int:
        return os.preadv(fd, [buffer], offset)

    def sync(self, fd: int) -> None:
        # With all that is needed to find the bytes again, their place and their number; when they were written may be
        # lost, and costs a commit of the file system's journal.
        os.fdatasync(fd)

    def drop(self, fd: int) -> None:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self, fd: int) -> None:
        os.close(fd)

    def sync_folder(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def replace(self, source: Path, target: Path) -> None:
        os.replace(source, target)

    def remove(self, path: Path) -> None:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()

    def empty(self, path: Path, ranges: Sequence[tuple[int, int]]) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_NOFOLLOW)
        try:
            for offset, nbytes in ranges:
                if _fallocate(fd, _PUNCH_HOLE, offset, nbytes) and ctypes.get_errno() not in _CANNOT:
                    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        finally:
            os.close(fd)

    def taken(self, path: Path) -> int:
        return os.stat(path, follow_symlinks=False).st_blocks * 512

    def names(self, path: Path) -> list[str]:
        return sorted(os.listdir(path))

    def free_bytes(self, path: Path) -> int:
        stat = os.statvfs(path)
        return stat.f_bavail * stat.f_frsize


def write_whole(files: Files, fd: int, buffer: memoryview, offset: int) -> None:
    """Writes all of ``buffer``, however many calls that takes. Raises ``OSError``."""
    position = 0
    while position < len(buffer):
        done = files.write(fd, buffer[position:], offset + position)
        if done == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        position += done


def read_whole(files: Files, fd: int, buffer: memoryview, offset: int) -> None:
    """Fills ``buffer``. Raises ``OSError``, and ``EOFError`` where the file ends before that."""
    position = 0
    while position < len(buffer):
        done = files.read(fd, buffer[position:], offset + position)
        if done == 0:
            raise EOFError
        position += done


def refused(files: Files, action: str, path: Path, error: OSError, needed: int = 0) -> ForebayError:
    """The error for an ``action`` (verb and object) on ``path`` that the operating system refused. ``needed`` are the
    bytes that were to be written, if any."""
    message = f"cannot {action} {path}: {errno_words(error)}"
    if error.errno in NO_SPACE:
        try:
            free = files.free_bytes(path.parent)
        except OSError:
            free = 0
        return DiskFull(
            f"{message}, {format_bytes(free)} are free; make room, or name a folder on another disk",
            needed=needed,
            allowed=free,
        )
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return StorageError(f"{message}; name a folder that can be written")
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return StorageError(f"{message}; it was moved or removed: put it back, or name another folder")
    return StorageError(f"{message}; check the disk, or name a folder on another one")
