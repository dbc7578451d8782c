"""Gradients of which only the largest elements go to an update beside the storage (SmartComp of Smart-Infinity).

Copies. The *landed gradient* stays as it is: whoever looks at it sees what backward has made and clipping has left. The
*residual* is what earlier steps have not sent of it, an fp32 number for each element, on the host (error feedback:
Seide et al., Interspeech 2014; Karimireddy et al., ICML 2019). A step adds the gradient to it and sends the k elements
of the sum with the largest magnitude: their places and their values, which lie behind all else in the cell
(``layout.Sent``). What was sent is taken from the residual; with values of 16 bits their rounding is left there.
Whoever updates makes the gradient of the cell from what has come, with zeros for the rest.

An element of which nothing is left is -0.0, and not 0: to that any number can be added without changing a bit of it. So
where everything is sent the update is that of the gradient itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Final

import numpy as np
import torch

from forebay.cells import PLACE_ITEMSIZE, Cell
from forebay.kernels.top_k import largest
from forebay.layout import STATE_ITEMSIZE, Chunk, Piece, residual_offsets
from forebay.model import Block
from forebay.runtime.tensors import SERIAL, add_serially, dtype_of

__all__ = ["forget", "gather_sent", "residuals_in", "send_largest"]


def residuals_in(memory: torch.Tensor, block: Block) -> dict[str, torch.Tensor]:
    """The residuals of ``block``, by parameter: fp32, 1-D, in the order of memory; of nothing. They lie in ``memory``
    (1-D uint8), which has as many bytes as ``residual_offsets`` says."""
    offsets, nbytes = residual_offsets(block)
    floats = forget(memory[:nbytes].view(torch.float32))
    starts = ((p, offsets[p.name] // STATE_ITEMSIZE) for p in block.parameters if p.trainable)
    return {p.name: floats[start : start + p.numel] for p, start in starts}


def forget(residual: torch.Tensor) -> torch.Tensor:
    """``residual`` (fp32), of which nothing is left now."""
    return residual.fill_(-0.0)


def send_largest(
    chunk: Chunk,
    cell: Cell,
    buffer: torch.Tensor,
    gradients: Mapping[str, torch.Tensor],
    residuals: Mapping[str, torch.Tensor],
) -> None:
    """Adds the ``gradients`` (1-D, by parameter) of the pieces of ``chunk`` to their ``residuals``, and moves the
    largest elements of these to ``buffer`` (1-D uint8), which has the ``cell``. Other pieces are left alone."""
    for piece, places, values in _sent(chunk, cell, buffer, gradients.keys()):
        part = slice(piece.start, piece.stop)
        residual = residuals[piece.parameter.name][part]
        add_serially(residual, gradients[piece.parameter.name][part])
        floats = residual.numpy()
        largest(floats.view(np.uint32), places)
        for start in range(0, places.size, SERIAL):
            here, there = places[start : start + SERIAL], values[start : start + SERIAL]
            whole = torch.from_numpy(floats[here])
            left = whole - there.copy_(whole)
            # Of what is not finite nothing is left: the update has it, and the next step is not to have it again.
            left[~left.isfinite() | (left == 0)] = -0.0
            floats[here] = left.numpy()


def gather_sent(chunk: Chunk, cell: Cell, buffer: torch.Tensor, names: Collection[str]) -> None:
    """Makes, where ``cell`` has them in ``buffer``, the gradients of the pieces of ``chunk`` that are of the parameters
    ``names``: what was sent, and 0 elsewhere."""
    offsets = dict(zip(chunk.pieces, cell.offsets, strict=True))
    for piece, places, values in _sent(chunk, cell, buffer, names):
        start = cell.gradients + offsets[piece]
        gradient = buffer[start : start + piece.nbytes].numpy().view(_BITS[piece.itemsize])
        gradient[:] = 0
        gradient[places] = values.view(torch.uint8).numpy().view(_BITS[piece.itemsize])


_BITS: Final = {2: np.uint16, 4: np.uint32}
"""By the bytes of an element: numpy has no bfloat16, and bits are bits."""


def _sent(
    chunk: Chunk, cell: Cell, buffer: torch.Tensor, names: Collection[str]
) -> Iterator[tuple[Piece, np.ndarray[tuple[int], np.dtype[np.int32]], torch.Tensor]]:
    """The pieces of ``chunk`` that are of the parameters ``names``, with the places and the values that are sent."""
    for piece, sent in zip(chunk.pieces, cell.sent, strict=True):
        if piece.parameter.name in names:
            values = sent.start + PLACE_ITEMSIZE * sent.count
            places = buffer[sent.start : values].view(torch.int32).numpy()
            yield piece, places, buffer[values : sent.start + sent.nbytes].view(dtype_of(piece.parameter))
