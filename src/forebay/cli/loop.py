"""The training loop, as a user would write it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forebay.cli.progress import StepResult
from forebay.errors import ForebayError

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim.lr_scheduler import LRScheduler

    from forebay.config import TrainConfig
    from forebay.data.text import Windows

__all__ = ["WARMUP_SHARE", "Accumulate", "Leg", "make_scheduler", "train_loop", "warmup_of"]

WARMUP_SHARE = 0.1
"""The learning rate rises over this share of the steps and then stays."""

Accumulate = Callable[
    ["nn.Module", Sequence[Any], Callable[["nn.Module", Any], "torch.Tensor"]], "Sequence[torch.Tensor]"
]
"""Adds the gradients of micro-batches to those of the model and returns their losses (``forebay.accumulate``)."""


@dataclass(frozen=True)
class Leg:
    """The part of a run that one process takes: the steps after the first ``taken`` ones, until the last of the run or
    until ``stopping`` says so behind one of them."""

    taken: int
    stopping: Callable[[], bool]


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

    Raises ``ForebayError`` before the update when a loss is not a finite number: the parameters are those of the
    last good step then, unless they are updated in backward.
    """
    from torch.nn.utils import clip_grad_norm_

    from forebay.runtime.accumulate import accumulate_in_order

    accumulate = accumulate or accumulate_in_order

    def mean_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        batch = {name: tensor.to(device) for name, tensor in batch.items()}
        loss: torch.Tensor = model(**batch).loss / config.accumulate
        return loss

    begin = time.perf_counter()
    for step in range(leg.taken, config.steps):
        first = step * config.accumulate
        batches = [windows.batch(number) for number in range(first, first + config.accumulate)]
        total = sum(loss.item() for loss in accumulate(model, batches, mean_loss))
        if not math.isfinite(total):
            when = "before the update" if config.update == "step" else "with blocks that backward has updated for it"
            raise ForebayError(
                f"the loss is {total} at step {step + 1}, so training was stopped {when}; lower --lr, set "
                "--clip-norm 1.0, or use --dtype float32"
            )
        if config.clip_norm is not None:
            clip_grad_norm_(model.parameters(), config.clip_norm)
        lr = float(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        tokens = (step + 1 - leg.taken) * config.tokens_per_step
        on_step(StepResult(step + 1, total, lr, tokens, time.perf_counter() - begin, leg.taken))
        if leg.stopping():
            return
