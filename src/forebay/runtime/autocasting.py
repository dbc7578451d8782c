"""Autocast as it was when a plan was made, and as it is when the model is trained."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

__all__ = ["autocast_dtype", "warn_of_other_casts"]


def autocast_dtype(kind: str) -> torch.dtype | None:
    """What autocast, as it is set here, casts to on a device of ``kind``; None where it is off."""
    for asked in dict.fromkeys((kind, "cuda", "cpu")):
        if torch.is_autocast_enabled(asked):
            return torch.get_autocast_dtype(asked)
    return None


def warn_of_other_casts(model: nn.Module, kind: str) -> RemovableHandle:
    """Has the first training forward of ``model`` warn where it runs under another autocast than is set now, which the
    plan was made under. Returns the hook.

    None there says nothing: a wrapper of the model's forward (accelerate has one) turns autocast on behind all hooks.
    """
    planned = autocast_dtype(kind)

    def look(module: nn.Module, args: Any) -> None:
        if not torch.is_grad_enabled():
            return
        handle.remove()
        now = autocast_dtype(kind)
        if now is not None and now != planned:
            warnings.warn(
                f"the model was prepared {_under(planned)} and is trained {_under(now)}: the plan does not know the "
                f"activations of such a step; call forebay.close(model), and forebay.prepare under the same autocast",
                stacklevel=2,
            )

    handle = model.register_forward_pre_hook(look)
    return handle


def _under(dtype: torch.dtype | None) -> str:
    return "outside of torch.autocast" if dtype is None else f"under torch.autocast to {str(dtype)[6:]}"
