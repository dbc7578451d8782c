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

__all__ = ["LOCK", "FolderLock"]

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


def _holder(fd: int) -> str:
    with contextlib.suppress(OSError, ValueError):
        return f"process {int(os.pread(fd, 32, 0))}"
    return "another process"
