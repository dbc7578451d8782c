"""When the ops of a step run if nothing waits, and how long what each of them makes lies idle between its uses.

The overlap model that policies with swaps share: a copy hides if it fits between the last use of a tensor in forward
and the first one in backward, and if the link has time for it. In both directions the link takes one copy after the
other, as early as it can be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile

from forebay.planners.activations.items import Item
from forebay.planners.activations.literature.graph import Name
from forebay.planners.activations.literature.layers import Layer
from forebay.planners.bench import Bench
from forebay.trace import Phase

__all__ = ["Idle", "Moments", "idle_of", "under"]


@dataclass(frozen=True)
class Moments:
    """Seconds from the begin of a step. ``starts`` are those of each op, with the end of the last one behind them;
    ``turn`` is where backward begins."""

    starts: tuple[float, ...]
    turn: float

    @property
    def passes(self) -> tuple[float, float]:
        """Seconds of forward, under which copies out can hide, and of backward, for those back."""
        return self.turn, self.starts[-1] - self.turn

    @classmethod
    def of(cls, bench: Bench) -> Moments:
        """Ops one after the other, nothing made again, nothing waited for."""
        costs = bench.costs
        seconds = [costs.work(op.work).seconds for _, _, op in costs.trace.ops()]
        starts = tuple(accumulate(seconds, initial=0.0))
        first = next((v.first_op for v in costs.trace.visits if v.phase is Phase.BACKWARD), len(seconds))
        return cls(starts, starts[first])


@dataclass(frozen=True, slots=True)
class Idle:
    """What an op of a block makes (at ``made``, seconds from the begin of the step), from its last use in forward
    (``left``) to the first one in backward (``asked``). ``kept`` is the op where the block does not run again,
    ``again`` where it does (None: it may not). ``free`` seconds are left if it goes and comes back in between; less
    than 0: exposed. Nothing reads it from the first of the ops ``away`` (their numbers) on, up to the second."""

    layer: Layer
    name: Name
    kept: Item
    again: Item | None
    made: float
    left: float
    asked: float
    away: tuple[int, int]

    @property
    def movable(self) -> bool:
        """Whether it can go to the host."""
        return self.kept.moved > 0

    @property
    def free(self) -> float:
        """``FT`` of Capuchin: time of the back-access, less the copy back, less the end of the copy out."""
        return self.asked - self.kept.back_seconds - (self.left + self.kept.out_seconds)

    @property
    def nbytes(self) -> int:
        """Bytes that are held from forward to backward if nothing is done."""
        return self.kept.held

    @property
    def rerun_seconds(self) -> float | None:
        """Seconds to make it again; None where it cannot be."""
        return self.again.seconds if self.again is not None and self.again.reruns else None


def idle_of(bench: Bench, layers: Sequence[Layer]) -> list[Idle]:
    """What ``layers`` save, in the order in which it is made."""
    liveness = bench.liveness
    if liveness is None:
        return []
    index, moments, found = liveness.index, Moments.of(bench), []
    for layer in layers:
        names, first_op = index.named(layer.place), bench.costs.trace.visits[layer.place].first_op
        again = {(item.op, item.occurrence): item for item in layer.items.again or ()}
        for item in layer.items.kept:
            name = item.op, item.occurrence
            roots = index.made_by(layer.place, names[name])
            saved = [root for root in roots if index.roots[root].saved]
            last = max(max(index.roots[root].drop, index.roots[root].birth) for root in saved)
            asked = min((index.asked[root] for root in saved if root in index.asked), default=index.ops)
            gone = min(last + 1, index.ops)
            left, back = min(moments.starts[gone], moments.turn), max(moments.starts[asked], moments.turn)
            made = moments.starts[first_op + names[name]]
            found.append(Idle(layer, name, item, again.get(name), made, left, back, (gone, asked)))
    return found


def under(idle: Sequence[Idle], out: float, back: float) -> list[Idle]:
    """The first of ``idle`` whose copies take no more than ``out`` seconds on their way, and ``back`` on their way
    back."""
    sums = zip(
        accumulate(one.kept.out_seconds for one in idle), accumulate(one.kept.back_seconds for one in idle), strict=True
    )
    fitting = takewhile(lambda pair: pair[0] <= out and pair[1] <= back, sums)
    return list(idle[: sum(1 for _ in fitting)])
