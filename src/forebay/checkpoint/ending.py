"""The end of a save: all that is left when what has to be copied is copied, here or beside the steps that follow."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from enum import Enum, auto
from typing import final

from forebay.checkpoint.copies import Copying
from forebay.checkpoint.generations import Generations
from forebay.checkpoint.homes import InPlace
from forebay.checkpoint.manifest import Manifest
from forebay.device.base import Completion
from forebay.device.completions import dependency_failure
from forebay.runtime.holds import Outcome
from forebay.tiers.kept import KeptFolder

__all__ = ["Ending"]


class _Course(Enum):
    """How far the end of a save has come."""

    AHEAD = auto()  # nobody has begun it
    RUNNING = auto()
    OVER = auto()
    DROPPED = auto()  # somebody is about to write, and nobody had begun it: it will never be


@final
class Ending(Outcome):
    """Waits until the disk has what a checkpoint names, and has ``manifest`` stand in the place of ``old``. ``homes``
    is what it names in place, in ``kept``; ``copies`` are its files, written when ``jobs`` are done. ``coming`` is the
    job that runs it; None where the caller does, or was interrupted when it asked for one."""

    def __init__(
        self,
        generations: Generations,
        manifest: Manifest,
        old: Manifest | None,
        homes: InPlace,
        copies: Sequence[Copying],
        jobs: Sequence[Completion],
        kept: KeptFolder | None,
    ) -> None:
        self._generations = generations
        self._manifest = manifest
        self._old = old
        self._homes = homes
        self._copies = copies
        self._jobs = jobs
        self._kept = kept
        self._stood = False
        self._course = _Course.AHEAD
        self._changed = threading.Condition()
        self.coming: Completion | None = None

    def run(self) -> None:
        """What is at home is written. Raises ``StorageError`` or ``DiskFull``; what stood then stands."""
        with self._changed:
            if self._course is _Course.DROPPED:
                return
            self._course = _Course.RUNNING
        try:
            self._run()
        finally:
            with self._changed:
                self._course = _Course.OVER
                self._changed.notify_all()

    def _run(self) -> None:
        generations = self._generations
        try:
            files = tuple(copy.finished() for copy in self._copies)
            manifest = replace(self._manifest, files=files, homes=self._homes.noted())
            for name in sorted(generations.own):
                generations.sync(name)
            generations.commit(manifest, self._old)
            self._stood = True
            if self._kept is not None and self.is_in_place:
                # What stood before is gone. Raises where somebody else has taken its space: this one stands then.
                self._kept.reserve()
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
        for job in (*self._jobs, *(() if self.coming is None else (self.coming,))):
            dependency_failure(job)
        with self._changed:
            if self._course is _Course.AHEAD:
                # What it waits for has failed, or the call that asks for its job was interrupted.
                self._course = _Course.DROPPED
            self._changed.wait_for(lambda: self._course is not _Course.RUNNING)
        return self._stood

    def expect_done(self) -> None:
        if self.coming is not None:
            self.coming.wait()
