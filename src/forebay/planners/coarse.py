"""How coarse a step is simulated that is only compared with others: most of a simulation would go into small parts."""

from __future__ import annotations

from dataclasses import dataclass

from forebay.lowering import Grain
from forebay.model import Model
from forebay.plans import Streaming

__all__ = ["Coarseness"]

CHUNKS = 500
"""Chunks of updates in a simulated step of a model of many more, beside the last one of each block."""

TRANSFERS = 250
"""Landings of gradients, and of a long step activations that leave, in that of a model of many more: beside the last
ones of each block."""


@dataclass(frozen=True)
class Coarseness:
    """What is taken for one: of a step of a model with ``elements`` parameters that are trained, of which the gradients
    have ``gradients`` bytes. In a ``long`` step activations too."""

    elements: int
    gradients: int
    long: bool

    @classmethod
    def of(cls, model: Model, *, long: bool) -> Coarseness:
        """That of a step of ``model``."""
        return cls(sum(b.trainable_numel for b in model.blocks), sum(b.gradient_nbytes for b in model.blocks), long)

    def chunk(self, elements: int) -> int:
        """Elements of a chunk of updates that run ``elements`` at a time."""
        return max(elements, self.elements // CHUNKS)

    def grain(self, streaming: Streaming) -> Grain:
        """What moves together. Of activations no more than a quarter of a window: some are on their way while the next
        are made, or read."""
        gradients = self.gradients // TRANSFERS
        if not self.long:
            return Grain(gradients)
        windows = [streaming.offload_window, streaming.reload_window]
        if streaming.disk_activations:
            windows.append(streaming.disk_window)
        moved = streaming.host_activations + streaming.disk_activations
        return Grain(gradients, min(moved // TRANSFERS, min(windows) // 4))
