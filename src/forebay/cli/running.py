"""The loop of a run with a folder around it: what is shown, written down and saved, and why it ends early."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from forebay.cli.engine import Engine
from forebay.cli.keeping import Keeper
from forebay.cli.loop import Accumulate, Leg, train_loop
from forebay.cli.pressure import HostPressure
from forebay.cli.progress import StepResult, View
from forebay.cli.record import Record
from forebay.cli.runfolder import RunFolder, resuming
from forebay.cli.stopping import Stop
from forebay.errors import DeviceOutOfMemory, NotFinite
from forebay.memory import Tier

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim.lr_scheduler import LRScheduler

    from forebay.config import TrainConfig
    from forebay.data.text import Windows

__all__ = ["Trained", "run_loop"]


@dataclass(frozen=True)
class Trained:
    """What a run trains, and on what."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: LRScheduler
    windows: Windows
    device: str


def run_loop(
    config: TrainConfig,
    engine: Engine,
    view: View,
    folder: RunFolder | None,
    keeper: Keeper | None,
    trained: Trained,
    accumulate: Accumulate | None,
    record: Record,
) -> None:
    """Runs the loop behind the steps that ``record`` has, with its losses shown and kept there. A run with a folder
    that is asked to stop, or has to, is saved there."""
    taken = len(record.losses)
    stop, pressure = Stop(), HostPressure()
    with ExitStack() as stack:
        stack.enter_context(record)
        if folder is not None:
            stack.enter_context(stop)

        def on_step(result: StepResult) -> None:
            record.add(result)
            view.step(result)
            if result.skipped:
                view.note(f"step {result.number} is skipped: {result.skipped}; {record.skipped} so far")
            if keeper is not None:
                keeper.after(result.number, config.steps, record)

        def stopping() -> bool:
            return stop.requested() or (keeper is not None and pressure.is_near())

        view.start(config.steps, partial(_device_peak, engine, trained.model))
        stack.callback(view.stop)
        on = (trained.model, trained.optimizer, trained.scheduler, trained.windows, trained.device)
        saves = (lambda step: False) if keeper is None else partial(keeper.due, last=config.steps)
        try:
            train_loop(config, *on, on_step, accumulate, Leg(taken, stopping, saves))
        except (NotFinite, DeviceOutOfMemory) as error:
            _rescue(config, view, keeper, record, error)
            raise
        step = len(record.losses)
        if keeper is None or config.run is None or step == config.steps or not stopping():
            return
        if stop.by is None:
            keeper.rescue(step, record)
            report = engine.report(trained.model)
            raise pressure.error(step, report.plan.peaks(report.together)[Tier.HOST])
        keeper.save_early(step, record)
        view.note(f"stopped by {stop.by} behind step {step}; go on with: {resuming(config.run)}")


def _rescue(
    config: TrainConfig, view: View, keeper: Keeper | None, record: Record, error: NotFinite | DeviceOutOfMemory
) -> None:
    """Saves the run behind its last whole step, and says how to go on from there."""
    step = len(record.losses)
    # Blocks that backward has updated for the step that failed are ahead of the others.
    if keeper is None or config.run is None or not step or config.update == "backward":
        return
    if keeper.rescue(step, record) and isinstance(error, NotFinite) and config.nonfinite == "stop":
        view.note(f"to skip step {step + 1}: {resuming(config.run)} --nonfinite skip")


def _device_peak(engine: Engine, model: nn.Module) -> int | None:
    usage = engine.report(model).usage(Tier.DEVICE)
    return None if usage is None else usage.peak
