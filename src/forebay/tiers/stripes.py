"""The disk tier of one run: files spread in stripes over one folder or several, each best on a disk of its own.

A file is cut into stripes, which go to the folders in turn. Where a folder is full before the others, what follows is
spread over those that have room (a *zone* is a range of the file that is spread over the same folders). Several calls
are in flight at one time, as many in each folder as ``DiskPolicy`` says for reads and for writes (``callers``).
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, final

from forebay.errors import DiskFull, StorageError
from forebay.memory import Kind, Ledger
from forebay.tiers.callers import Callers, Piece, Pieces
from forebay.tiers.disk import DiskFolder
from forebay.tiers.diskfile import Buffer, DiskFile, DiskPolicy, TierFile, bytes_of
from forebay.tiers.io import Io, SystemIo
from forebay.tiers.kernel_queue import Verb
from forebay.units import format_bytes

__all__ = ["DiskTier", "Folder", "StripedFile", "Zone", "lay_out"]

_UNLIMITED: Final = 1 << 62
"""Bytes: more than any disk."""


@dataclass(frozen=True)
class Folder:
    """A folder and the bytes allowed in it (None: what its file system has free)."""

    path: str | os.PathLike[str]
    nbytes: int | None = None


@dataclass(frozen=True)
class Zone:
    """``nbytes`` of a file from ``start`` on, in stripes of ``stripe`` bytes over ``parts`` in turn; ``bases`` is where
    they begin in each part."""

    start: int
    nbytes: int
    stripe: int
    parts: tuple[int, ...]
    bases: tuple[int, ...]

    def share(self, turn: int) -> int:
        """Bytes of the part whose turn is ``turn``."""
        full, rest = divmod(self.nbytes, self.stripe * len(self.parts))
        return full * self.stripe + min(max(rest - turn * self.stripe, 0), self.stripe)

    def find(self, offset: int) -> tuple[int, int, int]:
        """Of the byte at ``offset`` of the file: its part, its offset there, and how many bytes follow there."""
        number, inside = divmod(offset - self.start, self.stripe)
        row, turn = divmod(number, len(self.parts))
        follow = min(self.stripe - inside, self.start + self.nbytes - offset)
        return self.parts[turn], self.bases[turn] + row * self.stripe + inside, follow


def lay_out(nbytes: int, room: Sequence[int], stripe: int, page: int) -> tuple[Zone, ...]:
    """The zones of a file of ``nbytes`` over folders with ``room`` bytes each; all but the sizes in whole ``page``.

    Raises ``DiskFull`` when the folders together have no room.
    """
    zones: list[Zone] = []
    taken = [0] * len(room)

    def add(length: int, size: int, parts: tuple[int, ...]) -> None:
        zone = Zone(sum(z.nbytes for z in zones), length, size, parts, tuple(taken[i] for i in parts))
        for turn, part in enumerate(parts):
            taken[part] += zone.share(turn)
        zones.append(zone)

    left = nbytes
    while parts := tuple(i for i, most in enumerate(room) if left and most - taken[i] >= stripe):
        rows = min((room[i] - taken[i]) // stripe for i in parts)
        add(min(left, rows * stripe * len(parts)), stripe, parts)
        left = nbytes - sum(z.nbytes for z in zones)
    # What is left of each folder is less than a stripe: it is used up in one piece.
    for part, most in enumerate(room):
        length = min(left, (most - taken[part]) // page * page)
        if length > 0:
            add(length, length, (part,))
            left -= length
    if left:
        have = format_bytes(sum(most // page * page for most in room))
        raise DiskFull(
            f"the disk tier needs {format_bytes(nbytes)} and its folders have room for {have}; allow more there, or "
            "name another disk",
            needed=nbytes,
            allowed=nbytes - left,
        )
    return tuple(zones)


@final
class DiskTier:
    """The folders of one run and the files over them. Use it as a context manager or close it.

    ``ledger`` (disk) counts the bytes of all files, ``host_ledger`` the bounce buffers, which the folders share.
    Raises what ``DiskFolder`` raises, and ``DiskFull`` when the folders have no room for ``needed`` bytes together;
    nothing is left behind then.
    """

    def __init__(
        self,
        folders: Sequence[Folder],
        ledger: Ledger,
        *,
        needed: int = 0,
        host_ledger: Ledger | None = None,
        policy: DiskPolicy | None = None,
        io: Io | None = None,
    ) -> None:
        if not folders:
            raise StorageError("a disk tier needs a folder at least")
        self.policy = policy or DiskPolicy()
        self._io = io or SystemIo()
        self._folders: list[DiskFolder] = []
        self._stack = contextlib.ExitStack()
        with contextlib.ExitStack() as opened:
            opened.callback(self.close)
            alone = len(folders) == 1
            for folder in folders:
                made = DiskFolder(
                    folder.path,
                    ledger,
                    needed=needed if alone else 0,
                    host_ledger=host_ledger,
                    policy=self.policy,
                    io=self._io,
                    bounce_of=self._folders[0] if self._folders else None,
                )
                self._folders.append(self._stack.enter_context(made))
            # After the folders: a path that is wrong is named before anything is said about its room. Of one folder
            # alone the ledger and the file system say what fits.
            self._room = [_UNLIMITED if alone else self._allowed(folder) for folder in folders]
            lay_out(self.policy.padded(needed), self._room, self.policy.stripe, self.policy.alignment)
            opened.pop_all()
        self._callers = Callers(len(folders), self.policy, self._io)
        self._stack.callback(self._callers.close)

    @property
    def direct(self) -> bool:
        """Whether every file that is open goes past the page cache."""
        return all(folder.direct for folder in self._folders)

    @property
    def written(self) -> int:
        """Bytes written to the files so far: what a disk wears by."""
        return sum(folder.meter.nbytes for folder in self._folders)

    def create(
        self,
        name: str,
        nbytes: int,
        kind: Kind = Kind.STATE,
        stays: Path | None = None,
        at_first: int | None = None,
    ) -> TierFile:
        """A new file of ``nbytes`` rounded up to the alignment over all folders, as ``DiskFolder.create`` makes one in
        one folder, whose errors it raises; nothing is left when one folder refuses its part. One that ``stays``, or
        has space ``at_first``, is on the disk of the only folder there is."""
        if stays is not None and len(self._folders) > 1:
            raise StorageError(f"{stays} cannot be spread over {len(self._folders)} folders")
        size = self.policy.padded(nbytes)
        alone = len(self._folders) == 1
        if alone and self.policy.reads.depth == self.policy.writes.depth == 1:
            file: TierFile = self._folders[0].create(name, nbytes, kind, stays, at_first)
            self._room[0] -= size
            return file
        # One folder has nobody to take turns with: stripes would only cut what is longer.
        stripe = size if alone else self.policy.stripe
        zones = lay_out(size, self._room, stripe, self.policy.alignment)
        sizes = [0] * len(self._folders)
        for zone in zones:
            for turn, part in enumerate(zone.parts):
                sizes[part] += zone.share(turn)
        parts: list[DiskFile | None] = []
        with contextlib.ExitStack() as made:
            for folder, share in zip(self._folders, sizes, strict=True):
                parts.append(made.enter_context(folder.create(name, share, kind, stays, at_first)) if share else None)
            made.pop_all()
        self._room = [room - share for room, share in zip(self._room, sizes, strict=True)]
        return StripedFile(parts, zones, self.policy, self._callers)

    def close(self) -> None:
        """Closes the files and removes the folders; again: does nothing."""
        self._stack.close()

    def __enter__(self) -> DiskTier:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _allowed(self, folder: Folder) -> int:
        free = self._io.free_bytes(Path(folder.path))
        if folder.nbytes is not None and folder.nbytes > free:
            raise DiskFull(
                f"the disk folder {folder.path} may hold {format_bytes(folder.nbytes)} and {format_bytes(free)} are "
                "free there; make room, allow less, or name another disk",
                needed=folder.nbytes,
                allowed=free,
            )
        return free if folder.nbytes is None else folder.nbytes


@final
class StripedFile(TierFile):
    """A file of a ``DiskTier`` whose bytes are in ``parts``, one a folder (None: none there), as ``zones`` say."""

    def __init__(
        self,
        parts: Sequence[DiskFile | None],
        zones: Sequence[Zone],
        policy: DiskPolicy,
        callers: Callers,
    ) -> None:
        self.nbytes = sum(zone.nbytes for zone in zones)
        self.parts = parts
        self.zones = zones
        self.policy = policy
        self._callers = callers

    def read(self, offset: int, buffer: Buffer) -> None:
        """As ``DiskFile.read``; the error of the first folder that fails is raised when all calls have ended."""
        self._transfer("read", offset, buffer)

    def write(self, offset: int, buffer: Buffer) -> None:
        """As ``DiskFile.write``; the error of the first folder that fails is raised when all calls have ended."""
        self._transfer("write", offset, buffer)

    def reserve(self) -> None:
        """As ``DiskFile.reserve``."""
        for part in self.parts:
            if part is not None:
                part.reserve()

    def close(self) -> None:
        """Closes the parts."""
        for part in self.parts:
            if part is not None:
                part.close()

    def _transfer(self, verb: Verb, offset: int, buffer: Buffer) -> None:
        view = bytes_of(buffer)
        if offset < 0 or offset + len(view) > self.nbytes:
            raise StorageError(
                f"cannot {verb} bytes {offset} to {offset + len(view)}: the file has {self.nbytes} bytes"
            )
        self._callers.move(verb, self._cut(verb, offset, view))

    def _cut(self, verb: Verb, offset: int, view: memoryview) -> list[Pieces]:
        """What is to be moved, in calls, folder by folder."""
        found: list[Pieces] = [deque() for _ in self.parts]
        block = self.policy.calls(verb).block
        position = 0
        while position < len(view):
            number, start, follow = self._find(offset + position)
            part = self.parts[number]
            if part is None:
                raise StorageError(f"byte {offset + position} of a striped file is in no folder")
            length = min(follow, block, len(view) - position)
            found[number].append(Piece(part, start, view[position : position + length]))
            position += length
        return [pieces for pieces in found if pieces]

    def _find(self, offset: int) -> tuple[int, int, int]:
        for zone in self.zones:
            if offset < zone.start + zone.nbytes:
                return zone.find(offset)
        raise StorageError(f"byte {offset} is not inside a file of {self.nbytes} bytes")
