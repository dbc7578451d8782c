"""``forebay train``: a configuration to a trained model, its report and its folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, final

from forebay.cli.engine import Engine
from forebay.cli.loop import Accumulate, train_loop
from forebay.cli.progress import StepResult, View
from forebay.errors import CannotServe, ConfigError, DoesNotFit, ModelError, NoRoomTogether, StorageError
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
    """What a run left: its report, the loss of each step, and its folder (None: none was asked for)."""

    report: RunReport
    losses: tuple[float, ...]
    folder: Path | None

    def to_json_dict(self) -> dict[str, Any]:
        """The object that ``--json`` prints: sizes are bytes, times seconds, rates per second."""
        run = None if self.folder is None else str(self.folder)
        return {**self.report.to_json_dict(), "loss": list(self.losses), "run": run}


def train(config: TrainConfig, engine: Engine, view: View) -> TrainResult:
    """Trains as ``config`` says and shows it on ``view``.

    Raises the ``ForebayError`` of whatever stands in the way; the model is closed in every case.
    """
    from forebay.data.tokenizers import find_tokenizer
    from forebay.recipes.causal_lm import build, find

    folder = None if config.run is None else RunFolder(config.run)
    source = find(config.model)
    tokenizer = find_tokenizer(source.folder)
    windows = _windows(config, tokenizer)
    device = _device(config.device)
    model = build(source, config.dtype)
    _check_model(config, model, windows, tokenizer)
    view.note(_opening(config, model, source, tokenizer, windows))

    batch = {name: tensor.to(device) for name, tensor in windows.batch(0).items()}
    model, optimizer, together = _prepared(config, engine, view, model, batch, device)
    try:
        view.note(_promise(engine.report(model).plan, config.accumulate, together))
        _fill(engine, model, source, config.seed)
        accumulate = engine.accumulate if together > 1 else None
        losses = _loop(config, engine, view, folder, (model, optimizer, windows, device), accumulate)
        engine.synchronize(model)
        tokens = config.steps * config.tokens_per_step
        report = replace(engine.report(model), tokens=tokens)
        if folder is not None:
            folder.finish(report, model, engine, tokenizer)
    finally:
        engine.close(model)
    return TrainResult(report, losses, config.run)


def _prepared(
    config: TrainConfig, engine: Engine, view: View, model: nn.Module, batch: Mapping[str, torch.Tensor], device: str
) -> tuple[nn.Module, torch.optim.Optimizer, int]:
    """Model and optimizer under a plan, and how many micro-batches pass the model together: all of a step, where a plan
    has room for them and foretells a faster step; else 1."""

    def prepared(micro_batches: int, plan: Plan | None = None) -> tuple[nn.Module, torch.optim.Optimizer]:
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


def _loop(
    config: TrainConfig,
    engine: Engine,
    view: View,
    folder: RunFolder | None,
    prepared: tuple[nn.Module, torch.optim.Optimizer, Windows, str],
    accumulate: Accumulate | None,
) -> tuple[float, ...]:
    """Runs the loop with its losses shown and kept; returns them."""
    losses: list[float] = []
    with ExitStack() as stack:
        log = None if folder is None else stack.enter_context(folder.open_losses())

        def on_step(result: StepResult) -> None:
            losses.append(result.loss)
            if log is not None:
                log.write(json.dumps({"step": result.number, "loss": result.loss, "lr": result.lr}) + "\n")
                log.flush()
            view.step(result)

        view.start(config.steps, lambda: _device_peak(engine.report(prepared[0])))
        stack.callback(view.stop)
        train_loop(config, *prepared, on_step, accumulate)
    return tuple(losses)


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


def _device_peak(report: RunReport) -> int | None:
    usage = report.usage(Tier.DEVICE)
    return None if usage is None else usage.peak


def _opening(config: TrainConfig, model: nn.Module, source: ModelSource, tokenizer: Tokenizer, windows: Windows) -> str:
    parameters = format_count(sum(parameter.numel() for parameter in model.parameters()))
    start = "weights from the folder" if source.weights else f"random weights, seed {config.seed}"
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


@final
class RunFolder:
    """The folder of one run, readable by its owner only: text and weights may be private.

    Raises ``ConfigError`` for a folder that holds files already, ``StorageError`` if it cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if any(path.iterdir()):
                raise ConfigError(f"--run {path}: the folder is not empty; give a new one")
            path.chmod(0o700)
        except OSError as error:
            raise StorageError(f"--run {path}: cannot make the folder: {error.strerror}") from None

    def open_losses(self) -> IO[str]:
        """The file that takes one JSON object per step."""
        return (self.path / "losses.jsonl").open("w", encoding="utf-8")

    def finish(self, report: RunReport, model: nn.Module, engine: Engine, tokenizer: Tokenizer) -> None:
        """Writes plan and report, and the model as ``from_pretrained`` reads it."""
        from forebay.checkpoint.export import export_model

        (self.path / "plan.json").write_text(report.plan.to_json() + "\n", encoding="utf-8")
        (self.path / "report.json").write_text(report.to_json() + "\n", encoding="utf-8")
        tokenizer.save(self.path)
        export_model(model, engine.parameters(model), self.path)
