"""Gradients that an update in backward has used up where they were, on the device."""

from __future__ import annotations

from typing import Any, final

import torch
from torch.utils._pytree import tree_leaves

from forebay.errors import GradientUsedUp

__all__ = ["SpentGradient", "gradient_used_up"]


def gradient_used_up(name: str) -> GradientUsedUp:
    """What is said to whoever asks for the gradient of parameter ``name``."""
    return GradientUsedUp(
        f"the gradient of {name} was used up: its block is updated in backward, so that nobody can clip, read or add "
        f"to it; call optimizer.step() and optimizer.zero_grad(), which sets it to None, after every backward, or "
        f"prepare the model with update='step'"
    )


@final
class SpentGradient(torch.Tensor):
    """``param.grad`` of a resident parameter that was updated in backward: the shape, dtype and device of its gradient,
    and no values. None in its place would have clipping pass over it without a word. Any op, autograd's own addition
    among them, raises ``GradientUsedUp``."""

    parameter: str
    is_gone = True

    @staticmethod
    def __new__(cls, parameter: str, gradient: torch.Tensor) -> SpentGradient:
        """One in the place of ``gradient``, which is let go."""
        made: SpentGradient = torch.Tensor._make_wrapper_subclass(
            cls,
            gradient.shape,
            strides=gradient.stride(),
            dtype=gradient.dtype,
            device=gradient.device,
            requires_grad=False,
        )
        made.parameter = parameter
        return made

    def __init__(self, parameter: str, gradient: torch.Tensor) -> None:
        super().__init__()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"SpentGradient({self.parameter}, {tuple(self.shape)}, {self.dtype})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        leaves = tree_leaves((args, kwargs or {}))
        raise gradient_used_up(next(leaf.parameter for leaf in leaves if isinstance(leaf, SpentGradient)))
