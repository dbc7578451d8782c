"""When a run is saved, and what it says of that."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, final

from forebay.cli.progress import View
from forebay.cli.record import Record
from forebay.errors import DiskFull, ForebayError, NotFinite
from forebay.units import format_apart, format_bytes, format_seconds

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim.lr_scheduler import LRScheduler

    from forebay.cli.engine import Engine
    from forebay.safekeeping import CheckpointSize

__all__ = ["Keeper", "shares_a_disk"]


@final
class Keeper:
    """Saves a run in ``folder`` after every ``every`` steps (None: only when it is asked to).

    ``saved`` is the last step whose checkpoint is known to stand; None while there is none. One that is saved in the
    background is not, until somebody has waited for it.
    """

    def __init__(
        self,
        engine: Engine,
        view: View,
        folder: Path,
        trained: tuple[nn.Module, torch.optim.Optimizer, LRScheduler],
        *,
        every: int | None,
    ) -> None:
        self._engine = engine
        self._view = view
        self._folder = folder
        self._model, self._optimizer, self._scheduler = trained
        self._every = every
        self.saved: int | None = None
        self._coming: int | None = None
        self._in_place = 0

    def announce(self, size: CheckpointSize, device: str, *, first: bool) -> None:
        """Says what a checkpoint of ``size`` will take, where the run is to be saved as it goes. Raises ``DiskFull``
        where there is no room for it; ``first``: none stands in the folder yet."""
        nbytes, self._in_place = size.copied, size.in_place
        if self._every is None:
            return
        # The one that stands is removed when the next one is whole.
        short = size.shortage(self._folder.parent, 2 if first else 1)
        if short is not None:
            asked, there = format_apart(*short)
            raise DiskFull(
                f"--save-every needs {asked} in {self._folder} and {there} are free: a checkpoint takes "
                f"{format_bytes(nbytes)} and is written beside the last one; make room, or have --run on another disk",
                needed=short.needed,
                allowed=short.free,
            )
        seconds = format_seconds(_write_seconds(nbytes, self._folder.parent, device))
        stays = f"; {format_bytes(self._in_place)} on disk are not copied" if self._in_place else ""
        self._view.note(
            f"saved every {self._every} steps: {format_bytes(nbytes)} each, about {seconds} of writing, and as much "
            f"again on disk while one is written{stays}"
        )

    def due(self, step: int, last: int) -> bool:
        """Whether the run is saved when ``step`` has been taken; ``last`` will be the last one."""
        return self._every is not None and (step % self._every == 0 or step == last)

    def after(self, step: int, last: int, record: Record) -> None:
        """``step`` has been taken, ``last`` will be the last one: saves the run where it is time to."""
        if self.due(step, last):
            self.save(step, record, background=step < last)

    def save_early(self, step: int, record: Record) -> None:
        """Saves the run behind ``step``, where nobody had foreseen it; what went wrong with a save under way is shown.
        Raises ``NotFinite`` where a parameter is infinite or NaN: the checkpoint before stands then."""
        self._settle()
        if step == self.saved:
            return
        odd = self._spoilt()
        if odd is not None:
            stands = "nothing was saved before" if self.saved is None else f"the checkpoint of step {self.saved} stands"
            raise NotFinite(f"step {step} is not saved: parameter {odd} is not finite; {stands}")
        self.save(step, record)

    def rescue(self, step: int, record: Record) -> bool:
        """The run ends with an error behind ``step``: saves it early, and returns whether its checkpoint is there to go
        on from. Raises no ``ForebayError``: what ended the run is what the user has to hear of. What stood in the way
        is shown."""
        try:
            self.save_early(step, record)
        except ForebayError as error:
            self._view.note(str(error))
            return False
        return True

    def _settle(self) -> None:
        """Waits until the save under way stands. Where it fails the one before does, and what went wrong is shown."""
        coming, self._coming = self._coming, None
        if coming is None:
            return
        try:
            self._engine.synchronize(self._model)
        except ForebayError as error:
            self._view.note(f"step {coming} was not saved in the background: {error}")
        else:
            self.saved = coming

    def _spoilt(self) -> str | None:
        """The first parameter with an element that is infinite or NaN."""
        values = self._engine.parameters(self._model)
        return next((name for name in values if not bool(values[name].isfinite().all())), None)

    def save(self, step: int, record: Record, *, background: bool = False) -> None:
        """Saves the run after ``step``, if that is not done; ``record`` goes to the disk before. ``background``: not
        to wait until it stands. Raises what went wrong with the save before, if that was made so."""
        if step in (self.saved, self._coming):
            return
        since = time.perf_counter()
        # The checkpoint says that so many steps were taken: what they lost must not be missing then.
        record.sync()
        coming, self._coming = self._coming, None
        nbytes = self._engine.save(
            self._model,
            self._optimizer,
            self._folder,
            step=step,
            scheduler=self._scheduler,
            extra=None,
            background=background,
        )
        # It has waited for the one before, which stands then.
        stood = self.saved if coming is None else coming
        self.saved, self._coming = (stood, step) if background else (step, None)
        took = format_seconds(time.perf_counter() - since)
        self._view.note(f"step {step} is {'being saved' if background else 'saved'}: {format_bytes(nbytes)} in {took}")


def shares_a_disk(disk: str, folder: Path) -> bool:
    """Whether what goes to ``disk`` could as well go to ``folder``: one folder on the same file system."""
    from forebay.budgets import DiskBudget

    folders = [Path(share.path) for share in DiskBudget.of(disk).folders]
    return len(folders) == 1 and folders[0].is_dir() and folders[0].stat().st_dev == folder.stat().st_dev


def _write_seconds(nbytes: int, folder: Path, device: str) -> float:
    """Seconds of writing ``nbytes`` as this machine's disk was measured, or as a common one writes."""
    from forebay.budgets import DiskBudget
    from forebay.profiler.here import this_machine

    machine, _ = this_machine(device, DiskBudget(str(folder)))
    return 0.0 if machine.disk is None else machine.disk.write.seconds(nbytes)
