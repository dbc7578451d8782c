"""File operations of checkpoints that fail, or stop for good, at one that is counted."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar, final

from forebay.checkpoint.files import Files, SystemFiles

__all__ = ["At", "Counted", "Crash", "crash", "cut_power", "cut_power_behind_renames", "fail"]

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


def cut_power(counted: Counted, operation: str) -> None:
    """The same, and of the names in a folder the disk has only what was synced: what is new is not there, what was
    renamed is so no longer. What was removed is gone all the same: a file system may write names in any order."""
    _lose(counted, operation, [*counted.made, *counted.renamed])


def cut_power_behind_renames(counted: Counted, operation: str) -> None:
    """The same, and of the names that are not synced the disk has those of renames, and none of what is new."""
    _lose(counted, operation, counted.made)


def _lose(counted: Counted, operation: str, changes: Sequence[Change]) -> None:
    try:
        crash(counted, operation)
    finally:
        for change in sorted(changes, key=lambda change: change.number, reverse=True):
            change.undo()


def fail(number: int) -> At:
    """An operation that fails once, with error ``number``."""

    def at(counted: Counted, operation: str) -> None:
        raise OSError(number, os.strerror(number))

    return at


@dataclass(frozen=True)
class Change:
    """Of a name in ``folder``, by operation ``number``: the disk has it when the folder is synced."""

    folder: Path
    number: int
    undo: Callable[[], object]


@final
class Counted(Files):
    """The operations of the system, of which the one numbered ``at`` (from 0) does ``what`` instead. ``free``: the
    bytes that the disk is said to have. ``behind`` is a process that crashed before: what it has not synced is not on
    the disk yet."""

    def __init__(
        self,
        at: int | None = None,
        what: At | None = None,
        free: int | None = None,
        behind: Counted | None = None,
    ) -> None:
        self._system = SystemFiles()
        self._at = at
        self._what = what
        self._free = free
        self._paths: dict[int, Path] = {}
        self.done: list[str] = []
        self.unsynced: set[Path] = set()
        # Names that no folder was synced behind: of what is new, and of what has another name.
        self.made: list[Change] = [] if behind is None else behind.earlier(behind.made)
        self.renamed: list[Change] = [] if behind is None else behind.earlier(behind.renamed)
        self.gone = False

    def _count(self, operation: str, run: Callable[[], T]) -> T:
        if self.gone:
            raise Crash(operation)
        self.done.append(operation)
        if len(self.done) - 1 == self._at and self._what is not None:
            self._what(self, operation)
        return run()

    def _note(self, changes: list[Change], folder: Path, undo: Callable[[], object]) -> None:
        changes.append(Change(folder, len(self.done), undo))

    def earlier(self, changes: Sequence[Change]) -> list[Change]:
        """``changes`` of this process as those of one before: all of them come before the first operation."""
        return [replace(change, number=change.number - len(self.done)) for change in changes]

    def make_folder(self, path: Path) -> None:
        self._count("make_folder", lambda: self._system.make_folder(path))
        self._note(self.made, path.parent, lambda: shutil.rmtree(path, ignore_errors=True))

    def create(self, path: Path) -> int:
        fd = self._count("create", lambda: self._system.create(path))
        self._paths[fd] = path
        self.unsynced.add(path)
        self._note(self.made, path.parent, lambda: path.unlink(missing_ok=True))
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
        self.made = [change for change in self.made if change.folder != path]
        self.renamed = [change for change in self.renamed if change.folder != path]

    def replace(self, source: Path, target: Path) -> None:
        self._count("replace", lambda: self._replace(source, target))

    def _replace(self, source: Path, target: Path) -> None:
        was = target.read_bytes() if target.exists() else None
        self._system.replace(source, target)

        def undo() -> None:
            target.replace(source)
            if was is not None:
                target.write_bytes(was)

        self._note(self.renamed, target.parent, undo)

    def remove(self, path: Path) -> None:
        self._count("remove", lambda: self._system.remove(path))

    def names(self, path: Path) -> list[str]:
        return self._count("names", lambda: self._system.names(path))

    def free_bytes(self, path: Path) -> int:
        there = self._count("free_bytes", lambda: self._system.free_bytes(path))
        return there if self._free is None else self._free
