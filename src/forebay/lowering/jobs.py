"""How updates of blocks are cut into jobs, and what moves for each: worked out once for layers that are alike, and for
all plans of a trace. No torch."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import final

from forebay.cells import cell_of, spans_of
from forebay.layout import gradient_offsets, state_layout
from forebay.model import Block
from forebay.plans import Streaming
from forebay.trace import Trace
from forebay.workspaces import widened_copies, workspace_nbytes

__all__ = ["Job", "Jobs", "Moves"]


@dataclass(frozen=True, slots=True)
class Job:
    """One update job: its place in the block's states, its bytes there, the bytes that it touches, the bytes of its
    widened gradients, and the places of its parameters in the block."""

    offset: int
    nbytes: int
    touched: int
    widened: int
    parameters: frozenset[int]


@dataclass(frozen=True, slots=True)
class Moves:
    """What moves for one job that is done in a cell: bytes of the cell, of the states, and of each piece of parameters
    that is loaded, of gradients, of parameters that are stored. Of gradients that do not move as they are the largest
    elements move, ``chosen_from`` so many."""

    cell: int
    states: int
    loaded: tuple[int, ...]
    gradients: tuple[int, ...]
    stored: tuple[int, ...]
    chosen_from: int


@final
class Jobs:
    """The jobs of a trace's blocks under any plan."""

    def __init__(self, trace: Trace) -> None:
        self._state_names = trace.state_names
        self._alike: Mapping[str, Hashable] = {
            block.name: tuple((p.sort, p.offset) for p in block.parameters) for block in trace.model.blocks
        }
        self._jobs: dict[Hashable, tuple[Job, ...]] = {}
        self._moves: dict[Hashable, tuple[Moves, ...]] = {}

    def of(self, block: Block, streaming: Streaming) -> tuple[Job, ...]:
        """The jobs of ``block``."""
        key = self._alike[block.name], streaming.update_chunk, streaming.masters
        if key not in self._jobs:
            self._jobs[key] = self._cut(block, streaming)
        return self._jobs[key]

    def moves(
        self, block: Block, tasks: frozenset[int], streaming: Streaming, density: float | None
    ) -> tuple[Moves, ...]:
        """What moves for each job of ``block`` that updates the parameters in ``tasks`` (places in the block) in a
        cell; of gradients a share of ``density`` (None: they move as they are)."""
        key = self._alike[block.name], tasks, streaming.update_chunk, streaming.masters, density
        if key not in self._moves:
            self._moves[key] = self._moved(block, tasks, streaming, density)
        return self._moves[key]

    def _cut(self, block: Block, streaming: Streaming) -> tuple[Job, ...]:
        layout = state_layout(block, self._state_names, streaming.update_chunk, streaming.masters)
        places = {p.name: i for i, p in enumerate(block.parameters)}
        made = []
        for chunk in layout.chunks:
            wide = sum((p.stop - p.start) * widened_copies(p.parameter, streaming.masters) for p in chunk.pieces)
            largest = max(p.stop - p.start for p in chunk.pieces)
            widened = workspace_nbytes(layout.streams, largest, wide, (p.parameter for p in chunk.pieces))
            parameters = frozenset(places[p.parameter.name] for p in chunk.pieces)
            made.append(Job(chunk.offset, chunk.nbytes, layout.touched(chunk), widened, parameters))
        return tuple(made)

    def _moved(
        self, block: Block, tasks: frozenset[int], streaming: Streaming, density: float | None
    ) -> tuple[Moves, ...]:
        names = {block.parameters[place].name for place in tasks}
        offsets, _ = gradient_offsets(block)
        made = []
        for chunk in state_layout(block, self._state_names, streaming.update_chunk, streaming.masters).chunks:
            spans = spans_of(chunk, offsets, names, streaming.masters)
            every = tuple(span.nbytes for span in spans)
            loaded = tuple(span.nbytes for span in spans if not span.written)
            cell = cell_of(chunk, density)
            own = [n for n, piece in enumerate(chunk.pieces) if piece.parameter.name in names]
            # The pieces of a chunk go there together: they are chosen by one job.
            gradients = (sum(cell.sent[n].nbytes for n in own),) if cell.sent else every
            from_all = sum(chunk.pieces[n].stop - chunk.pieces[n].start for n in own) if cell.sent else 0
            made.append(Moves(cell.nbytes, chunk.nbytes, loaded, gradients, every, from_all))
        return tuple(made)
