"""Updates elsewhere on paper: a chunk's way to its cell and home again (``runtime.cells``). No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import final

from forebay.arenas import Arenas
from forebay.device.base import Completion
from forebay.layout import Chunk, cell_of, gradient_offsets, spans_of, state_layout
from forebay.lowering.recorder import Paper, Recorded, Recorder
from forebay.memory import Kind
from forebay.plans import Plan, Update
from forebay.program import Verb
from forebay.scheduling.routes import TO_DEVICE, TO_STORAGE, Route
from forebay.scheduling.staging import StagingRing
from forebay.timeline import Lane
from forebay.trace import Block, Trace

__all__ = ["PaperCells", "paper_cells"]

Waits = tuple[Completion, ...]


@dataclass(frozen=True, slots=True)
class _Moves:
    """What moves for one chunk of a block: bytes of its cell, of its states, and of each piece of parameters that is
    loaded, of gradients, of parameters that are stored. Of gradients that do not move as they are the largest elements
    move, ``chosen_from`` so many."""

    cell: int
    states: int
    loaded: tuple[int, ...]
    gradients: tuple[int, ...]
    stored: tuple[int, ...]
    chosen_from: int


@final
class PaperCells:
    """As many cells of ``cell`` bytes as ``window`` bytes hold, at the end of ``route``."""

    def __init__(self, trace: Trace, plan: Plan, window: int, cell: int, recorder: Recorder, route: Route) -> None:
        self._recorder = recorder
        self._route = route
        self._density = plan.streaming.gradient_density if route.sparse else None
        self._ring = StagingRing([Paper(cell)] * (window // cell if cell else 0))
        self._chunks: Callable[[Block], tuple[Chunk, ...]] = lambda block: (
            state_layout(block, trace.state_names, plan.streaming.update_chunk, plan.streaming.masters).chunks
        )
        self._masters = plan.streaming.masters
        self._moves: dict[tuple[str, frozenset[int]], tuple[_Moves, ...]] = {}

    def update(
        self, block: Block, tasks: frozenset[int], number: int, touched: int, landed: Waits, ready: Waits, states: Waits
    ) -> tuple[Recorded, Recorded]:
        """The update of chunk ``number`` of ``block``, of the parameters in ``tasks`` (places in the block), after all
        of ``landed`` (its gradients), ``ready`` (its parameters) and ``states``. Returns the actions by which the
        gradients have been read and all is at home."""
        moves, route = self._moves_of(block, tasks)[number], self._route
        staging, free = self._ring.take(moves.cell)
        arrived: list[Recorded] = []

        def move(
            lane: Lane, verb: Verb, part: Kind, what: str, sizes: Iterable[int], after: Iterable[Completion]
        ) -> None:
            for nbytes in filter(None, sizes):
                arrived.append(
                    self._recorder.add(
                        lane,
                        verb,
                        f"{verb.value} {what}{block.name}",
                        after=after,
                        nbytes=nbytes,
                        block=block.name,
                        chunk=number,
                        part=part,
                        chosen_from=moves.chosen_from if part is Kind.GRADIENT else 0,
                    )
                )

        with_states = (moves.states,) if route.states else ()
        move(route.bring, Verb.LOAD, Kind.STATE, "states of ", with_states, (*free, *states))
        move(route.bring, Verb.LOAD, Kind.PARAMETER, "parameters of ", moves.loaded, (*free, *ready))
        move(route.bring, Verb.LOAD, Kind.GRADIENT, "gradients of ", moves.gradients, (*free, *landed))
        read = arrived[-1]
        updated = self._recorder.add(
            route.update,
            Verb.UPDATE,
            f"update {block.name}",
            after=arrived,
            nbytes=touched,
            block=block.name,
            chunk=number,
        )
        after = (updated, *ready, *states)
        move(route.take, Verb.STORE, Kind.STATE, "states of ", with_states, after)
        move(route.take, Verb.STORE, Kind.PARAMETER, "", moves.stored, after)
        staging.busy = arrived[-1]
        return read, arrived[-1]

    def _moves_of(self, block: Block, tasks: frozenset[int]) -> tuple[_Moves, ...]:
        key = block.name, tasks
        known = self._moves.get(key)
        if known is None:
            names = {block.parameters[place].name for place in tasks}
            offsets, _ = gradient_offsets(block)
            made = []
            for chunk in self._chunks(block):
                spans = spans_of(chunk, offsets, names, self._masters)
                every = tuple(span.nbytes for span in spans)
                loaded = tuple(span.nbytes for span in spans if not span.written)
                cell = cell_of(chunk, self._density)
                own = [n for n, piece in enumerate(chunk.pieces) if piece.parameter.name in names]
                # The pieces of a chunk go there together: they are chosen by one job.
                gradients = (sum(cell.sent[n].nbytes for n in own),) if cell.sent else every
                from_all = sum(chunk.pieces[n].stop - chunk.pieces[n].start for n in own) if cell.sent else 0
                made.append(_Moves(cell.nbytes, chunk.nbytes, loaded, gradients, every, from_all))
            known = self._moves[key] = tuple(made)
        return known


def paper_cells(trace: Trace, plan: Plan, sizes: Arenas, recorder: Recorder) -> Mapping[str, PaperCells]:
    """The cells in which a block is updated, of every block that is updated in one."""
    window = sizes.device_updates - sizes.update_widening
    there = PaperCells(trace, plan, window, sizes.update_cell, recorder, TO_DEVICE)
    window = sizes.storage_window - sizes.storage_widening
    beside = PaperCells(trace, plan, window, sizes.storage_cell, recorder, TO_STORAGE)
    on_device, at_storage = plan.updated(Update.DEVICE), plan.updated(Update.STORAGE)
    return dict.fromkeys(on_device, there) | dict.fromkeys(at_storage, beside)
