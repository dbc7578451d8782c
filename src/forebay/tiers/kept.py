"""Files of the disk tier that outlive their run: a checkpoint names what is in them, and copies none of it.

All other files of the tier have no name, so that nothing is left of a run that is killed. These have one, in the folder
of the checkpoint: ``home-TOKEN-states`` say, the token drawn anew by each run. They go when the run that made them ends
without a checkpoint that names them, and with the first checkpoint that names others.

Every write notes the checksum of what it has written: the CRC-32 of the sums of its pages, as 64-bit words. A sum costs
little more than the memory that it reads, and shows a flipped bit and a page that is not the one written; the CRC-32
over the sums shows pages in the wrong place.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import zlib
from bisect import bisect_left, insort
from enum import Enum, auto
from pathlib import Path
from typing import Final, final

import numpy as np

from forebay.tiers.diskfile import Buffer, TierFile, bytes_of
from forebay.tiers.lock import FolderLock

__all__ = ["HOME", "KeptFile", "KeptFolder", "checksum"]

HOME: Final = "home-"
"""First part of the names of files that stay."""

_WORDS: Final = 512
"""64-bit words of a page."""


def checksum(content: memoryview, before: int = 0) -> int:
    """The checksum of whole pages; ``before`` is that of the pages that come before them."""
    words = np.frombuffer(content, dtype=np.uint64).reshape(-1, _WORDS)
    return zlib.crc32(words.sum(axis=1, dtype=np.uint64), before)


@final
class KeptFile(TierFile):
    """A file of the tier, at ``path``, that notes the checksum of what is written."""

    def __init__(self, file: TierFile, path: Path) -> None:
        self.nbytes = file.nbytes
        self.path = path
        self._file = file
        # What was written in one call and has not been written to since: where it begins, its bytes and its checksum.
        self._starts: list[int] = []
        self._written: dict[int, tuple[int, int]] = {}

    def read(self, offset: int, buffer: Buffer) -> None:
        self._file.read(offset, buffer)

    def write(self, offset: int, buffer: Buffer) -> None:
        view = bytes_of(buffer)
        self._forget(offset, len(view))
        self._file.write(offset, view)
        if view:
            insort(self._starts, offset)
            self._written[offset] = len(view), checksum(view)

    def close(self) -> None:
        self._file.close()

    def checksum(self, offset: int, nbytes: int) -> int | None:
        """The checksum of the bytes from ``offset`` on; None where they were not written in one call. Whoever asks has
        waited for the writes."""
        length, found = self._written.get(offset, (0, 0))
        return found if length == nbytes else None

    def _forget(self, offset: int, nbytes: int) -> None:
        if self._written.get(offset, (0, 0))[0] == nbytes:
            # Nearly always: the parts of a home do not change. And no two that are noted share a byte.
            self._drop(bisect_left(self._starts, offset))
            return
        place = bisect_left(self._starts, offset)
        if place and self._starts[place - 1] + self._written[self._starts[place - 1]][0] > offset:
            place -= 1
        while place < len(self._starts) and self._starts[place] < offset + nbytes:
            self._drop(place)

    def _drop(self, place: int) -> None:
        del self._written[self._starts.pop(place)]


class _Fate(Enum):
    """What becomes of the files at the end."""

    GO = auto()  # no checkpoint names them
    STAY = auto()  # one does


@final
class KeptFolder:
    """The folder ``path`` of a checkpoint, held by ``lock``, as the place of one run's files that stay."""

    def __init__(self, path: Path, lock: FolderLock) -> None:
        self.path = path
        self.lock = lock
        self.files: dict[str, KeptFile] = {}
        self._token = secrets.token_hex(4)
        self._fate = _Fate.GO

    @property
    def names(self) -> frozenset[str]:
        """The files of this run."""
        return frozenset(file.path.name for file in self.files.values())

    def path_of(self, what: str) -> Path:
        """Where the file of ``what`` is, parameters or states."""
        return self.path / f"{HOME}{self._token}-{what}"

    def hold(self, what: str, file: TierFile) -> KeptFile:
        """Takes the file of ``what``, which was made at ``path_of``."""
        made = self.files[what] = KeptFile(file, self.path_of(what))
        return made

    def stand(self) -> None:
        """A checkpoint that stands names the files."""
        self._fate = _Fate.STAY

    def close(self) -> None:
        """Removes the files, closed by now, unless a checkpoint names them; a second call does nothing."""
        if self._fate is _Fate.GO:
            for file in self.files.values():
                with contextlib.suppress(OSError):  # the next run in the folder removes what nobody names
                    os.unlink(file.path)
        self.files.clear()
