"""What a loop computes its loss by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from forebay.errors import UsageError

__all__ = ["LossFunction", "expect_loss", "handed_over"]

LossFunction = Callable[[nn.Module, Any], torch.Tensor]
"""The loss of a model on one micro-batch, a tensor with one element."""


def expect_loss(loss: Any, of: str) -> torch.Tensor:
    """``loss``, which a ``LossFunction`` returned for ``of``. Raises ``UsageError`` for what is none, or cannot be
    trained by."""
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise UsageError(
            f"loss_fn returned {what} for {of}; it must return the loss, a tensor with one element "
            f"(model(**batch).loss, or .mean() of it)"
        )
    if not loss.requires_grad:
        raise UsageError(
            f"the loss of {of} has no gradient: nothing that is trained goes into it, or loss_fn "
            f"computes it under torch.no_grad() or detaches it"
        )
    return loss


def handed_over(loss: torch.Tensor) -> torch.Tensor:
    """``loss``, detached, in memory that no account has: it is the caller's, who has all losses of a step while the
    next one runs, and how many these are no plan knows."""
    with _disable_current_modes():
        return loss.detach().clone()
