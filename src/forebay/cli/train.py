"""``forebay train``: a configuration to a trained model, its report and its folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from forebay.cli.engine import Engine
from forebay.cli.keeping import Keeper, shares_a_disk
from forebay.cli.loop import make_scheduler, warmup_of
from forebay.cli.progress import View
from forebay.cli.record import jsonable
from forebay.cli.runfolder import RunFolder
from forebay.cli.running import Trained, run_loop
from forebay.errors import (
    CannotServe,
    ConfigError,
    DeviceOutOfMemory,
    DiskFull,
    DoesNotFit,
    ForebayError,
    ModelError,
    NoRoomTogether,
)
from forebay.memory import Tier
from forebay.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    import torch
    from torch import nn

    from forebay.config import OptimizerName, TrainConfig
    from forebay.data.text import Windows
    from forebay.data.tokenizers import Tokenizer
    from forebay.plans import Plan
    from forebay.recipes.causal_lm import ModelSource
    from forebay.reporting.run import RunReport

__all__ = ["TrainResult", "optimizer_of", "train"]


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
    with ExitStack() as stack:
        folder = None if config.run is None else stack.enter_context(RunFolder(config.run, resume=resume))
        try:
            return _train(config, engine, view, folder, None)
        except _Overrun as overrun:
            if overrun.steps and (folder is None or not folder.is_saved):
                raise
            spare, short = overrun.spare, str(overrun)
        # Not before: what was raised holds on to what the step had on the device.
        if folder is not None:
            folder.reopen()
        view.note(f"{short}. The step is taken again under a plan that leaves {format_bytes(spare)} of the device free")
        return _train(config, engine, view, folder, _careful_plan(config, engine, view, spare))


@final
class _Overrun(DeviceOutOfMemory):
    """A step took more device memory than its plan has promised, behind ``steps`` that this process has taken.
    ``spare`` are the bytes that another plan should leave free."""

    LEAST = 0.05
    """Of the budget: what a plan leaves free at the least that is made after one has fallen short."""

    def __init__(self, error: DeviceOutOfMemory, report: RunReport, together: int) -> None:
        super().__init__(str(error), needed=error.needed, allowed=error.allowed)
        self.steps = report.steps
        promised = report.plan.peaks(together)[Tier.DEVICE]
        # Twice what is known to be missing: the step had not come to its end.
        self.spare = max(2 * (error.needed - promised), int(self.LEAST * error.allowed))


def _careful_plan(config: TrainConfig, engine: Engine, view: View, spare: int) -> Plan:
    """The plan for ``config`` with ``spare`` bytes less of the device. Raises ``DoesNotFit`` where there is none."""
    from forebay.data.tokenizers import find_tokenizer
    from forebay.recipes.causal_lm import find

    source, device = find(config.model), _device(config.device)
    model, _ = _built(config, source)
    batch = {n: t.to(device) for n, t in _windows(config, find_tokenizer(source.folder)).batch(0).items()}
    tighter = config.model_copy(update={"device_memory": max(1, config.device_memory - spare)})
    model, _, _ = _prepared(tighter, engine, view, model, batch, device, None, None)
    plan = engine.report(model).plan
    engine.close(model)
    return plan


def _train(config: TrainConfig, engine: Engine, view: View, folder: RunFolder | None, plan: Plan | None) -> TrainResult:
    """``train`` in ``folder``; ``plan`` None: one is made."""
    import torch

    from forebay.data.tokenizers import find_tokenizer
    from forebay.recipes.causal_lm import find

    source = find(config.model)
    tokenizer = find_tokenizer(source.folder)
    windows = _windows(config, tokenizer)
    device = _device(config.device)
    model, tiles = _built(config, source)
    if tiles is not None:
        view.note(tiles)
    _check_model(config, model, windows, tokenizer)
    warmup = warmup_of(config.steps)
    if folder is not None:
        warmup = folder.begin(config, warmup, windows.tokens, windows.crc32)
    view.note(_opening(config, model, source, tokenizer, windows, folder))

    batch = {name: tensor.to(device) for name, tensor in windows.batch(0).items()}
    model, optimizer, together = _prepared_to_save(config, engine, view, model, batch, device, plan, folder)
    try:
        _announce(engine.report(model).plan, config, view, folder, together)
        trained = Trained(model, optimizer, make_scheduler(optimizer, warmup), windows, device)
        keeper = None if folder is None else _keeper(config, engine, view, folder, trained)
        taken = _resumed(config, engine, view, folder, trained)
        if taken is None:
            _fill(engine, model, source, config.seed)
            # What the steps draw (dropout) hangs on the seed too, and on nothing that this process drew before.
            torch.manual_seed(config.seed)
        elif keeper is not None:
            keeper.saved = taken
        accumulate = engine.accumulate if together > 1 else None
        with _accounted(config, engine, view, folder, model):
            record = run_loop(config, engine, view, folder, keeper, trained, accumulate, taken or 0)
            engine.synchronize(model)
        tokens = (len(record.losses) - (taken or 0)) * config.tokens_per_step
        report = replace(engine.report(model), tokens=tokens)
        if folder is not None:
            folder.keep(report)
            if len(record.losses) == config.steps:
                folder.finish(model, engine, tokenizer)
    except DeviceOutOfMemory as error:
        raise _Overrun(error, engine.report(model), together) from error
    finally:
        engine.close(model)
    skipped = record.skipped if config.nonfinite == "skip" else None
    return TrainResult(report, tuple(record.losses), config.run, skipped)


def _announce(plan: Plan, config: TrainConfig, view: View, folder: RunFolder | None, together: int) -> None:
    """Says what the run is about to begin under, and has ``folder`` keep it."""
    view.note(_promise(plan, config.accumulate, together))
    if folder is not None:
        folder.promise(plan)


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


def _built(config: TrainConfig, source: ModelSource) -> tuple[nn.Module, str | None]:
    """The model of ``source`` as the run trains it, and what is said of its tiles (None: nobody asked for any)."""
    from forebay.recipes.causal_lm import build
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


def _resumed(config: TrainConfig, engine: Engine, view: View, folder: RunFolder | None, trained: Trained) -> int | None:
    """Puts the run where it was saved and returns the steps taken until then; None where it was not."""
    if folder is None or not folder.goes_on:
        return None
    if not folder.is_saved:
        view.note(f"no step was saved in {folder.path}: the run begins anew")
        return None
    found = engine.resume(trained.model, trained.optimizer, folder.checkpoint, scheduler=trained.scheduler)
    if found.step > config.steps:
        raise ConfigError(f"--steps {config.steps}: the run in {folder.path} has taken {found.step} already")
    view.note(f"goes on behind step {found.step}, as it was saved in {folder.checkpoint}")
    return found.step


def _crash_safe(config: TrainConfig, folder: RunFolder | None) -> Path | None:
    """Where what is on disk is kept in two places, so that no save copies it; None where saves copy."""
    if folder is None or config.save_every is None or config.disk is None:
        return None
    return folder.checkpoint if shares_a_disk(config.disk, folder.path) else None


def _prepared_to_save(
    config: TrainConfig,
    engine: Engine,
    view: View,
    model: nn.Module,
    batch: Mapping[str, torch.Tensor],
    device: str,
    plan: Plan | None,
    folder: RunFolder | None,
) -> tuple[nn.Module, torch.optim.Optimizer, int]:
    """``_prepared``, so that saves copy nothing that is on disk, where there is room for that. Not under a ``plan``
    that is given: the one before may have what was saved in place."""
    crash_safe = None if plan is not None else _crash_safe(config, folder)
    try:
        return _prepared(config, engine, view, model, batch, device, plan, crash_safe)
    except (DoesNotFit, DiskFull) as refusal:
        if crash_safe is None:
            raise
        why = _one_place(config, refusal)
    # Not before: what was raised holds on to what the first try had opened.
    prepared = _prepared(config, engine, view, model, batch, device, plan, None)
    view.note(f"saves copy what is on disk{why}")
    return prepared


def _one_place(config: TrainConfig, refusal: DoesNotFit | DiskFull) -> str:
    """Why what is on disk has one place only: behind the words that saves copy it."""
    if isinstance(refusal, CannotServe):  # it serves without: what stood in its way are the two places
        return f": {config.policy} updates states where they lie"
    return f", which has no room for two places: {refusal}"


def _prepared(
    config: TrainConfig,
    engine: Engine,
    view: View,
    model: nn.Module,
    batch: Mapping[str, torch.Tensor],
    device: str,
    given: Plan | None,
    crash_safe: Path | None,
) -> tuple[nn.Module, torch.optim.Optimizer, int]:
    """Model and optimizer under a plan (the one that is ``given``, if one is), and how many micro-batches pass the
    model together: all of a step, where a plan has room for them and foretells a faster step; else 1."""

    def prepared(micro_batches: int, plan: Plan | None = given) -> tuple[nn.Module, torch.optim.Optimizer]:
        return engine.prepare(
            model,
            optimizer_of(config.optimizer, model.parameters(), config.lr),
            batch,
            device_memory=config.device_memory,
            host_memory=config.host_memory,
            disk=config.disk,
            policy=config.policy,
            loss=config.loss,
            compress=config.compress,
            plan=plan,
            device=device,
            micro_batches=micro_batches,
            update=config.update,
            crash_safe=crash_safe,
        )

    count = config.accumulate
    try:
        made = prepared(count)
    except (DoesNotFit, ConfigError) as refusal:
        if count == 1:
            raise
        try:
            made = prepared(1, refusal.alone if isinstance(refusal, NoRoomTogether) else None)
        except CannotServe:  # the policy is for several: what stood in its way is what the first refusal says
            raise refusal from None
        # If it was not the micro-batches, the same has been refused again.
        view.note(f"the micro-batches of a step go one by one: {refusal}")
        return *made, 1
    plan = engine.report(made[0]).plan
    seconds, one_by_one = plan.seconds_of_step(count, count), plan.seconds_of_step(count)
    gains = seconds is not None and one_by_one is not None and seconds < one_by_one
    return *made, count if gains else 1


def _windows(config: TrainConfig, tokenizer: Tokenizer) -> Windows:
    from forebay.data.text import Windows, tokenize

    return Windows(tokenize(config.data, tokenizer), batch=config.batch, seq=config.seq, seed=config.seed)


def _device(wanted: str | None) -> str:
    import torch

    if wanted == "cuda" and not torch.cuda.is_available():
        raise ModelError(f"--device cuda: torch {torch.__version__} finds no CUDA device here; use --device cpu")
    return wanted or ("cuda" if torch.cuda.is_available() else "cpu")


def _check_model(config: TrainConfig, model: nn.Module, windows: Windows, tokenizer: Tokenizer) -> None:
    settings: Any = model.config
    longest = getattr(settings, "max_position_embeddings", None)
    if longest is not None and config.seq > longest:
        raise ConfigError(f"--seq {config.seq} is longer than the {longest} positions of the model; lower --seq")
    windows.check_range(tokenizer.name, settings.get_text_config().vocab_size)


def optimizer_of(
    name: OptimizerName, parameters: Iterable[nn.Parameter], lr: float, **options: Any
) -> torch.optim.Optimizer:
    """The optimizer that ``--optimizer`` names, with ``options`` beside the learning rate."""
    import torch

    from forebay.optim import AdamW, Lion

    makers: dict[OptimizerName, Callable[..., torch.optim.Optimizer]] = {
        "adamw": torch.optim.AdamW,
        "adam": torch.optim.Adam,
        "sgd": torch.optim.SGD,
        "adamw-bf16": partial(AdamW, moments="bfloat16"),
        "adamw-8bit": partial(AdamW, moments="8bit"),
        "adamw-4bit": partial(AdamW, moments="4bit"),
        "lion": Lion,
    }
    return makers[name](parameters, lr=lr, **options)


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
