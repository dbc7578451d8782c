"""A run's model and optimizer under a plan, as ``forebay train`` begins with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from forebay.cli.engine import Engine
from forebay.cli.keeping import shares_a_disk
from forebay.cli.loop import mean_loss
from forebay.cli.progress import View
from forebay.cli.runfolder import RunFolder
from forebay.errors import CannotServe, ConfigError, DiskFull, DoesNotFit, ModelError, NoRoomTogether
from forebay.states import DRAWN

if TYPE_CHECKING:
    import torch
    from torch import nn

    from forebay.config import OptimizerName, TrainConfig
    from forebay.plans import Plan

__all__ = ["Preparing", "device_of", "optimizer_of"]


def device_of(wanted: str | None) -> str:
    """torch's name of the device that ``--device`` asks for (None: ``cuda`` where there is one). Raises ``ModelError``
    where there is none."""
    import torch

    if wanted == "cuda" and not torch.cuda.is_available():
        raise ModelError(f"--device cuda: torch {torch.__version__} finds no CUDA device here; use --device cpu")
    return wanted or ("cuda" if torch.cuda.is_available() else "cpu")


def optimizer_of(name: OptimizerName, model: nn.Module, lr: float, **options: Any) -> torch.optim.Optimizer:
    """The optimizer of ``model`` that ``--optimizer`` names, with ``options`` beside the learning rate, which Muon has
    in the measure of AdamW's."""
    import torch

    from forebay.optim import Adafactor, AdamW, Lion, Muon, muon_groups

    of_torch: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "adamw": torch.optim.AdamW,
        "adam": torch.optim.Adam,
        "sgd": torch.optim.SGD,
        "rmsprop": torch.optim.RMSprop,
        "adagrad": torch.optim.Adagrad,
        "adadelta": torch.optim.Adadelta,
        "adamax": torch.optim.Adamax,
    }
    own: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "adamw": AdamW,
        "adamw-bf16": partial(AdamW, moments="bfloat16"),
        "adamw-8bit": partial(AdamW, moments="8bit"),
        "adamw-4bit": partial(AdamW, moments="4bit"),
        "lion": Lion,
        "adafactor": Adafactor,
    }
    if name == "muon":
        return Muon(muon_groups(model), lr=lr, adjust_lr_fn="match_rms_adamw", **options)
    parameters = model.parameters()
    if name.endswith(DRAWN):
        return own[name.removesuffix(DRAWN)](parameters, lr=lr, stochastic_rounding=True, **options)
    return {**own, **of_torch}[name](parameters, lr=lr, **options)


@final
@dataclass(frozen=True)
class Preparing:
    """What a run has when it asks for a plan: its settings, its ``model``, and a ``batch`` on ``device``."""

    config: TrainConfig
    engine: Engine
    view: View
    model: nn.Module
    batch: Mapping[str, Any]
    device: str

    def to_save(self, plan: Plan | None, folder: RunFolder | None) -> tuple[nn.Module, torch.optim.Optimizer, int]:
        """``under``, so that saves copy nothing that is on disk, where there is room for that. Not under a ``plan``
        that is given: the one before may have what was saved in place."""
        crash_safe = None if plan is not None else _crash_safe(self.config, folder)
        try:
            return self.under(plan, crash_safe)
        except (DoesNotFit, DiskFull) as refusal:
            if crash_safe is None:
                raise
            why = _one_place(self.config, refusal)
        # Not before: what was raised holds on to what the first try had opened.
        prepared = self.under(plan)
        self.view.note(f"saves copy what is on disk{why}")
        return prepared

    def under(self, given: Plan | None, crash_safe: Path | None = None) -> tuple[nn.Module, torch.optim.Optimizer, int]:
        """Model and optimizer under a plan (the one that is ``given``, if one is), and how many micro-batches pass the
        model together: all of a step, where a plan has room for them and foretells a faster step; else 1."""
        count = self.config.accumulate
        try:
            made = self._prepared(given, crash_safe, count)
        except (DoesNotFit, ConfigError) as refusal:
            if count == 1:
                raise
            alone = refusal.alone if isinstance(refusal, NoRoomTogether) else None
            try:
                made = self._prepared(alone, crash_safe, 1)
            except CannotServe:  # the policy is for several: what stood in its way is what the first refusal says
                raise refusal from None
            # If it was not the micro-batches, the same has been refused again.
            self.view.note(f"the micro-batches of a step go one by one: {refusal}")
            return *made, 1
        plan = self.engine.report(made[0]).plan
        seconds, one_by_one = plan.seconds_of_step(count, count), plan.seconds_of_step(count)
        gains = seconds is not None and one_by_one is not None and seconds < one_by_one
        return *made, count if gains else 1

    def _prepared(
        self, plan: Plan | None, crash_safe: Path | None, micro_batches: int
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        config = self.config
        return self.engine.prepare(
            self.model,
            optimizer_of(config.optimizer, self.model, config.lr),
            self.batch,
            device_memory=config.device_memory,
            host_memory=config.host_memory,
            disk=config.disk,
            policy=config.policy,
            loss=config.loss,
            compress=config.compress,
            plan=plan,
            device=self.device,
            micro_batches=micro_batches,
            accumulates=config.accumulate > 1,
            update=config.update,
            crash_safe=crash_safe,
            checksums=config.checksums,
            loss_fn=mean_loss(config, self.device),
        )


def _crash_safe(config: TrainConfig, folder: RunFolder | None) -> Path | None:
    """Where what is on disk is kept in two places, so that no save copies it; None where saves copy."""
    if folder is None or config.save_every is None or config.disk is None:
        return None
    return folder.checkpoint if shares_a_disk(config.disk, folder.path) else None


def _one_place(config: TrainConfig, refusal: DoesNotFit | DiskFull) -> str:
    """Why what is on disk has one place only: behind the words that saves copy it."""
    if isinstance(refusal, CannotServe):  # it serves without: what stood in its way are the two places
        return f": {config.policy} updates states where they lie"
    return f", which has no room for two places: {refusal}"
