"""The end of a save: all that is left when what has to be copied is copied, here or beside the steps that follow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import final

from forebay.checkpoint.copies import Copying
from forebay.checkpoint.generations import Generations
from forebay.checkpoint.homes import InPlace
from forebay.checkpoint.manifest import Manifest
from forebay.device.base import Completion
from forebay.device.lanes import dependency_failure
from forebay.runtime.holds import Outcome
from forebay.tiers.kept import KeptFolder

__all__ = ["Ending"]


@final
class Ending(Outcome):
    """Waits until the disk has what a checkpoint names, and has ``manifest`` stand in the place of ``old``. ``homes``
    is what it names in place, in ``kept``; ``copies`` are its files, written by then. ``coming`` is the job that runs
    it; None where the caller does."""

    def __init__(
        self,
        generations: Generations,
        manifest: Manifest,
        old: Manifest | None,
        homes: InPlace,
        copies: Sequence[Copying],
        kept: KeptFolder | None,
    ) -> None:
        self._generations = generations
        self._manifest = manifest
        self._old = old
        self._homes = homes
        self._copies = copies
        self._kept = kept
        self._stood = False
        self.coming: Completion | None = None

    def run(self) -> None:
        """What is at home is written. Raises ``StorageError`` or ``DiskFull``; what stood then stands."""
        generations = self._generations
        try:
            files = tuple(copy.finished() for copy in self._copies)
            manifest = replace(self._manifest, files=files, homes=self._homes.noted())
            for name in sorted(generations.own):
                generations.sync(name)
            generations.commit(manifest, self._old)
            self._stood = True
        except BaseException:
            # The rename may have been made, and what followed it not.
            self._stood = generations.abandon(self._manifest.generation)
            raise
        finally:
            if self._stood and self._kept is not None and self.is_in_place:
                self._kept.stand()

    @property
    def is_in_place(self) -> bool:
        """Whether it names anything where it lies."""
        return bool(self._homes.names)

    def stands(self) -> bool:
        # Whoever asks is about to write. What went wrong is told by the next save, or whoever waits for everything.
        if self.coming is not None:
            dependency_failure(self.coming)
        return self._stood

    def expect_done(self) -> None:
        if self.coming is not None:
            self.coming.wait()
