"""What an update does to one chunk, wherever its bytes are: at home, in a cell on the device, beside the storage."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from forebay.cells import Cell, cell_of
from forebay.layout import LOWER, MASTER, Chunk, Piece, StateLayout, needs_master
from forebay.optim.parts import Arithmetic, Held, Part, place_of
from forebay.runtime.tensors import dtype_of, state_view
from forebay.states import Masters

__all__ = [
    "Copy",
    "Task",
    "Values",
    "apply_update",
    "batches",
    "copy_of",
    "landed",
    "part_of",
    "update_cell",
]


@dataclass(frozen=True)
class Task:
    """One parameter's part in a step: which step it is for this parameter (from 1), and its group's hyperparameters.

    ``group`` is a copy made by ``optimizer.step()``: a scheduler may change the group while the update is queued.
    """

    step: int
    group: Mapping[str, Any]


Copy = Callable[[Piece], Held]
"""What one copy of a chunk has of a piece."""

Values = Callable[[Piece], torch.Tensor]
"""The elements of a piece, 1-D: of its parameter, or of its gradient."""


def copy_of(
    layout: StateLayout, state_names: tuple[str, ...], chunk: Chunk, content: torch.Tensor, parameters: Values
) -> Copy:
    """What one copy of ``chunk`` has of each piece; ``content`` are its states."""
    streams = {name: content[at : at + nbytes] for name, (at, nbytes) in layout.spans(chunk).items()}
    kept = LOWER if layout.masters is Masters.LOWER else MASTER

    def held(piece: Piece) -> Held:
        return Held(
            parameters(piece),
            state_view(streams[kept], kept, chunk, piece) if needs_master(piece.parameter) else None,
            tuple(state_view(streams[name], name, chunk, piece) for name in state_names),
        )

    return held


def apply_update(
    chunk: Chunk, held: Copy, gradients: Values, tasks: Mapping[str, Task], arithmetic: Arithmetic
) -> None:
    """Updates the pieces of ``chunk`` that are in ``tasks``, in place."""
    for task, pieces in batches(chunk, tasks):
        parts = [part_of(piece, held(piece), gradients(piece), None) for piece in pieces]
        arithmetic.update(parts, task.step, task.group)


def batches(chunk: Chunk, tasks: Mapping[str, Task]) -> Iterator[tuple[Task, Sequence[Piece]]]:
    """The pieces of ``chunk`` that are in ``tasks``: those of one group at the same step, which go through one call of
    the kernel, and their task."""
    alike: dict[tuple[int, int], list[Piece]] = defaultdict(list)
    for piece in chunk.pieces:
        task = tasks.get(piece.parameter.name)
        if task is not None:
            alike[(id(task.group), task.step)].append(piece)
    for pieces in alike.values():
        yield tasks[pieces[0].parameter.name], pieces


def update_cell(
    layout: StateLayout,
    state_names: tuple[str, ...],
    chunk: Chunk,
    tasks: Mapping[str, Task],
    states: torch.Tensor,
    buffer: torch.Tensor,
    arithmetic: Arithmetic,
) -> None:
    """Updates ``chunk``, whose states are ``states`` and whose parameters and gradients are where its cell has them in
    ``buffer`` (both 1-D uint8)."""
    cell = cell_of(chunk)
    held = copy_of(layout, state_names, chunk, states, _in_cell(cell, chunk, buffer, cell.parameters))
    apply_update(chunk, held, _in_cell(cell, chunk, buffer, cell.gradients), tasks, arithmetic)


def landed(gradients: Mapping[str, torch.Tensor], piece: Piece) -> torch.Tensor:
    """The elements of ``piece`` in the landed gradient of its parameter."""
    return gradients[piece.parameter.name][piece.start : piece.stop]


def part_of(piece: Piece, held: Held, gradient: torch.Tensor, into: Copy | None) -> Part:
    """``piece``, of which one copy has ``held``, as an update takes it: in place, or ``into`` another copy."""
    place = place_of(piece.parameter.numel, piece.start)
    target = None if into is None else into(piece)
    of = piece.parameter
    return Part(held.parameter, gradient, held.master, held.states, place, target, of.shape, of.stride)


def _in_cell(cell: Cell, chunk: Chunk, buffer: torch.Tensor, area: int) -> Values:
    """``area``: where in the cell they begin."""
    offsets = {piece.offset: offset for piece, offset in zip(chunk.pieces, cell.offsets, strict=True)}

    def values(piece: Piece) -> torch.Tensor:
        start = area + offsets[piece.offset]
        return buffer[start : start + piece.nbytes].view(dtype_of(piece.parameter))

    return values
