"""Files of the disk tier that outlive their run: a checkpoint names what is in them, and copies none of it.

All other files of the tier have no name, so that nothing is left of a run that is killed. These have one, in the folder
of the checkpoint: ``home-TOKEN-states`` say, the token drawn anew by each run. They go when the run that made them ends
without a checkpoint that names them, and with the first checkpoint that names others.

Every write notes the checksum of what it has written: the CRC-32 of the sums of its pages (``sums``). It is made by
another thread while the kernel has the bytes: the lane of writes would be slower for it by one part in twenty.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from bisect import bisect_left, insort
from concurrent.futures import wait
from enum import Enum, auto
from functools import partial
from pathlib import Path
from typing import Final, final

from forebay.tiers.crew import Crew
from forebay.tiers.diskfile import Buffer, TierFile, bytes_of
from forebay.tiers.lock import FolderLock
from forebay.tiers.sums import checksum

__all__ = ["HOME", "KeptFile", "KeptFolder"]

HOME: Final = "home-"
"""First part of the names of files that stay."""


@final
class KeptFile(TierFile):
    """A file of the tier, at ``path``, that notes the checksum of what is written, which ``summing`` makes."""

    def __init__(self, file: TierFile, path: Path, summing: Crew) -> None:
        self.nbytes = file.nbytes
        self.path = path
        self._file = file
        self._summing = summing
        # What was written in one call and has not been written to since: where it begins, its bytes and its checksum.
        self._starts: list[int] = []
        self._written: dict[int, tuple[int, int]] = {}

    def read(self, offset: int, buffer: Buffer) -> None:
        self._file.read(offset, buffer)

    def write(self, offset: int, buffer: Buffer) -> None:
        view = bytes_of(buffer)
        self._forget(offset, len(view))
        summed = self._summing.submit(partial(checksum, view))
        try:
            self._file.write(offset, view)
        finally:
            wait([summed])  # the buffer is the caller's again
        if view:
            insort(self._starts, offset)
            self._written[offset] = len(view), summed.result()

    def reserve(self) -> None:
        self._file.reserve()

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
    """The folder ``path`` of a checkpoint, held by ``lock``, as the place of one run's files that stay. ``before`` are
    the bytes there of another run's, which go with the first checkpoint of this one."""

    def __init__(self, path: Path, lock: FolderLock, before: int = 0) -> None:
        self.path = path
        self.lock = lock
        self.before = before
        self.files: dict[str, KeptFile] = {}
        self._token = secrets.token_hex(4)
        self._fate = _Fate.GO
        self._pid = os.getpid()
        self._summing = Crew(1, "forebay-disk-sum")  # no thread before the first sum

    @property
    def names(self) -> frozenset[str]:
        """The files of this run."""
        return frozenset(file.path.name for file in self.files.values())

    def path_of(self, what: str) -> Path:
        """Where the file of ``what`` is, parameters or states."""
        return self.path / f"{HOME}{self._token}-{what}"

    def hold(self, what: str, file: TierFile) -> KeptFile:
        """Takes the file of ``what``, which was made at ``path_of``."""
        made = self.files[what] = KeptFile(file, self.path_of(what), self._summing)
        return made

    def at_first(self, nbytes: int, others: int) -> int:
        """Of a file of ``nbytes``, the last ``others`` of which are other places, how many need space from the
        beginning. Nobody writes these before a checkpoint of this run stands, and then the files of the run before are
        gone."""
        return nbytes - others if self.before else nbytes

    def reserve(self) -> None:
        """The files of the run before are gone: has space set aside for all of this one's, once. Raises ``DiskFull``,
        ``StorageError``."""
        if self.before:
            for file in self.files.values():
                file.reserve()
            self.before = 0

    def stand(self) -> None:
        """A checkpoint that stands names the files."""
        self._fate = _Fate.STAY

    def close(self) -> None:
        """Removes the files, closed by now, unless a checkpoint names them; a second call does nothing. In a forked
        child: leaves them to its parent, whose threads the child does not have."""
        if os.getpid() != self._pid:
            return
        self._summing.close()
        if self._fate is _Fate.GO:
            for file in self.files.values():
                with contextlib.suppress(OSError):  # the next run in the folder removes what nobody names
                    os.unlink(file.path)
        self.files.clear()
