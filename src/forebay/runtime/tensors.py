"""Typed views of flat byte buffers, and sums into them. Nothing here copies."""

from __future__ import annotations

from typing import Final

import torch

from forebay.layout import Chunk, Piece
from forebay.model import Parameter
from forebay.optim.flat import laid_flat
from forebay.states import form_of

__all__ = [
    "SERIAL",
    "add_serially",
    "alone",
    "at_place",
    "bytes_before",
    "dtype_of",
    "elements",
    "flat",
    "shaped",
    "state_flat",
    "state_shaped",
    "state_view",
]

SERIAL: Final = 32768
"""Elements: torch runs an elementwise op of at most this many in the calling thread (``at::internal::GRAIN_SIZE``)."""


def dtype_of(parameter: Parameter) -> torch.dtype:
    """The torch dtype that ``parameter.dtype`` names."""
    dtype: torch.dtype = getattr(torch, parameter.dtype)
    return dtype


def elements(buffer: torch.Tensor, parameter: Parameter, offset: int) -> torch.Tensor:
    """The bytes of ``parameter`` at ``offset`` of a 1-D uint8 ``buffer``, as a 1-D tensor of its dtype."""
    return buffer[offset : offset + parameter.nbytes].view(dtype_of(parameter))


def at_place(parameters: torch.Tensor, piece: Piece) -> torch.Tensor:
    """The elements of ``piece`` in the flat ``parameters`` of its block."""
    return elements(parameters, piece.parameter, piece.parameter.offset)[piece.start : piece.stop]


def shaped(flat_elements: torch.Tensor, parameter: Parameter) -> torch.Tensor:
    """A 1-D tensor of the elements of ``parameter`` in its shape and strides."""
    return flat_elements.as_strided(parameter.shape, parameter.stride)


def flat(tensor: torch.Tensor, parameter: Parameter) -> torch.Tensor:
    """``tensor`` (the shape of ``parameter``) as a 1-D tensor in the parameter's order of memory.

    A view where it lies like the parameter; a copy where it does not.
    """
    return laid_flat(tensor, parameter.shape, parameter.stride)


def state_view(stream: torch.Tensor, state: str, chunk: Chunk, piece: Piece) -> torch.Tensor:
    """The values of ``piece`` in the bytes of one stream of its ``chunk``: those of ``state``, in its dtype, 1-D."""
    form = form_of(state)
    start, (_, count) = chunk.before(form, piece), piece.values(form)
    typed: torch.Tensor = stream.view(getattr(torch, form.dtype))
    return typed[start : start + count]


def state_shaped(values: torch.Tensor, state: str, parameter: Parameter) -> torch.Tensor:
    """All ``values`` (1-D) that ``parameter`` has of ``state``, as saved states have them: where every element has one
    in the shape and strides of the parameter, rows and columns in theirs, else in one dimension."""
    form = form_of(state)
    own = form.shape_for(parameter)
    if own is None or form.is_elementwise:
        return shaped(values, parameter)
    return values.view(own)


def state_flat(value: torch.Tensor, state: str, parameter: Parameter) -> torch.Tensor:
    """``state_shaped`` the other way round."""
    return flat(value, parameter) if form_of(state).is_elementwise else value.reshape(-1)


def bytes_before(state: str, piece: Piece) -> int:
    """Bytes of the values of ``state`` that its parameter has before those of ``piece``."""
    form = form_of(state)
    return piece.values(form)[0] * form.itemsize


def alone(tensor: torch.Tensor) -> torch.Tensor:
    """A dense ``tensor`` over the same memory, as a storage of its own: who saves it saves its bytes and no others."""
    start = tensor.storage_offset() * tensor.element_size()
    storage = tensor.untyped_storage()[start : start + tensor.nbytes]
    made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return made.set_(storage, 0, tensor.shape, tensor.stride())


def add_serially(target: torch.Tensor, source: torch.Tensor) -> None:
    """``target += source`` (1-D), all of it in this thread: a team of threads would fight with the one that
    computes."""
    for start in range(0, target.numel(), SERIAL):
        target[start : start + SERIAL].add_(source[start : start + SERIAL])
