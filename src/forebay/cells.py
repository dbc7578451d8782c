"""Cells: how the bytes of an update lie where it is made away from home, on the device or beside the storage. No torch.

A cell has a chunk of states as it lies at home, then the parameters and then the gradients of its elements. Where only
the largest elements of gradients are sent, these come behind all that, piece by piece: places, then values.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from math import ceil

from forebay.layout import Chunk, align, needs_master
from forebay.states import Masters

__all__ = ["PLACE_ITEMSIZE", "Cell", "Sent", "Span", "cell_of", "spans_of"]

PLACE_ITEMSIZE = 4
"""Bytes of the place of an element that is sent by itself: a number within its piece."""


@dataclass(frozen=True)
class Sent:
    """The largest elements of the gradient of a piece on their way: from byte ``start`` of a cell on the places of
    ``count`` elements (int32, within the piece), then their values in the dtype of the parameter; ``nbytes`` in all."""

    start: int
    count: int
    nbytes: int


@dataclass(frozen=True)
class Cell:
    """Where a chunk's bytes are in the buffer in which it is updated: the states from 0, its parameters from
    ``parameters`` and their gradients from ``gradients`` on. ``offsets`` are those of its pieces in either of the two.
    ``sent`` is where the largest elements of the gradient of each piece come, if no others do (else empty); ``nbytes``
    is the length of all."""

    parameters: int
    gradients: int
    offsets: tuple[int, ...]
    sent: tuple[Sent, ...]
    nbytes: int


def cell_of(chunk: Chunk, density: float | None = None) -> Cell:
    """The cell of ``chunk``: every piece at a multiple of ``ALIGNMENT``. ``density``: the share of the elements of each
    piece that come (None: its gradient comes as it is)."""
    offsets, end = [], 0
    for piece in chunk.pieces:
        offsets.append(end)
        end += align(piece.nbytes)
    sent, behind = list[Sent](), chunk.nbytes + 2 * end
    if density is not None:
        for piece in chunk.pieces:
            count = _sent_elements(piece.stop - piece.start, density)
            sent.append(Sent(behind, count, count * (PLACE_ITEMSIZE + piece.itemsize)))
            behind += align(sent[-1].nbytes)
    return Cell(chunk.nbytes, chunk.nbytes + end, tuple(offsets), tuple(sent), behind)


def _sent_elements(elements: int, density: float) -> int:
    """How many of the ``elements`` of a piece are sent: a share of ``density`` of them, rounded up."""
    return min(elements, ceil(elements * density))


@dataclass(frozen=True)
class Span:
    """``nbytes`` of a chunk's elements that lie in one piece wherever they are: at ``home`` in the block's parameters,
    at ``landed`` in its gradients, at ``cell`` in either area of a cell. ``written``: an update writes the parameters
    and does not read them, since their masters are whole."""

    home: int
    landed: int
    cell: int
    nbytes: int
    written: bool

    def follows(self, other: Span) -> bool:
        """Whether it begins where ``other`` ends, everywhere."""
        ends = (other.home + other.nbytes, other.landed + other.nbytes, other.cell + other.nbytes, other.written)
        return (self.home, self.landed, self.cell, self.written) == ends


def spans_of(chunk: Chunk, offsets: Mapping[str, int], names: Collection[str], masters: Masters) -> list[Span]:
    """What of ``chunk`` moves, beside its states, when the parameters in ``names`` are updated on the device: their
    pieces, neighbours in one; what lies between them stays at home. ``offsets`` are those of ``gradient_offsets``."""
    made: list[Span] = []
    for piece, start in zip(chunk.pieces, cell_of(chunk).offsets, strict=True):
        parameter = piece.parameter
        if parameter.name not in names:
            continue
        landed = offsets[parameter.name] + piece.begin
        written = needs_master(parameter) and masters is Masters.WHOLE
        span = Span(parameter.offset + piece.begin, landed, start, piece.nbytes, written)
        if made and span.follows(made[-1]):
            made[-1] = replace(made[-1], nbytes=made[-1].nbytes + span.nbytes)
        else:
            made.append(span)
    return made
