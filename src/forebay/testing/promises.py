"""What forebay promises of its numbers under a plan, and so what a comparison with plain PyTorch may find."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from forebay import loss, tiling
from forebay.plans import Plan

__all__ = ["Course", "Promise"]

LOSSES_OF_BITS: Mapping[int, float] = MappingProxyType({8: 0.01, 4: 0.01, 2: 0.03})
"""How far the loss of a run may be off with activations as so many bits, as a share of it (docs/log.md)."""

LAST_PLACES = 8
"""Units in the last place of the parameters' dtype that a loss in pieces may be off where pieces round otherwise."""

ROUNDINGS = 4
"""Units in the last place of the largest element by which two of torch's implementations of one update, or of one norm,
were seen apart."""

VECTORS = ("AVX2", "AVX512")
"""Processors on which forebay's update kernels give the bits of torch's fused ones (``forebay.optim.arithmetic``)."""


@dataclass(frozen=True)
class Course:
    """What both models go through: ``steps`` steps of ``accumulate`` micro-batches that are looked at one by one, and
    then as many without a look in between. ``clip_norm`` None: gradients are not clipped. ``seed`` decides the random
    numbers of both. ``together``: in the second half forebay takes the micro-batches of a step through the model at a
    time (``forebay.accumulate``). ``resumed``: after that forebay's model is saved and takes as many steps again, and
    so does one that goes on from what was saved.

    Raises ``ValueError`` for what cannot be gone through.
    """

    steps: int = 3
    accumulate: int = 2
    clip_norm: float | None = 1.0
    seed: int = 0
    together: bool = False
    resumed: bool = False

    def __post_init__(self) -> None:
        if self.steps < 1 or self.accumulate < 1:
            raise ValueError(f"steps and accumulate must be 1 or more, got {self.steps} and {self.accumulate}")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ValueError(f"clip_norm must be more than 0, or None for no clipping, got {self.clip_norm}")

    @property
    def micro_batches(self) -> int:
        """Micro-batches in all: what is resumed is given the last of them twice."""
        return (3 if self.resumed else 2) * self.steps * self.accumulate


@dataclass(frozen=True)
class Promise:
    """How far what forebay makes may be from plain PyTorch: 0 the same bits, else a share of the largest element of a
    tensor, None as far as it likes.

    ``loss`` and ``gradients`` are those of one pass from the same parameters, ``roundings`` what norms and clipping
    make of the same gradients, ``updates`` what one update makes of them, ``losses`` and ``outcome`` those of a run of
    several steps, and what it leaves. A run that was resumed is held against forebay's own that was not, and is
    promised the same bits always.
    """

    loss: float | None = 0.0
    gradients: float | None = 0.0
    roundings: float | None = 0.0
    updates: float | None = 0.0
    losses: float | None = 0.0
    outcome: float | None = 0.0

    @classmethod
    def of(cls, plan: Plan, device: torch.device, dtype: torch.dtype, course: Course) -> Promise:
        """What ``plan`` promises of a model with parameters of ``dtype`` on ``device``."""
        lossy = [t.bits for selection in plan.activations for t in selection.treatments if t.lossy]
        if lossy:
            # The forward is exact; backward reads other numbers than it made.
            losses = LOSSES_OF_BITS[min(lossy)]
            return cls(gradients=None, roundings=None, updates=None, losses=losses, outcome=None)
        if any(said.endswith((loss.ROUNDED_OTHERWISE, tiling.ROUNDED_OTHERWISE)) for said in plan.changes_numbers):
            # Products of parts: already the forward is rounded otherwise.
            return cls(LAST_PLACES * torch.finfo(dtype).eps, None, None, None, None, None)
        # Updates and norms of what is at home elsewhere may be another kernel's: a run goes its own way from there.
        rounded = 0.0 if _rounds_alike(device) else ROUNDINGS * torch.finfo(dtype).eps
        density = plan.streaming.gradient_density
        if density is not None and density < 1:
            # Gradients are exact, clipped too; an update has a part of them.
            return cls(roundings=rounded, updates=None, losses=None, outcome=None)
        if plan.streaming.update_every > 1:
            # A step updates the blocks whose turn it is; before the next look the others have had theirs.
            return cls(roundings=rounded, updates=None, losses=None, outcome=None)
        if rounded:
            return cls(roundings=rounded, updates=rounded, losses=None, outcome=None)
        delay = plan.streaming.delay_after
        if delay is not None and 2 * course.steps > delay + 1:
            return cls(losses=None, outcome=None)
        return cls()


def _rounds_alike(device: torch.device) -> bool:
    return device.type == "cpu" and torch.backends.cpu.get_cpu_capability() in VECTORS
