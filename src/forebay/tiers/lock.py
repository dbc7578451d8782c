"""One process at a time in a folder."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from pathlib import Path
from typing import Final, final

from forebay.errors import StorageError
from forebay.tiers.io import errno_words

__all__ = ["LOCK", "FolderLock", "FolderLocks"]

LOCK: Final = "lock"
"""The file in the folder that is locked. It stays: whoever removed it could remove another one's."""


@final
class FolderLock:
    """Holds ``folder`` (``flock``, on the file ``lock`` in it) until it is closed or the process ends, however it ends.

    Raises ``StorageError`` where another process, or another holder in this one, has it, and where no file can be
    locked there.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / LOCK
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise StorageError(
                f"cannot lock {folder}: {errno_words(error)}; name a folder that is there and can be written"
            ) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        except OSError as error:
            holder = _holder(fd)
            os.close(fd)
            if error.errno == errno.EWOULDBLOCK:
                raise StorageError(
                    f"{folder} is in use by {holder}; wait for its end, or name another folder"
                ) from None
            raise StorageError(f"cannot lock {folder}: {errno_words(error)}; name a folder on another disk") from error
        self._path = path
        self._fd: int | None = fd
        self._pid = os.getpid()

    def stands(self) -> bool:
        """Whether it still holds what is in the place of its folder: not where that was removed or moved."""
        if self._fd is None:
            return False
        try:
            return os.path.samestat(os.fstat(self._fd), os.stat(self._path, follow_symlinks=False))
        except OSError as error:
            return error.errno not in (errno.ENOENT, errno.ENOTDIR)

    def close(self) -> None:
        """Gives the folder back; a second call does nothing. In a forked child: leaves it to its parent."""
        fd, self._fd = self._fd, None
        if fd is None:
            return
        try:
            # The workers of a DataLoader, say, have the descriptor too, and would go on holding what it locks.
            if os.getpid() == self._pid:
                fcntl.flock(fd, fcntl.LOCK_UN)
        finally:
            os.close(fd)


@final
class FolderLocks:
    """The folders that one run holds, each once."""

    def __init__(self) -> None:
        self._held: dict[Path, FolderLock] = {}

    def take(self, folder: Path) -> None:
        """Holds ``folder``, if it does not yet. Raises what ``FolderLock`` raises."""
        path = folder.resolve()
        # Each is a descriptor, and a run may go through many folders that it removes again.
        for gone in [at for at, lock in self._held.items() if not lock.stands()]:
            self._held.pop(gone).close()
        if path not in self._held:
            self._held[path] = FolderLock(path)

    def take_over(self, folder: Path, lock: FolderLock) -> None:
        """Holds ``folder``, a resolved path, by ``lock``, which somebody else has taken."""
        self._held[folder] = lock

    def leave(self, folder: Path) -> None:
        """Gives ``folder`` back, where it is held."""
        lock = self._held.pop(folder.resolve(), None)
        if lock is not None:
            lock.close()

    def close(self) -> None:
        """Gives all folders back, each whatever those before it raised."""
        with contextlib.ExitStack() as closing:
            for lock in self._held.values():
                closing.callback(lock.close)


def _holder(fd: int) -> str:
    with contextlib.suppress(OSError, ValueError):
        return f"process {int(os.pread(fd, 32, 0))}"
    return "another process"
