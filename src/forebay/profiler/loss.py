"""Whether the loss of a model can be computed in pieces, of what size, and whether that is exact here."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from forebay.errors import ModelError
from forebay.loss import DEFAULT, Cut, LossPolicy, logits_nbytes
from forebay.profiler.batch import call_arguments, count_tokens
from forebay.runtime.cross_entropy import is_exact
from forebay.runtime.head import recognise
from forebay.runtime.no_logits import REMEDY
from forebay.runtime.tiles import TiledLinear
from forebay.units import format_bytes

__all__ = ["cut_for", "forced_cut"]


def cut_for(
    model: nn.Module, batch: Any, budget: int, device: torch.device | None, policy: LossPolicy = DEFAULT
) -> Cut | str:
    """How ``loss="auto"`` would cut the loss of ``model`` on ``batch`` under ``budget`` bytes of device memory; or, in
    words, why it does not think of that. ``device`` is where the run will be, None: on another machine."""
    return _cut(model, batch, budget, device, policy, notable=True)


def forced_cut(
    model: nn.Module, batch: Any, budget: int, device: torch.device | None, policy: LossPolicy = DEFAULT
) -> Cut:
    """The same for ``loss="chunked"``. Raises ``ModelError`` where it cannot be."""
    found = _cut(model, batch, budget, device, policy, notable=False)
    if isinstance(found, str):
        raise ModelError(f"the loss cannot be computed in pieces: {found}; {REMEDY}")
    return found


def _cut(
    model: nn.Module, batch: Any, budget: int, device: torch.device | None, policy: LossPolicy, *, notable: bool
) -> Cut | str:
    found = recognise(model)
    if isinstance(found, str):
        return found
    args, kwargs = call_arguments(batch)
    # What a language model inside of another is called with shows when the step is recorded.
    if found.model is model and not found.trains_on(args, kwargs):
        return "the batch brings no labels"
    head = found.head
    logits = logits_nbytes(count_tokens(kwargs or args), head.out_features)
    if notable and not policy.worth_a_thought(logits, budget):
        return f"all logits are {format_bytes(logits)}, which is little"
    piece, dtype = policy.piece_nbytes(budget), next(head.parameters()).dtype
    if isinstance(head, TiledLinear):
        # Every piece asks for all tiles: as large as what there is of the weight at a time.
        piece = max(piece, head.grid.panel * dtype.itemsize)
    exact = device is not None and is_exact(head.in_features, dtype, device, bias=head.bias is not None)
    return Cut(piece, logits, exact)
