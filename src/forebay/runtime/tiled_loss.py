"""Cross entropy in pieces (``cross_entropy.py``) where the weight of the head is in tiles (``tiles.py``).

forward    for each piece of the tokens: logits over all panels, one after the other
backward   the same again, and from it the gradient of the hidden state for these tokens, over all panels
           for each panel: the gradient of its tiles, from all tokens and a piece of its rows at a time

So all tiles cross the link twice for each piece of the tokens, and once more for their gradient. Each sum runs over
what it runs over in plain PyTorch.
"""

from __future__ import annotations

from functools import partial
from typing import Any, final

import torch

from forebay.runtime.cross_entropy import (
    Upstream,
    gradient_of_rows,
    gradients_of_weight,
    picked_of,
    refuse_second_derivative,
)
from forebay.runtime.tiles import TiledLinear, stand_for

__all__ = ["picked_from_tiles"]


def picked_from_tiles(layer: TiledLinear, hidden: torch.Tensor, index: torch.Tensor, piece: int) -> torch.Tensor:
    """What ``cross_entropy.picked_log_probabilities`` is for the weight and the bias of ``layer``."""
    rows = hidden.reshape(-1, layer.in_features)
    with torch.no_grad():
        logits_of = partial(_logits, layer, layer.bias)
        picked, shift, scale = picked_of(rows, index, layer.out_features, piece, logits_of)
    sizes = [end - first for first, end in layer.grid.rows]
    # By split, not a slice at a time: what comes back is put together and not added up.
    biases = [None] * len(sizes) if layer.bias is None else layer.bias.split(sizes)
    across, weights = len(layer.grid.columns), layer.parts()
    shares = [
        _row(layer, row, piece, rows, index, shift, scale, bias, *weights[row * across : (row + 1) * across])
        for row, bias in enumerate(biases)
    ]
    made: torch.Tensor = _picked(layer, piece, rows, picked, index, layer.bias, *shares)
    return made


def _logits(layer: TiledLinear, bias: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor:
    return layer.product(rows, None if bias is None else bias.detach(), rows.dtype).float()


@final
class _Picked(torch.autograd.Function):
    """``picked`` with the gradient of ``rows``; what comes back goes on to each of ``shares``."""

    @staticmethod
    def forward(
        ctx: Any,
        layer: TiledLinear,
        piece: int,
        rows: torch.Tensor,
        picked: torch.Tensor,
        index: torch.Tensor,
        bias: torch.Tensor | None,
        *shares: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(rows, index, bias)
        ctx.layer, ctx.piece, ctx.shares = layer, piece, len(shares)
        return picked.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        refuse_second_derivative()
        (rows, index, bias), layer, gradient = ctx.saved_tensors, ctx.layer, gradients[0]
        made = None
        if ctx.needs_input_grad[2]:
            given = rows, index, gradient, layer.out_features, ctx.piece
            made = gradient_of_rows(*given, partial(_logits, layer, bias), layer.times_weight)
        return None, None, made, None, None, None, *([gradient] * ctx.shares)


@final
class _Row(torch.autograd.Function):
    """Stands for what one row of tiles contributes; makes the gradients of these tiles and of their bias."""

    @staticmethod
    def forward(
        ctx: Any,
        layer: TiledLinear,
        row: int,
        piece: int,
        rows: torch.Tensor,
        index: torch.Tensor,
        shift: torch.Tensor,
        scale: torch.Tensor,
        bias: torch.Tensor | None,
        *weights: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(rows, index, shift, scale, bias)
        ctx.layer, ctx.row, ctx.piece = layer, row, piece
        return stand_for(len(rows), 1, shift)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        refuse_second_derivative()
        (rows, index, shift, scale, bias), layer, row = ctx.saved_tensors, ctx.layer, ctx.row
        wanted = any(ctx.needs_input_grad[8:])
        parts: list[Any] = [None] * len(layer.grid.columns)
        of_bias = None
        if wanted or ctx.needs_input_grad[7]:
            panel = layer.row_panel(row, rows.dtype, rows.device)
            parts, of_bias = gradients_of_weight(
                rows,
                panel,
                bias,
                Upstream(index, shift, scale, gradients[0]),
                ctx.piece,
                start=layer.grid.rows[row][0],
                columns=layer.grid.columns,
                of_bias=ctx.needs_input_grad[7],
            )
        return None, None, None, None, None, None, None, of_bias, *parts


_row: Any = _Row.apply
_picked: Any = _Picked.apply
