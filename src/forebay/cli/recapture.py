"""The step of a run that a folder of ``--run`` keeps: its model is looked at again, without its weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forebay.cli.loop import mean_loss

if TYPE_CHECKING:
    from forebay.config import TrainConfig
    from forebay.plans import Plan
    from forebay.trace import Trace

__all__ = ["captured_again"]


def captured_again(config: TrainConfig, plan: Plan, device: str) -> Trace:
    """One micro-batch of the run of ``config`` under ``plan`` on a ``device`` of that kind: with the loop's loss, in
    the pieces and the tiles in which it ran. Raises ``ModelError`` for a model that is not there or cannot be
    captured."""
    from forebay.profiler.capture import capture
    from forebay.recipes.tasks import sample
    from forebay.runtime.own_checkpointing import as_planned
    from forebay.tiling import tile

    found = sample(config.model, batch=config.batch, seq=config.seq, dtype=config.dtype)
    if config.tile is not None:
        tile(found.model, config.tile)
    piece, loss_fn = plan.loss_piece, mean_loss(config, device)
    with as_planned(found.model):
        return capture(found.model, found.batch, config.optimizer, device, loss_piece=piece, loss_fn=loss_fn).trace
