"""File operations of checkpoints that fail, or stop for good, at one that is counted."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar, final

from forebay.checkpoint.files import Files, SystemFiles

__all__ = ["Counted", "Crash", "crash", "fail"]

T = TypeVar("T")
At = Callable[["Counted", str], None]


class Crash(BaseException):
    """The process is gone: nothing that it would still do happens."""


def crash(counted: Counted, operation: str) -> None:
    """The process ends here. What was not synced is lost, half of it: a power cut does that, ``kill -9`` does not."""
    counted.gone = True
    for path in counted.unsynced:
        os.truncate(path, path.stat().st_size // 2)
    raise Crash(operation)


def fail(number: int) -> At:
    """An operation that fails once, with error ``number``."""

    def at(counted: Counted, operation: str) -> None:
        raise OSError(number, os.strerror(number))

    return at


@final
class Counted(Files):
    """The operations of the system, of which the one numbered ``at`` (from 0) does ``what`` instead. ``free``: the
    bytes that the disk is said to have."""

    def __init__(self, at: int | None = None, what: At | None = None, free: int | None = None) -> None:
        self._system = SystemFiles()
        self._at = at
        self._what = what
        self._free = free
        self._paths: dict[int, Path] = {}
        self.done: list[str] = []
        self.unsynced: set[Path] = set()
        self.gone = False

    def _count(self, operation: str, run: Callable[[], T]) -> T:
        if self.gone:
            raise Crash(operation)
        self.done.append(operation)
        if len(self.done) - 1 == self._at and self._what is not None:
            self._what(self, operation)
        return run()

    def make_folder(self, path: Path) -> None:
        self._count("make_folder", lambda: self._system.make_folder(path))

    def create(self, path: Path) -> int:
        fd = self._count("create", lambda: self._system.create(path))
        self._paths[fd] = path
        self.unsynced.add(path)
        return fd

    def open(self, path: Path) -> int:
        fd = self._count("open", lambda: self._system.open(path))
        self._paths[fd] = path
        return fd

    def size(self, fd: int) -> int:
        return self._count("size", lambda: self._system.size(fd))

    def write(self, fd: int, buffer: memoryview, offset: int) -> int:
        # Never more than half at a time: the rest is another call, before which everything may end.
        part = buffer[: -(-len(buffer) // 2)] if len(buffer) > 512 else buffer
        self.unsynced.add(self._paths[fd])
        return self._count("write", lambda: self._system.write(fd, part, offset))

    def read(self, fd: int, buffer: memoryview, offset: int) -> int:
        return self._count("read", lambda: self._system.read(fd, buffer, offset))

    def empty(self, path: Path, ranges: Sequence[tuple[int, int]]) -> None:
        self._count("empty", lambda: self._system.empty(path, ranges))

    def taken(self, path: Path) -> int:
        return self._system.taken(path)

    def sync(self, fd: int) -> None:
        self._count("sync", lambda: self._system.sync(fd))
        self.unsynced.discard(self._paths[fd])

    def drop(self, fd: int) -> None:
        self._system.drop(fd)

    def close(self, fd: int) -> None:
        # The descriptor goes whatever happens: that of a process which is gone does too.
        self._system.close(fd)
        self._count("close", lambda: None)

    def sync_folder(self, path: Path) -> None:
        self._count("sync_folder", lambda: self._system.sync_folder(path))

    def replace(self, source: Path, target: Path) -> None:
        self._count("replace", lambda: self._system.replace(source, target))

    def remove(self, path: Path) -> None:
        self._count("remove", lambda: self._system.remove(path))

    def names(self, path: Path) -> list[str]:
        return self._count("names", lambda: self._system.names(path))

    def free_bytes(self, path: Path) -> int:
        there = self._count("free_bytes", lambda: self._system.free_bytes(path))
        return there if self._free is None else self._free
