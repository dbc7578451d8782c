"""Muon as an update rule: the update of a matrix is made orthogonal before it is taken. All else is AdamW's.

It does what ``torch.optim.Muon`` does, operation by operation, in memory that it is given: the last bits are those of
``torch.optim.Muon``, and of ``torch.optim.AdamW(fused=True)``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, final

import numpy as np
import torch

from forebay.layout import STATE_ITEMSIZE
from forebay.memory import ALIGNMENT
from forebay.optim.rules import AdamRule, Keeping, WholeRule
from forebay.states import MUON

__all__ = ["MuonRule"]

_NARROW: Final = torch.bfloat16
"""Of what is made orthogonal."""

_STEP: Final = ALIGNMENT // STATE_ITEMSIZE


@final
class MuonRule(WholeRule):
    """Jordan et al. (2024), "Muon: an optimizer for hidden layers in neural networks", of the parameters in
    ``orthogonal`` (by ``id``), in bf16 as there; on fp32 masters where parameters have 16 bits."""

    state_names = MUON
    chooses = "use_muon"

    def __init__(self, orthogonal: Iterable[int]) -> None:
        self.keeping = Keeping(orthogonal=frozenset(orthogonal))
        self._other = AdamRule(decoupled=True, amsgrad=False)

    def __reduce__(self) -> tuple[Any, ...]:
        # In another process an id is nobody's: there an update knows a matrix by the states that it is given.
        return MuonRule, ((),)

    def update(
        self,
        parameter: torch.Tensor,
        gradient: torch.Tensor,
        states: Mapping[str, torch.Tensor],
        step: int,
        group: Mapping[str, Any],
        room: Callable[[int], torch.Tensor],
    ) -> None:
        buffer = states.get("momentum_buffer")
        if buffer is None:
            moments = {name: [state] for name, state in states.items()}
            numbers = {**group, "amsgrad": False, "maximize": False}
            self._other.update([parameter], [gradient], moments, step, numbers)
            return
        keeps, takes = _shares(group, parameter.shape)
        momentum = group["momentum"]
        buffer.lerp_(gradient, 1 - momentum)
        wide = _aligned(room, parameter.numel())
        narrow = _aligned(room, _halves(parameter.numel())).view(_NARROW)[: parameter.numel()]
        made = narrow.as_strided(parameter.shape, parameter.stride(), narrow.storage_offset())
        update = buffer
        if group["nesterov"]:
            update = wide.as_strided(parameter.shape, parameter.stride(), wide.storage_offset())
            torch.lerp(gradient, buffer, momentum, out=update)
        made.copy_(update)
        parameter.mul_(keeps)
        side = min(parameter.shape)
        squares = [_aligned(room, _halves(side * side)).view(_NARROW) for _ in range(2)]
        grams = [square[: side * side].view(side, side) for square in squares]
        # What is made orthogonal has been copied: where it was, there is room for it in half the bits.
        after = wide.view(_NARROW)[: parameter.numel()], narrow
        orthogonal = _orthogonal(made, group, grams, after)
        parameter.add_(orthogonal, alpha=-takes)


def _orthogonal(
    made: torch.Tensor, group: Mapping[str, Any], grams: Sequence[torch.Tensor], after: Sequence[torch.Tensor]
) -> torch.Tensor:
    """``made`` (bf16, m by n) with all of its singular values near 1, by the quintic iteration of Newton and Schulz:
    in ``grams``, two matrices as wide as the shorter side, and ``after``, room for as many numbers as ``made`` has and
    the room that this is in. It is returned in one of the two, as a view where m > n."""
    a, b, c = group["ns_coefficients"]
    tall = made.size(0) > made.size(1)
    now = made.T if tall else made
    now.div_(now.norm().clamp(min=group["eps"]))
    gram, polynomial = grams
    for number in range(group["ns_steps"]):
        torch.mm(now, now.T, out=gram)
        torch.addmm(gram, gram, gram, beta=b, alpha=c, out=polynomial)
        following = after[number % 2].view(now.shape)
        now = torch.addmm(now, polynomial, now, beta=a, out=following)
    return now.T if tall else now


def _aligned(room: Callable[[int], torch.Tensor], count: int) -> torch.Tensor:
    """``count`` fp32 numbers of ``room``, from a multiple of ``ALIGNMENT`` on, as new memory begins: how libraries
    multiply matrices may hang on that."""
    given = room(count + _STEP - 1)
    start = -(given.data_ptr() // STATE_ITEMSIZE) % _STEP
    return given[start : start + count]


def _halves(count: int) -> int:
    """How many fp32 numbers take the memory of ``count`` in bf16."""
    return -(-count // 2)


def _shares(group: Mapping[str, Any], shape: torch.Size) -> tuple[float, float]:
    """What a step leaves of a matrix of ``shape``, and how much of the update it takes: as Jordan et al. have it
    (``original``, None), or Liu et al. (2025), "Muon is scalable for LLM training", section 2.2 (``match_rms_adamw``).
    In fp32 where the learning rate was a tensor in that."""
    kind = np.float32 if isinstance(group["lr"], np.float32) else float
    rows, columns = shape
    by, lr = group["adjust_lr_fn"], kind(group["lr"])
    matched = by == "match_rms_adamw"
    ratio = 0.2 * math.sqrt(max(rows, columns)) if matched else math.sqrt(max(1, rows / columns))
    return float(kind(1) - lr * kind(group["weight_decay"])), float(lr * kind(ratio))
