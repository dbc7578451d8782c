"""``forebay train``: a configuration to a trained model, its report and its folder."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from forebay.cli.engine import Engine
from forebay.cli.keeping import Keeper
from forebay.cli.loop import make_scheduler, warmup_of
from forebay.cli.plan import expect_policy
from forebay.cli.preparing import Preparing, device_of
from forebay.cli.progress import View
from forebay.cli.record import Record, jsonable
from forebay.cli.runfolder import RunFolder, expect_model, expect_nameable
from forebay.cli.running import Trained, run_loop
from forebay.cli.shortage import HostPressed, Overrun
from forebay.errors import (
    ConfigError,
    DeviceOutOfMemory,
    DoesNotFit,
    ForebayError,
    HostOutOfMemory,
)
from forebay.memory import Tier
from forebay.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    import torch
    from torch import nn

    from forebay.config import TrainConfig
    from forebay.data.text import Windows
    from forebay.data.tokenizers import Tokenizer
    from forebay.plans import Plan
    from forebay.recipes.sources import ModelSource
    from forebay.reporting.run import RunReport

__all__ = ["TrainResult", "train"]

MOST_OVERRUNS: Final = 4
"""How often a run goes on under another plan because a step took more of the device than was promised."""


@dataclass(frozen=True)
class TrainResult:
    """What a run left: its report, the loss of each step, its folder (None: none was asked for), and how many steps
    were skipped (None: such a step would have stopped it). The report is that of this process, the rest is that of the
    whole run."""

    report: RunReport
    losses: tuple[float, ...]
    folder: Path | None
    skipped: int | None = None

    def to_json_dict(self) -> dict[str, Any]:
        """The object that ``--json`` prints: sizes are bytes, times seconds, rates per second. A loss that is no finite
        number is null."""
        run = None if self.folder is None else str(self.folder)
        losses = [jsonable(loss) for loss in self.losses]
        found = {**self.report.to_json_dict(), "steps": len(losses), "loss": losses, "run": run}
        return found if self.skipped is None else {**found, "skipped": self.skipped}


def train(config: TrainConfig, engine: Engine, view: View, *, resume: bool = False) -> TrainResult:
    """Trains as ``config`` says and shows it on ``view``; ``resume`` goes on with the run in its folder.

    Raises the ``ForebayError`` of whatever stands in the way; the model is closed in every case.
    """
    if config.save_every is not None and config.run is None:
        raise ConfigError("--save-every saves steps in the folder of a run; give it as --run FOLDER")
    expect_policy(config.policy)
    if config.run is not None:
        expect_nameable(config)
    with ExitStack() as stack:
        folder = None if config.run is None else stack.enter_context(RunFolder(config.run, resume=resume))
        try:
            return _taken(config, engine, view, folder)
        except HostPressed as pressed:
            if config.disk is None or folder is None or not folder.is_saved or pressed.within <= 0:
                raise
            again = partial(_with_less_host, within=pressed.within, found=pressed.found, stop=str(pressed))
        _clear_away(folder)
        return again(config, engine, view, folder)


def _taken(config: TrainConfig, engine: Engine, view: View, folder: RunFolder | None) -> TrainResult:
    """Trains; where a step has more on the device than its plan promised, goes on under one that leaves more free. What
    was seen need not have been the most, nor lie where a plan for less takes less: so for a few times, more each."""
    attempt, spare = partial(_train, plan=None), 0
    for _ in range(MOST_OVERRUNS):
        try:
            return attempt(config, engine, view, folder)
        except Overrun as overrun:
            if overrun.steps and (folder is None or not folder.is_saved):
                raise
            spare += overrun.spare
            attempt = partial(_with_less_device, spare=spare, why=str(overrun))
        _clear_away(folder)
    return attempt(config, engine, view, folder)


def _clear_away(folder: RunFolder | None) -> None:
    """Behind the handler of an error, not in it: what was raised holds on to what the step had on the device, and to
    the model with its bytes."""
    gc.collect()
    if folder is not None:
        folder.reopen()


def _with_less_device(
    config: TrainConfig, engine: Engine, view: View, folder: RunFolder | None, *, spare: int, why: str
) -> TrainResult:
    """Takes the step again that a device had no room for, and those behind it."""
    view.note(f"{why}. The step is taken again under a plan that leaves {format_bytes(spare)} of the device free")
    return _train(config, engine, view, folder, _careful_plan(config, engine, view, spare))


def _with_less_host(
    config: TrainConfig, engine: Engine, view: View, folder: RunFolder | None, *, within: int, found: str, stop: str
) -> TrainResult:
    """Goes on from the checkpoint under a plan that takes ``within`` bytes of the host. Raises ``HostOutOfMemory``,
    which says ``stop``, where there is none."""
    view.note(f"{found}. The run goes on under a plan that takes {format_bytes(within)} of it and more of the disk")
    try:
        return _taken(config.model_copy(update={"host_memory": within}), engine, view, folder)
    except DoesNotFit as refusal:
        raise HostOutOfMemory(f"{stop}. {refusal}", needed=refusal.needed, allowed=refusal.allowed) from None


def _careful_plan(config: TrainConfig, engine: Engine, view: View, spare: int) -> Plan:
    """The plan for ``config`` with ``spare`` bytes less of the device. Raises ``DoesNotFit`` where there is none."""
    from forebay.data.text import tokenize
    from forebay.data.tokenizers import find_tokenizer
    from forebay.profiler.batch import moved_to
    from forebay.recipes.sources import find

    source, device = find(config.model), device_of(config.device)
    model, _ = _built(config, source)
    text = tokenize(config.data, find_tokenizer(source.folder))
    batch = moved_to(_windows(config, text, model).batch(0), device)
    tighter = config.model_copy(update={"device_memory": max(1, config.device_memory - spare)})
    model, _, _ = Preparing(tighter, engine, view, model, batch, device).under(None)
    plan = engine.report(model).plan
    engine.close(model)
    return plan


def _train(config: TrainConfig, engine: Engine, view: View, folder: RunFolder | None, plan: Plan | None) -> TrainResult:
    """``train`` in ``folder``; ``plan`` None: one is made."""
    from forebay.data.text import tokenize
    from forebay.data.tokenizers import find_tokenizer
    from forebay.profiler.batch import moved_to
    from forebay.recipes.sources import find

    if folder is None or not folder.is_saved:  # else the values are those of the checkpoint
        expect_model(config.model, weights=True)
    source = find(config.model)
    tokenizer = find_tokenizer(source.folder)
    # Before the model is built: a file that is not there is said at once.
    text = tokenize(config.data, tokenizer)
    device = device_of(config.device)
    model, tiles = _built(config, source)
    windows = _windows(config, text, model)
    if tiles is not None:
        view.note(tiles)
    _check_model(config, model, windows, tokenizer)
    warmup = warmup_of(config.steps)
    if folder is not None:
        warmup = folder.begin(config, warmup, windows.tokens, windows.crc32)
    view.note(_opening(config, model, source, tokenizer, windows, folder))

    preparing = Preparing(config, engine, view, model, moved_to(windows.batch(0), device), device)
    model, optimizer, together = preparing.to_save(plan, folder)
    try:
        view.note(_promise(engine.report(model).plan, config.accumulate, together))
        trained = Trained(model, optimizer, make_scheduler(optimizer, warmup), windows, device)
        keeper = None if folder is None else _keeper(config, engine, view, folder, trained)
        record = _started(config, engine, view, folder, trained, source)
        taken = len(record.losses)
        if keeper is not None and taken:
            keeper.saved = taken
        measured = None if taken == config.steps else folder
        accumulate = engine.accumulate if together > 1 else None
        with _accounted(config, engine, view, measured, model):
            run_loop(config, engine, view, folder, keeper, trained, accumulate, record)
            engine.synchronize(model)
        tokens = (len(record.losses) - taken) * config.tokens_per_step
        report = replace(engine.report(model), tokens=tokens)
        if measured is not None:
            measured.keep(report)
        if folder is not None and len(record.losses) == config.steps:
            folder.finish(model, tokenizer)
    except DeviceOutOfMemory as error:
        if folder is not None and error.snapshot is not None:
            _keep_snapshot(folder, error.snapshot, view)
        raise Overrun(error, engine.report(model), together) from error
    finally:
        engine.close(model)
    skipped = record.skipped if config.nonfinite == "skip" else None
    return TrainResult(report, tuple(record.losses), config.run, skipped)


@contextmanager
def _accounted(
    config: TrainConfig, engine: Engine, view: View, folder: RunFolder | None, model: nn.Module
) -> Iterator[None]:
    """Has ``folder`` keep what was measured where the run ends with an error. What stands in the way of that is shown:
    what ended the run is what the user has to hear of."""
    try:
        yield
    except BaseException:
        if folder is not None:
            try:
                report = engine.report(model)
                folder.keep(replace(report, tokens=report.steps * config.tokens_per_step))
            except ForebayError as error:
                view.note(str(error))
        raise


def _keep_snapshot(folder: RunFolder, snapshot: Mapping[str, Any], view: View) -> None:
    """Has ``folder`` keep what the device held. What stands in the way of that is shown, as in ``_accounted``."""
    try:
        path = folder.keep_snapshot(snapshot)
    except ForebayError as error:
        view.note(str(error))
    else:
        view.note(f"what the device held: forebay fragmentation {path}")


def _built(config: TrainConfig, source: ModelSource) -> tuple[nn.Module, str | None]:
    """The model of ``source`` as the run trains it, and what is said of its tiles (None: nobody asked for any)."""
    from forebay.recipes.sources import build
    from forebay.tiling import noted_tiles, tile

    model = build(source, config.dtype)
    return model, None if config.tile is None else noted_tiles(tile(model, config.tile), config.tile)


def _keeper(config: TrainConfig, engine: Engine, view: View, folder: RunFolder, trained: Trained) -> Keeper:
    """Who saves the run. Raises ``DiskFull`` where there is no room for what it is to save."""
    from forebay.safekeeping import checkpoint_size

    kept = (trained.model, trained.optimizer, trained.scheduler)
    keeper = Keeper(engine, view, folder.checkpoint, kept, every=config.save_every)
    keeper.announce(checkpoint_size(trained.model), trained.device, first=not folder.is_saved)
    return keeper


def _started(
    config: TrainConfig, engine: Engine, view: View, folder: RunFolder | None, trained: Trained, source: ModelSource
) -> Record:
    """Puts the run where it was saved, or at its beginning; returns the record of the steps until then."""
    from forebay.runtime.generators import seed_all

    taken = _resumed(config, engine, view, folder, trained)
    record = Record() if folder is None else folder.record(taken or 0)
    # Behind whatever refuses to go on.
    if folder is not None:
        folder.go_on(config)
        if taken != config.steps:  # what was measured before is gone then
            folder.promise(engine.report(trained.model).plan)
    if taken is None:
        _fill(engine, trained.model, source, config.seed)
        # What the steps draw (dropout, layers left out by Python's numbers) hangs on the seed too, and on nothing that
        # this process drew before.
        seed_all(config.seed)
    return record


def _resumed(config: TrainConfig, engine: Engine, view: View, folder: RunFolder | None, trained: Trained) -> int | None:
    """Puts the run where it was saved and returns the steps taken until then; None where it was not."""
    if folder is None or not folder.goes_on:
        return None
    if not folder.is_saved:
        view.note(f"no step was saved in {folder.path}: the run begins anew")
        return None
    found = engine.resume(trained.model, trained.optimizer, folder.checkpoint, scheduler=trained.scheduler)
    if found.step > config.steps:
        raise ConfigError(
            f"--steps {config.steps}: the run in {folder.path} has taken {found.step} already; give so many, or more"
        )
    view.note(f"goes on behind step {found.step}, as it was saved in {folder.checkpoint}")
    if found.step == config.steps:
        view.note("nothing is left to do; for more steps give --steps")
    return found.step


def _windows(config: TrainConfig, text: torch.Tensor, model: nn.Module) -> Windows:
    from forebay.data.text import Windows
    from forebay.recipes.kinds import in_training

    return Windows(text, batch=config.batch, seq=config.seq, seed=config.seed, beside=in_training(model))


def _check_model(config: TrainConfig, model: nn.Module, windows: Windows, tokenizer: Tokenizer) -> None:
    settings: Any = model.config
    longest = getattr(settings, "max_position_embeddings", None)
    if longest is not None and config.seq > longest:
        raise ConfigError(f"--seq {config.seq} is longer than the {longest} positions of the model; lower --seq")
    windows.check_range(tokenizer.name, settings.get_text_config().vocab_size)


def _fill(engine: Engine, model: nn.Module, source: ModelSource, seed: int) -> None:
    if source.weights and source.folder is not None:
        engine.load(model, str(source.folder))
    else:
        engine.initialize(model, seed)


def _opening(
    config: TrainConfig,
    model: nn.Module,
    source: ModelSource,
    tokenizer: Tokenizer,
    windows: Windows,
    folder: RunFolder | None,
) -> str:
    parameters = format_count(sum(parameter.numel() for parameter in model.parameters()))
    start = "weights from the folder" if source.weights else f"random weights, seed {config.seed}"
    if folder is not None and folder.goes_on and folder.is_saved:
        start = "as they were saved"
    return (
        f"{source.name}: {parameters} parameters in {config.dtype}, {start}; "
        f"{format_count(windows.tokens)} tokens of text ({tokenizer.name}), "
        f"{format_count(config.tokens_per_step)} a step"
    )


def _promise(plan: Plan, micro_batches: int, together: int) -> str:
    """What the plan says that the run will need and take, and why, before anything of the model is loaded."""
    peaks = plan.peaks(together)
    tiers = (tier for tier in (Tier.DEVICE, Tier.HOST, Tier.DISK) if peaks[tier])
    needs = ", ".join(f"{format_bytes(peaks[tier])} on the {tier.value}" for tier in tiers)
    seconds = plan.seconds_of_step(micro_batches, together)
    takes = "the time of a step is not known" if seconds is None else f"{format_seconds(seconds)} a step"
    return "\n  - ".join([f"plan by {plan.planner}: {needs}; {takes}", *plan.reasons, *plan.notes])
