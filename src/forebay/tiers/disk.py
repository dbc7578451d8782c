"""The disk tier: a private folder in the user's path, and the preallocated files of one run in it."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import queue
import secrets
import shutil
import stat
import weakref
from pathlib import Path
from types import TracebackType
from typing import final

from forebay.errors import ConfigError, DiskFull, StorageError
from forebay.memory import Kind, Ledger
from forebay.tiers.diskfile import Buffer, DiskFile, DiskPolicy, Meter
from forebay.tiers.io import NO_SPACE, Io, SystemIo, errno_words, preallocate, storage_error
from forebay.tiers.pages import map_pages
from forebay.tiers.sums import PageSums
from forebay.units import format_bytes

__all__ = ["Buffer", "DiskFile", "DiskFolder", "DiskPolicy"]


@final
class DiskFolder:
    """A private folder (mode 0700) inside the user's ``path`` that holds the files of one run.

    Use it as a context manager or close it: the folder and the files are removed either way, also at the end of the
    interpreter. ``ledger`` (disk) counts the files' bytes; ``host_ledger`` counts ``policy.staging_nbytes`` as
    ``Kind.STAGING`` (with ``bounce_of``, another folder whose bounce buffers are used, there are none to count), and
    the checksums of files. ``meter`` counts the bytes written.

    Raises ``ConfigError`` for a path that is missing, not a folder or not writable, ``DiskFull`` when fewer than
    ``needed`` bytes are free, ``HostOutOfMemory`` from ``host_ledger``. Nothing is left behind then.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        ledger: Ledger,
        *,
        needed: int = 0,
        host_ledger: Ledger | None = None,
        policy: DiskPolicy | None = None,
        io: Io | None = None,
        bounce_of: DiskFolder | None = None,
    ) -> None:
        self.policy = policy or DiskPolicy()
        self.meter = Meter()
        self._ledger = ledger
        self._host_ledger = host_ledger
        self._io = io or SystemIo()
        parent = Path(path)
        _check_parent(parent, needed, self._io)
        staging = self.policy.staging_nbytes if bounce_of is None else 0
        if host_ledger is not None:
            host_ledger.charge(Kind.STAGING, staging, "bounce buffers of the disk tier")
        try:
            self.path = _make_folder(parent, self._io)
        except BaseException:
            if host_ledger is not None:
                host_ledger.discharge(Kind.STAGING, staging)
            raise
        self._owns_bounce = bounce_of is None
        self._bounce: queue.SimpleQueue[mmap.mmap] = (
            _bounce_buffers(self.policy) if bounce_of is None else bounce_of._bounce
        )
        # Weak: a file that nobody holds closes itself, and the finalizer below must not keep its own folder alive.
        self._files: weakref.WeakValueDictionary[str, DiskFile] = weakref.WeakValueDictionary()
        # Runs once: at close, when the folder is collected, or when the interpreter ends.
        self._release = weakref.finalize(self, _remove_folder, self.path, os.getpid(), host_ledger, staging)

    @property
    def direct(self) -> bool:
        """Whether every file that is open goes past the page cache."""
        return all(file.direct for file in self._files.values())

    def create(
        self,
        name: str,
        nbytes: int,
        kind: Kind = Kind.STATE,
        stays: Path | None = None,
        at_first: int | None = None,
    ) -> DiskFile:
        """A new file of ``nbytes`` rounded up to the alignment, charged to the ledger as ``kind`` until it is closed.

        Its bytes go then, or with the process. With ``stays`` they are a file there, which its holder removes. The file
        system sets all of them aside, or so many ``at_first``, and the others when the file is asked to ``reserve``.
        Bytes never written read as zero. Raises ``DiskFull``, and leaves nothing, when the budget or the file system
        has no room; ``StorageError`` for a bad name, a second file of the same name, and any other refusal.
        """
        if not self._release.alive:
            raise StorageError(f"the disk folder {self.path} is closed; no file can be made in it")
        taken = self._files.get(name)
        if not name or "/" in name or "\0" in name or name in (".", "..") or (taken is not None and not taken.closed):
            raise StorageError(
                f"{name!r} cannot name a new file in {self.path}: it is empty, taken or not a plain name"
            )
        if nbytes <= 0:
            raise StorageError(f"the file {name} needs 1 byte or more, got {nbytes}")
        size = self.policy.padded(nbytes)
        self._ledger.charge(kind, size, name)
        sums: PageSums | None = None
        try:
            # Activations are read once, by the step that made them.
            if self.policy.verified and kind is not Kind.ACTIVATION:
                sums = PageSums(size, ledger=self._host_ledger)
            path = stays or self.path / name
            fd, direct = _make_file(
                path, size, self.policy.direct, self._io, stays=stays is not None, at_first=at_first
            )
        except BaseException:
            if sums is not None:
                sums.close()
            self._ledger.discharge(kind, size)
            raise
        file = DiskFile(
            path,
            fd,
            size,
            kind=kind,
            direct=direct,
            ledger=self._ledger,
            policy=self.policy,
            io=self._io,
            bounce=self._bounce,
            meter=self.meter,
            sums=sums,
            frees=stays is None,
        )
        self._files[name] = file
        return file

    def close(self) -> None:
        """Closes the files (waiting for calls that are under way) and removes the folder; again: does nothing."""
        for file in list(self._files.values()):
            file.close()
        if self._owns_bounce:
            # Whoever still holds this object must not hold the memory that the ledger is about to forget. Folders that
            # borrow it are closed before the one that owns it.
            with contextlib.suppress(queue.Empty):
                while True:
                    self._bounce.get_nowait().close()
        self._release()

    def __enter__(self) -> DiskFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _bounce_buffers(policy: DiskPolicy) -> queue.SimpleQueue[mmap.mmap]:
    buffers: queue.SimpleQueue[mmap.mmap] = queue.SimpleQueue()
    for _ in range(policy.bounce_buffers if policy.direct else 0):
        buffers.put(map_pages(policy.bounce_nbytes))
    return buffers


def _check_parent(parent: Path, needed: int, io: Io) -> None:
    try:
        mode = parent.stat().st_mode
    except OSError as error:
        raise ConfigError(
            f"the disk path {parent} cannot be used: {errno_words(error)}; make the folder, or name another"
        ) from error
    if not stat.S_ISDIR(mode):
        raise ConfigError(f"the disk path {parent} is not a folder; name a folder")
    free = io.free_bytes(parent)
    if free < needed:
        raise DiskFull(
            f"the disk tier needs {format_bytes(needed)} in {parent} and {format_bytes(free)} are free; "
            "make room, or name another disk",
            needed=needed,
            allowed=free,
        )


def _make_folder(parent: Path, io: Io) -> Path:
    folder = parent / f"forebay-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        io.make_folder(folder)
    except OSError as error:
        if error.errno in NO_SPACE:
            raise storage_error(io, "make", folder, error) from error
        raise ConfigError(
            f"the disk path {parent} cannot be written: {errno_words(error)}; "
            "change its permissions, or name another folder"
        ) from error
    return folder


def _make_file(path: Path, nbytes: int, direct: bool, io: Io, *, stays: bool, at_first: int | None) -> tuple[int, bool]:
    """A new file of ``nbytes``; returns its descriptor and whether it is direct. Nothing is left if it fails."""
    try:
        fd, direct = _open(path, direct, io)
        try:
            preallocate(fd, nbytes, nbytes if at_first is None else at_first, io)
            # The descriptor is enough from here on. Without a name the kernel frees the space when the process ends,
            # however it ends; a killed run would otherwise leave all of it on the user's disk.
            if not stays:
                path.unlink()
        except BaseException:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise storage_error(io, f"make {format_bytes(nbytes)} of", path, error, nbytes) from error
    return fd, direct


def _open(path: Path, direct: bool, io: Io) -> tuple[int, bool]:
    try:
        return io.open_new(path, direct), direct
    except OSError as error:
        if not direct or error.errno != errno.EINVAL:
            raise
    # The file was made before the kernel noticed that its file system refuses O_DIRECT.
    path.unlink(missing_ok=True)
    return io.open_new(path, False), False


def _remove_folder(path: Path, pid: int, host_ledger: Ledger | None, staging: int) -> None:
    if os.getpid() != pid:  # a forked child inherits this finalizer, but the folder is its parent's
        return
    shutil.rmtree(path, ignore_errors=True)
    if host_ledger is not None:
        host_ledger.discharge(Kind.STAGING, staging)
