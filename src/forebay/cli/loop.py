"""The training loop, as a user would write it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forebay.cli.attempt import attempt, give_up
from forebay.cli.progress import StepResult
from forebay.errors import NotFinite

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim.lr_scheduler import LRScheduler

    from forebay.config import TrainConfig
    from forebay.data.text import Windows
    from forebay.runtime.losses import LossFunction

__all__ = ["PATIENCE", "WARMUP_SHARE", "Accumulate", "Leg", "make_scheduler", "mean_loss", "train_loop", "warmup_of"]

WARMUP_SHARE = 0.1
"""The learning rate rises over this share of the steps and then stays."""

PATIENCE = 10
"""After so many skipped steps in a row the run is stopped: it does not learn any more."""

Accumulate = Callable[
    ["nn.Module", Sequence[Any], Callable[["nn.Module", Any], "torch.Tensor"]], "Sequence[torch.Tensor]"
]
"""Adds the gradients of micro-batches to those of the model and returns their losses (``forebay.accumulate``)."""


@dataclass(frozen=True)
class Leg:
    """The part of a run that one process takes: the steps after the first ``taken`` ones, until the last of the run or
    until ``stopping`` says so behind one of them. ``saves``: whether the run is saved behind a step (from 1)."""

    taken: int
    stopping: Callable[[], bool]
    saves: Callable[[int], bool] = lambda step: False


def warmup_of(steps: int) -> int:
    """The steps over which the learning rate of a run of ``steps`` steps rises."""
    return max(1, round(WARMUP_SHARE * steps))


def make_scheduler(optimizer: torch.optim.Optimizer, warmup: int) -> LRScheduler:
    """The scheduler of a run whose learning rate rises over ``warmup`` steps."""
    from torch.optim.lr_scheduler import LambdaLR

    return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warmup))


def train_loop(
    config: TrainConfig,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: LRScheduler,
    windows: Windows,
    device: str,
    on_step: Callable[[StepResult], None],
    accumulate: Accumulate | None,
    leg: Leg,
) -> None:
    """Runs the optimizer steps of ``leg``, up to ``config.steps``, of ``config.accumulate`` micro-batches each and
    tells ``on_step`` of each. ``accumulate`` takes the micro-batches of a step through the model, None: one by one.

    A loss, or a norm of gradients, that is infinite or NaN is what ``config.nonfinite`` says: ``stop`` raises
    ``NotFinite`` before the update, so that the parameters are those of the last good step, unless they are updated in
    backward; ``skip`` leaves the update and the scheduler's step out, and raises ``NotFinite`` after ``PATIENCE`` such
    steps in a row. Without clipping ``stop`` looks at the loss alone, except in steps that are saved; ``skip`` looks at
    the gradients of every step.
    ``DeviceOutOfMemory`` leaves the parameters as they were as well.
    """
    from forebay.runtime.accumulate import accumulate_in_order

    take = _taking(config, model, windows, device, accumulate or accumulate_in_order, leg.saves)
    begin = time.perf_counter()
    in_a_row = 0
    for step in range(leg.taken, config.steps):
        with attempt(model, optimizer, step + 1):
            total, norm = take(step)
            spoilt = _spoilt(total, norm)
            in_a_row = in_a_row + 1 if spoilt else 0
            if spoilt and (config.nonfinite == "stop" or in_a_row == PATIENCE):
                raise NotFinite(_last_words(config, step + 1, spoilt, in_a_row))
        lr = float(scheduler.get_last_lr()[0])
        if spoilt:
            # As torch.amp.GradScaler does: the data goes on, the parameters and the learning rate do not.
            give_up(model, optimizer)
        else:
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad(set_to_none=True)
        tokens = (step + 1 - leg.taken) * config.tokens_per_step
        on_step(StepResult(step + 1, total, lr, tokens, time.perf_counter() - begin, leg.taken, spoilt))
        if leg.stopping():
            return


def _taking(
    config: TrainConfig,
    model: nn.Module,
    windows: Windows,
    device: str,
    accumulate: Accumulate,
    saves: Callable[[int], bool],
) -> Callable[[int], tuple[float, float]]:
    """What takes a step (from 0) as far as its update: returns its loss and the norm of its gradients before they were
    clipped, 0 where nobody asks for it."""
    from torch.nn.utils import clip_grad_norm_, get_total_norm

    loss_fn = mean_loss(config, device)

    def take(step: int) -> tuple[float, float]:
        first = step * config.accumulate
        batches = [windows.batch(number) for number in range(first, first + config.accumulate)]
        total = sum(loss.item() for loss in accumulate(model, batches, loss_fn))
        if not math.isfinite(total):
            return total, 0.0
        if config.clip_norm is not None:
            return total, float(clip_grad_norm_(model.parameters(), config.clip_norm))
        # A checkpoint must not take the place of a good one with parameters that this step spoils.
        if config.nonfinite == "skip" or (saves(step + 1) and config.update == "step"):
            return total, float(get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
        return total, 0.0

    return take


def mean_loss(config: TrainConfig, device: str) -> LossFunction:
    """The loss of one micro-batch, as it counts in a step. Of the model's output nothing else is kept."""
    from forebay.profiler.batch import moved_to

    def loss_of(model: nn.Module, batch: Mapping[str, Any]) -> torch.Tensor:
        loss: torch.Tensor = model(**moved_to(batch, device)).loss / config.accumulate
        return loss

    return loss_of


def _spoilt(total: float, norm: float) -> str:
    """In words, what is not finite in a step; empty where all is."""
    if not math.isfinite(total):
        return f"the loss is {total}"
    return "" if math.isfinite(norm) else f"the norm of the gradients is {norm}"


def _last_words(config: TrainConfig, number: int, spoilt: str, in_a_row: int) -> str:
    remedy = "lower --lr, set --clip-norm 1.0, or use --dtype float32"
    if config.nonfinite == "skip":
        return f"{spoilt} at step {number}, the {in_a_row}th in a row to be skipped, so training was stopped; {remedy}"
    when = "before the update" if config.update == "step" else "with blocks that backward has updated for it"
    return f"{spoilt} at step {number}, so training was stopped {when}; {remedy}"
