"""The folder of a checkpoint, in which one whole checkpoint stands at any instant, whatever happens at it.

    manifest.json                names a generation, checksums every byte of it
    generation-00000007/         the tensors of one checkpoint that were copied; not there if none were
    home-9f86d081-states         what training keeps on disk, of which the manifest names one copy (``homes``)
    lock                         of the session that uses the folder (``tiers.lock``)

A checkpoint is written as a new generation beside the one that stands. Only the last step of that counts: the rename of
the new manifest over the old one, which happens or does not. Before it everything that the new manifest speaks of is on
the disk; after it, and when it is on the disk too, the old generation is removed. A process that ends in between leaves
a generation that no manifest names: the next save removes it.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import final

from forebay.checkpoint.files import Files, read_whole, refused, write_whole
from forebay.checkpoint.manifest import Manifest
from forebay.errors import ConfigError, DiskFull, ForebayError, StorageError
from forebay.tiers.kept import HOME
from forebay.units import format_apart

__all__ = ["MANIFEST", "Generations"]

MANIFEST = "manifest.json"
_NEW_MANIFEST = "manifest.json.new"
_GENERATION = re.compile(r"generation-\d{8,}")
_LONGEST = 1 << 30
"""Bytes that a manifest may have; a thousandth of that is much."""


@final
class Generations:
    """The checkpoints in one folder. ``own`` are the files there in which this run keeps what is on disk."""

    def __init__(self, folder: Path, files: Files, own: frozenset[str] = frozenset()) -> None:
        self.folder = folder
        self.files = files
        self.own = own

    def path_of(self, generation: int) -> Path:
        """The folder of a generation."""
        return self.folder / f"generation-{generation:08d}"

    def current(self) -> Manifest | None:
        """The manifest of the checkpoint that stands; None if there is none.

        Raises ``StorageError`` for a folder or a manifest that cannot be read, ``ConfigError`` for one that another
        forebay wrote.
        """
        path = self.folder / MANIFEST
        try:
            if MANIFEST not in self.files.names(self.folder):
                return None
            fd = self.files.open(path)
            try:
                nbytes = self.files.size(fd)
                if nbytes > _LONGEST:
                    raise StorageError(f"{path} is damaged: a manifest does not have {nbytes} bytes")
                text = bytearray(nbytes)
                read_whole(self.files, fd, memoryview(text), 0)
            finally:
                self.files.close(fd)
        except OSError as error:
            raise refused(self.files, "read", path, error) from error
        except EOFError:
            raise StorageError(f"{path} ends before its end; the file was cut while it was read") from None
        return Manifest.from_bytes(bytes(text), str(path))

    def begin(self, current: Manifest | None, copies: Sequence[int]) -> int:
        """Makes room for a new generation with files of ``copies`` bytes beside the ``current`` one; returns its
        number. Where there are none it has no folder: to make one and to remove it are two changes of names more that
        the disk has to keep.

        What a save that was cut short has left is removed. Raises ``DiskFull`` where there are fewer bytes free,
        ``StorageError`` where the folder cannot be used.
        """
        number = 1 if current is None else current.generation + 1
        path, needed = self.path_of(number), sum(copies)
        try:
            self._sweep(current)
            free = self.files.free_bytes(self.folder)
            if free < needed:
                asked, there = format_apart(needed, free)
                stands = "none stands" if current is None else f"that of step {current.step} stands"
                raise DiskFull(
                    f"a checkpoint takes {asked} in {self.folder} and {there} are free ({stands}); make room, or name "
                    f"a folder on another disk",
                    needed=needed,
                    allowed=free,
                )
            if copies:
                self.files.make_folder(path)
        except OSError as error:
            raise refused(self.files, "make", path, error, needed) from error
        return number

    def commit(self, manifest: Manifest, old: Manifest | None) -> None:
        """Has ``manifest`` be the checkpoint that stands, in the place of ``old``; every file of it is on the disk.

        Raises ``ConfigError`` for one that could not be read again, ``StorageError`` or ``DiskFull``; ``old`` stands
        then, or ``manifest`` does where what failed came after the rename.
        """
        fresh = self.folder / _NEW_MANIFEST
        content = manifest.to_bytes()
        try:
            # The names of the files, and that of their folder, before a manifest that relies on them.
            if manifest.files:
                self.files.sync_folder(self.path_of(manifest.generation))
            self.files.sync_folder(self.folder)
            fd = self.files.create(fresh)
            try:
                write_whole(self.files, fd, memoryview(content), 0)
                # Its content before its name: else the name could be on the disk without it.
                self.files.sync(fd)
            finally:
                self.files.close(fd)
            self.files.replace(fresh, self.folder / MANIFEST)
            # The new name before the old bytes go.
            self.files.sync_folder(self.folder)
        except OSError as error:
            raise refused(self.files, "write", fresh, error, len(content)) from error
        if old is not None:
            # The checkpoint stands. What cannot be removed now is removed by the next save.
            with contextlib.suppress(OSError):
                if old.files:
                    self.files.remove(self.path_of(old.generation))
                for name in sorted(_homes(old) - _homes(manifest) - self.own):
                    self.files.remove(self.folder / name)

    def abandon(self, number: int) -> bool:
        """Removes what was written of a generation, unless it stands all the same; returns whether it does. Raises
        nothing."""
        with contextlib.suppress(OSError, ForebayError):
            current = self.current()
            if current is not None and current.generation == number:
                return True
            self._sweep(current)
        return False

    def sweep(self) -> None:
        """Removes what no checkpoint names. Raises ``StorageError`` where the folder cannot be used, and as
        ``current``."""
        try:
            self._sweep(self.current())
        except OSError as error:
            raise refused(self.files, "clear", self.folder, error) from error

    def thin(self) -> int:
        """Gives back the space of what the checkpoint that stands does not name, in the files where it names what
        training had there: the other place of each block. Returns the bytes that they take then. Only for who has the
        lock of the folder. What cannot be given back stays; raises as ``current``."""
        current = self.current()
        if current is None or current.homes is None:
            return 0
        with contextlib.suppress(OSError):  # of files that are not there a resume tells
            self.files.sync_folder(self.folder)  # as where something is removed
            for name, ranges in current.homes.unnamed().items():
                self.files.empty(self.folder / name, ranges)
        taken = 0
        for name in current.homes.names:
            with contextlib.suppress(OSError):
                taken += self.files.taken(self.folder / name)
        return taken

    def sync(self, name: str) -> None:
        """Returns when what was written to the file ``name`` is on the disk."""
        path = self.folder / name
        try:
            fd = self.files.open(path)
            try:
                self.files.sync(fd)
            finally:
                self.files.close(fd)
        except OSError as error:
            raise refused(self.files, "write", path, error) from error

    def _sweep(self, current: Manifest | None) -> None:
        kept = self.own if current is None else self.own | _homes(current) | {self.path_of(current.generation).name}
        left = [
            name
            for name in self.files.names(self.folder)
            if name not in kept and (name == _NEW_MANIFEST or name.startswith(HOME) or _GENERATION.fullmatch(name))
        ]
        if left:
            # Whoever renamed the manifest may have ended before it was on the disk under its name.
            self.files.sync_folder(self.folder)
        for name in left:
            self.files.remove(self.folder / name)

    def expect_current(self) -> Manifest:
        """``current``; raises ``ConfigError`` where there is none."""
        manifest = self.current()
        if manifest is None:
            raise ConfigError(f"{self.folder} has no checkpoint; forebay.save() makes one")
        return manifest


def _homes(manifest: Manifest) -> frozenset[str]:
    return frozenset() if manifest.homes is None else manifest.homes.names
