"""What a forward moves on although its tensors are fake: tensors that are no buffers, and that it writes to in place (a
running mean in an attribute), and generators that it names. They are real ones, so they are put back."""

from __future__ import annotations

from typing import final

import torch
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["Originals"]


@final
class Originals:
    """What was in tensors before they were first written to, and where generators were before they were drawn from."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._generators: dict[int, tuple[torch.Generator, torch.Tensor]] = {}

    @property
    def any(self) -> bool:
        """Whether a tensor was written to."""
        return bool(self._kept)

    def keep(self, tensor: torch.Tensor) -> None:
        """``tensor``, which is not of the step, is about to be written to."""
        if id(tensor) not in self._kept:
            with _disable_current_modes():
                self._kept[id(tensor)] = tensor, tensor.detach().clone()

    def keep_generator(self, generator: torch.Generator) -> None:
        """``generator`` is about to be drawn from."""
        if id(generator) not in self._generators:
            self._generators[id(generator)] = generator, generator.get_state()

    def put_back(self) -> None:
        """All are what they were. Of several views of one storage the one that came first has what was there."""
        for generator, state in self._generators.values():
            generator.set_state(state)
        with _disable_current_modes(), torch.no_grad():
            for tensor, before in reversed(self._kept.values()):
                tensor.copy_(before)
