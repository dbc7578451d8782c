"""Elements in one dimension, in the order in which they are to lie."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from forebay.layout import is_same_order

__all__ = ["laid_flat"]


def laid_flat(tensor: torch.Tensor, shape: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    """The elements of ``tensor``, which has ``shape``, in the order in which those of a dense tensor with ``stride``
    lie. A view where its own lie so; a copy where they do not."""
    if not is_same_order(shape, tensor.stride(), stride):
        ordered = torch.empty_strided(shape, stride, dtype=tensor.dtype, device=tensor.device)
        tensor = ordered.copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
