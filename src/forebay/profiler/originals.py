"""Tensors that are no buffers, and that a forward writes to in place (a running mean in an attribute): real ones, under
fake tensors too, so what was in them is put back."""

from __future__ import annotations

from typing import final

import torch
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["Originals"]


@final
class Originals:
    """What was in tensors before they were first written to."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def any(self) -> bool:
        """Whether one was written to."""
        return bool(self._kept)

    def keep(self, tensor: torch.Tensor) -> None:
        """``tensor``, which is not of the step, is about to be written to."""
        if id(tensor) not in self._kept:
            with _disable_current_modes():
                self._kept[id(tensor)] = tensor, tensor.detach().clone()

    def put_back(self) -> None:
        """All are what they were. Of several views of one storage the one that came first has what was there."""
        with _disable_current_modes(), torch.no_grad():
            for tensor, before in reversed(self._kept.values()):
                tensor.copy_(before)
