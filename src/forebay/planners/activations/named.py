"""What treatments name: ops of a block's forward, bytes that move with them, seconds that they spare. No torch."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from forebay.layout import MOVED_LEAST
from forebay.lowering.index import TraceIndex
from forebay.simulation.costs import Costs
from forebay.trace import Phase
from forebay.treatments import Fate, Selection, StandIn, Treatment

__all__ = ["again_seconds", "moved_nbytes"]


def moved_nbytes(
    index: TraceIndex, activations: Sequence[Selection], fates: Collection[Fate] = (Fate.OFFLOAD, Fate.DISK)
) -> list[int]:
    """Bytes of every tensor that ``activations`` move in a micro-batch to where ``fates`` say, of its parts that do, or
    of its codes."""
    moved = []
    for place, selection in _selected(index, activations):
        names = index.named(place)
        for t in selection.treatments:
            if t.fate in fates and (t.op, t.occurrence) in names:
                roots = index.made_by(place, names[t.op, t.occurrence])
                moved += [_nbytes(index, r, t) for r in roots if index.roots[r].nbytes >= MOVED_LEAST]
    return moved


def _nbytes(index: TraceIndex, root: int, treatment: Treatment) -> int:
    return StandIn.of(treatment, index.roots[root].nbytes, index.dtype_of(root)).moved


def again_seconds(costs: Costs, index: TraceIndex, recompute: Sequence[str], activations: Sequence[Selection]) -> float:
    """Seconds of the ops that run again, each alone: those of the blocks in ``recompute`` up to their last saved
    tensor, but for the ones that ``activations`` name."""
    trace, again = costs.trace, frozenset(recompute)
    total = 0.0
    for visit in trace.visits:
        if visit.phase is Phase.FORWARD and visit.block in again:
            stop = max(0, trace.segments[visit.segment].saves_until)
            total += costs.ops(visit.first_op, visit.first_op + stop) + stop * costs.replay_seconds
    known: dict[tuple[int, tuple[str, ...]], float] = {}
    for place, selection in _selected(index, activations):
        visit = trace.visits[place]
        key = (visit.segment, selection.blocks)
        if visit.block in again and key not in known:
            names, segment = index.named(place), trace.segments[visit.segment]
            named = [names.get((t.op, t.occurrence), segment.saves_until) for t in selection.treatments]
            spared = [costs.again(segment.ops[op].work) for op in named if op < segment.saves_until]
            known[key] = sum(spared)
        total -= known.get(key, 0.0)
    return total


def _selected(index: TraceIndex, activations: Sequence[Selection]) -> Iterator[tuple[int, Selection]]:
    """The place of every forward visit of a selected block, and its selection."""
    selection_of = {block: selection for selection in activations for block in selection.blocks}
    for place, visit in enumerate(index.trace.visits):
        if visit.phase is Phase.FORWARD and visit.block in selection_of:
            yield place, selection_of[visit.block]
