"""NumPy arrays of tensors that have no values.

Losses that find out which of a model's answers is meant for which target ask SciPy for it, on the host (Carion et al.,
"End-to-End Object Detection with Transformers", ECCV 2020, section 3.1): which answers they are depends on the values,
how many does not.
"""

from __future__ import annotations

from typing import Any, Final, final

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from forebay.profiler.values import is_fake

__all__ = ["Arrays"]

_CONVERSIONS: Final = (torch.Tensor.numpy, torch.Tensor.__array__)


@final
class Arrays(TorchFunctionMode):
    """Makes up, as even draws from 0 to 1, what floats without values are as arrays. ``made`` says whether any was."""

    def __init__(self) -> None:
        super().__init__()
        self._draw = np.random.default_rng(0)
        self.made = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _CONVERSIONS and is_fake(args[0]) and args[0].is_floating_point():
            self.made = True
            with _disable_current_modes():
                as_array = torch.empty(0, dtype=args[0].dtype).numpy().dtype
            return self._draw.random(tuple(args[0].shape)).astype(as_array)
        return func(*args, **(kwargs or {}))
