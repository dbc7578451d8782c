"""Ops that write to an argument without torch's count of that: batch norm, to its running statistics.

They say nothing of it in their schema, and ``Tensor._version`` stays as it was.
"""

from __future__ import annotations

from typing import Any, Final

import torch

__all__ = ["updated_uncounted"]

_NORMS: Final = frozenset(
    getattr(torch.ops.aten, name).default for name in ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")
)
# By their places: (input, weight, bias, running_mean, running_var, training, ...).
_STATISTICS: Final = slice(3, 5)
_TRAINING: Final = 5


def updated_uncounted(func: Any, args: Any) -> tuple[torch.Tensor, ...]:
    """The arguments that ``func`` updates on ``args``. What it computes does not follow from what was in them."""
    if func not in _NORMS or not args[_TRAINING]:
        return ()
    return tuple(tensor for tensor in args[_STATISTICS] if tensor is not None)
