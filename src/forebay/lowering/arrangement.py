"""The order of a step with recomputation, and the lives of its roots in it where nothing is treated. No torch.

It depends on which blocks recompute and on nothing else, so that many plans share it (``lives`` says the rest).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from forebay.lowering.columns import Column, Columns, column
from forebay.lowering.index import NEVER, TraceIndex
from forebay.trace import NO_SAVES, Phase

__all__ = ["Arrangement", "Run", "positions"]


@dataclass(frozen=True, slots=True)
class Run:
    """Ops that run one after the other: those of visit ``visit`` (its place in the trace), once more if ``again``: then
    only up to the last tensor that the visit saves, which may be none of them, and without those in ``skipped`` (their
    places in the visit), whose results are there.

    ``position`` is that of its first op in the step: with recomputation, positions and numbers of ops differ. What is
    skipped has a position too.
    """

    visit: int
    first_op: int
    length: int
    position: int
    again: bool
    skipped: frozenset[int] = frozenset()


@final
class Arrangement:
    """The step with the blocks of ``recompute`` recomputed. ``columns`` are those of ``index``.

    ``runs`` are in order, ``again`` those that are recomputations, by visit. ``position`` is that of every op where it
    runs for the first time; ``end`` is their number, ``forward`` the first of backward. ``held`` are the inputs of what
    recomputes, with the positions from and until which they are held in backward; ``handed`` are its arguments, with
    the op behind which its forward is first called with them, and which of them it is. ``first`` are the lives of what
    each op makes when it runs for the first time, ``second`` which roots are made again and the lives of those.
    """

    def __init__(self, index: TraceIndex, columns: Columns, recompute: frozenset[str]) -> None:
        self.index = index
        self.columns = columns
        self.recompute = recompute
        self.again: dict[int, Run] = {}
        runs: list[Run] = []
        triggers = index.triggers(index.partners(recompute))
        position = 0
        for place, visit in enumerate(index.trace.visits):
            for earlier in triggers.get(place, ()):
                first, length = index.trace.visits[earlier].first_op, index.length_again(earlier)
                self.again[earlier] = Run(earlier, first, length, position, again=True)
                runs.append(self.again[earlier])
                position += length
            runs.append(Run(place, visit.first_op, index.length(place), position, again=False))
            position += runs[-1].length
        self.runs = tuple(runs)
        self.end = position
        self.forward = next((r.position for r in self.runs if _is_backward(index, r)), position)
        self.position = positions(self.runs, index.ops)
        self.held = self._inputs_of_recomputed()
        self.handed = self._arguments_of_recomputed()
        self.first = self._first()
        self.second = self._second()

    def _first(self) -> tuple[Column, Column]:
        """From which to which position the bytes of every root are live that the first run of its op makes, in the
        order of the columns."""
        table = self.columns
        place = column([*self.position, self.end - 1])  # NEVER is the last: what is never over ends with the step
        birth = place[table.birth]
        held = np.zeros(len(birth), np.int64)
        for number, (_, until) in self.held.items():
            if number in table.row:
                held[table.row[number]] = until
        # Of what runs again the first copy is autograd's only where it is saved outside of the visit, the second where
        # it is saved in it.
        outside = np.where(table.released == NEVER, 0, place[table.released])
        saved = np.where(self._runs_again(), outside, np.where(table.saved, place[table.unsave], 0))
        ends = np.maximum.reduce([birth, place[table.drop], held, saved])
        return birth, np.where(table.completes == NEVER, ends, np.maximum(birth, place[table.completes]))

    def _second(self) -> tuple[NDArray[np.bool_], Column, Column]:
        """Which roots a recomputation makes, which are none after the last tensor was saved; and from which to which
        position they are live."""
        table = self.columns
        visits = len(self.index.trace.visits)
        shift, stop, last = (np.zeros(visits, np.int64) for _ in range(3))
        for place, run in self.again.items():
            shift[place], stop[place] = run.position - run.first_op, run.position + run.length - 1
            last[place] = run.first_op + run.length
        shift, stop, last = shift[table.visit], stop[table.visit], last[table.visit]
        again = self._runs_again() & (table.birth < last)
        kept = column([*self.position, 0])[table.spent]  # NEVER is the last
        gone = np.where(table.internal, np.minimum(table.drop + shift, stop), stop)
        return again, table.birth + shift, np.maximum(gone, kept)

    def _runs_again(self) -> NDArray[np.bool_]:
        """Of every root whether the visit that makes it runs again."""
        again = np.zeros(len(self.index.trace.visits), bool)
        again[list(self.again)] = True
        return np.asarray(again[self.columns.visit])

    def _inputs_of_recomputed(self) -> dict[int, tuple[int, int]]:
        """From and until when each input of what is recomputed is held in backward: the checkpoint asks for it when the
        block runs again, and keeps it as long as backward has not let go of all that was saved in its region."""
        held: dict[int, tuple[int, int]] = {}
        for place, run in self.again.items():
            until = self.until(place)
            for root in self.index.kept(place):
                since, most = held.get(root, (run.position, until))
                held[root] = min(since, run.position), max(most, until)
        return held

    def _arguments_of_recomputed(self) -> dict[int, tuple[int, int]]:
        handed: dict[int, tuple[int, int]] = {}
        segments = self.index.trace.segments
        for place, visit in enumerate(self.index.trace.visits):
            if visit.phase is Phase.FORWARD and visit.block in self.recompute and segments[visit.segment].saves:
                for order, root in enumerate(self.index.given(place)):
                    handed.setdefault(root, (visit.first_op - 1, order))
        return handed

    def until(self, place: int) -> int:
        """The position after which backward has let go of all that was saved in a visit."""
        kept_until = self.index.trace.visits[place].kept_until
        return self.end - 1 if kept_until == NO_SAVES else self.position[kept_until]


def positions(runs: Sequence[Run], ops: int) -> list[int]:
    """The position of every op, by its number, where it runs for the first time."""
    found = [0] * ops
    for run in runs:
        if not run.again:
            found[run.first_op : run.first_op + run.length] = range(run.position, run.position + run.length)
    return found


def _is_backward(index: TraceIndex, run: Run) -> bool:
    return run.again or index.trace.visits[run.visit].phase is Phase.BACKWARD
