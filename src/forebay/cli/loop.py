"""The training loop, as a user would write it: forebay changes none of its lines."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from forebay.cli.progress import StepResult
from forebay.errors import ForebayError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from forebay.config import TrainConfig
    from forebay.data.text import Windows

__all__ = ["WARMUP_SHARE", "train_loop"]

WARMUP_SHARE = 0.1
"""The learning rate rises over this share of the steps and then stays."""


def train_loop(
    config: TrainConfig,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    windows: Windows,
    device: str,
    on_step: Callable[[StepResult], None],
) -> None:
    """Runs ``config.steps`` optimizer steps and tells ``on_step`` of each.

    Raises ``ForebayError`` before the update when a loss is not a finite number: the parameters are those of the
    last good step then.
    """
    from torch.nn.utils import clip_grad_norm_
    from torch.optim.lr_scheduler import LambdaLR

    warmup = max(1, round(WARMUP_SHARE * config.steps))
    scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warmup))
    begin = time.perf_counter()
    for step in range(config.steps):
        total = 0.0
        for micro in range(config.accumulate):
            batch = windows.batch(step * config.accumulate + micro)
            batch = {name: tensor.to(device) for name, tensor in batch.items()}
            loss = model(**batch).loss / config.accumulate
            loss.backward()
            total += loss.item()
        if not math.isfinite(total):
            raise ForebayError(
                f"the loss is {total} at step {step + 1}, so training was stopped before the update; lower --lr, set "
                "--clip-norm 1.0, or use --dtype float32"
            )
        if config.clip_norm is not None:
            clip_grad_norm_(model.parameters(), config.clip_norm)
        lr = float(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        tokens = (step + 1) * config.tokens_per_step
        on_step(StepResult(step + 1, total, lr, tokens, time.perf_counter() - begin))
