"""Updates elsewhere on paper: a chunk's way to its cell and home again (``runtime.cells``). No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from forebay.arenas import Arenas
from forebay.device.base import Completion
from forebay.lowering.jobs import Jobs
from forebay.lowering.recorder import Paper, Recorded, Recorder
from forebay.memory import Kind
from forebay.model import Block
from forebay.plans import Plan, Update
from forebay.program import Verb
from forebay.scheduling.routes import TO_DEVICE, TO_STORAGE, Route
from forebay.scheduling.staging import StagingRing
from forebay.timeline import Lane

__all__ = ["PaperCells", "paper_cells"]

Waits = tuple[Completion, ...]


@dataclass(frozen=True, slots=True)
class _Part:
    """What of a chunk moves together: the bytes of each transfer, of which the first comes ``after`` something."""

    kind: Kind
    what: str
    sizes: tuple[int, ...]
    after: Waits
    chosen_from: int = 0


@final
class PaperCells:
    """As many cells of ``cell`` bytes as ``window`` bytes hold, at the end of ``route``."""

    def __init__(self, plan: Plan, window: int, cell: int, recorder: Recorder, route: Route, jobs: Jobs) -> None:
        self._recorder = recorder
        self._route = route
        self._streaming = plan.streaming
        self._density = plan.streaming.gradient_density if route.sparse else None
        self._ring = StagingRing([Paper(cell)] * (window // cell if cell else 0))
        self._jobs = jobs

    def update(
        self, block: Block, tasks: frozenset[int], number: int, touched: int, landed: Waits, ready: Waits, states: Waits
    ) -> tuple[Recorded, Recorded]:
        """The update of chunk ``number`` of ``block``, of the parameters in ``tasks`` (places in the block), after all
        of ``landed`` (its gradients), ``ready`` (its parameters) and ``states``. Returns the actions by which the
        gradients have been read and all is at home."""
        moves = self._jobs.moves(block, tasks, self._streaming, self._density)[number]
        route = self._route
        staging, free = self._ring.take(moves.cell)
        states_moved = (moves.states,) if route.states else ()
        read = self._move(
            *(route.bring, Verb.LOAD, block, number),
            [
                _Part(Kind.STATE, "states of ", states_moved, (*free, *states)),
                _Part(Kind.PARAMETER, "parameters of ", moves.loaded, (*free, *ready)),
                _Part(Kind.GRADIENT, "gradients of ", moves.gradients, (*free, *landed), moves.chosen_from),
            ],
        )
        updated = self._recorder.add(
            route.update,
            Verb.UPDATE,
            f"update {block.name}",
            after=read,
            nbytes=touched,
            block=block.name,
            chunk=number,
        )
        after = (updated, *ready, *states)
        home = self._move(
            *(route.take, Verb.STORE, block, number),
            [_Part(Kind.STATE, "states of ", states_moved, after), _Part(Kind.PARAMETER, "", moves.stored, after)],
        )
        staging.busy = home[-1]
        return read[-1], home[-1]

    def _move(self, lane: Lane, verb: Verb, block: Block, number: int, parts: Sequence[_Part]) -> list[Recorded]:
        """Writes down the transfers of ``parts`` of chunk ``number`` of ``block``, one after the other on ``lane``: in
        a sketch as one, which begins when all of them may."""
        if self._recorder.sketching and not any(part.chosen_from for part in parts):
            after = [completion for part in parts if part.sizes for completion in part.after]
            sizes = tuple([nbytes for part in parts for nbytes in part.sizes if nbytes])
            what = f"{verb.value} {block.name}"
            return [
                self._recorder.add(lane, verb, what, after=after, nbytes=sum(sizes), block=block.name, pieces=sizes)
            ]
        return [
            self._recorder.add(
                lane,
                verb,
                f"{verb.value} {part.what}{block.name}",
                after=part.after,
                nbytes=nbytes,
                block=block.name,
                chunk=number,
                part=part.kind,
                chosen_from=part.chosen_from,
            )
            for part in parts
            for nbytes in filter(None, part.sizes)
        ]


def paper_cells(plan: Plan, sizes: Arenas, recorder: Recorder, jobs: Jobs) -> Mapping[str, PaperCells]:
    """The cells in which a block is updated, of every block that is updated in one."""
    window = sizes.device_updates - sizes.update_widening
    there = PaperCells(plan, window, sizes.update_cell, recorder, TO_DEVICE, jobs)
    window = sizes.storage_window - sizes.storage_widening
    beside = PaperCells(plan, window, sizes.storage_cell, recorder, TO_STORAGE, jobs)
    on_device, at_storage = plan.updated(Update.DEVICE), plan.updated(Update.STORAGE)
    return dict.fromkeys(on_device, there) | dict.fromkeys(at_storage, beside)
