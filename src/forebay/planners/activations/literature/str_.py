"""``str``: swap what hides, make the rest again, each choice made anew in the light of those before it.

Zong, Lin, Lin, Wen and Sun, "STR: hybrid tensor re-generation to break memory wall for DNN training", TPDS 2023. A
cost model of the overlap of copies and computation prices both ways of bringing a tensor back; a search over the graph
takes one at a time, and the costs of the others are worked out again: what a swap hides under depends on which copies
there are already. Tensors whose swap is hidden are swapped, the others are made again along the cheapest path, or
swapped where that is cheaper. Costs only grow with what is chosen, so a heap does: O(n log n) in tensors but for those
whose cost has grown.

Ours departs in two things. The seconds of a swap are those that the link is behind with it, in both directions: the
link takes one copy after the other, out by forward and back by backward (``moments``). And a block runs again once and
as a whole, so that the cheapest path to a tensor is its own op.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from math import inf

from forebay.planners.activations.literature.capuchin import leanest
from forebay.planners.activations.literature.mixing import Move, as_many_as_need_be
from forebay.planners.activations.literature.moments import Idle, Moments, idle_of
from forebay.planners.activations.literature.placing import Answer, Room, placed
from forebay.planners.bench import Bench
from forebay.planners.problem import Problem
from forebay.plans import Plan

__all__ = ["in_turn", "str_"]


def str_(problem: Problem, bench: Bench | None = None) -> Plan:
    """Raises ``DoesNotFit``, and ``ConfigError`` without a batch."""
    return placed(bench or Bench(problem), "str", "when each tensor is used", _decide, leanest)


def _decide(room: Room) -> Answer | None:
    idle, moments = idle_of(room.bench, room.layers), Moments.of(room.bench)
    return as_many_as_need_be(room, in_turn(idle, moments))


def in_turn(idle: Sequence[Idle], moments: Moments) -> list[Move]:
    """All that can be done, each choice the cheapest a byte given those before it: the seconds that a swap adds are
    those by which its direction of the link becomes behind.

    Of tensors that cost alike the one that is made first comes first: it has the most time, and its backward is last.
    """
    free = list(moments.passes)
    waiting = [(_a_byte(one, free), place) for place, one in enumerate(idle) if _a_byte(one, free) < inf]
    heapify(waiting)
    found = []
    while waiting:
        cost, place = heappop(waiting)
        best = idle[place]
        if _a_byte(best, free) > cost:
            heappush(waiting, (_a_byte(best, free), place))
            continue
        _, again = _cheapest(best, free)
        if not again:
            free[0] -= best.kept.out_seconds
            free[1] -= best.kept.back_seconds
        found.append(Move(best, again=again))
    return found


def _a_byte(one: Idle, free: Sequence[float]) -> float:
    return _cheapest(one, free)[0] / max(1, one.nbytes)


def _cheapest(one: Idle, free: Sequence[float]) -> tuple[float, bool]:
    """Seconds that it adds, made again or not, with ``free`` seconds of the link's two directions left."""
    swap = inf
    if one.movable:
        behind = (one.kept.out_seconds - max(0.0, free[0]), one.kept.back_seconds - max(0.0, free[1]))
        swap = max(0.0, -one.free) + sum(max(0.0, seconds) for seconds in behind)
    again = one.rerun_seconds
    return (swap, False) if again is None or swap < again else (again, True)
