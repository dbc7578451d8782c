"""``capuchin``: swap what lies idle for long enough, then swap or make again, whichever costs less a byte.

Peng, Shi, Dai, Jin, Ma, Xiong, Yang and Qian, "Capuchin: tensor-based GPU memory management for deep learning", ASPLOS
2020, section 4. A measured first iteration gives every tensor's accesses. ``FT = time of the back-access - time to swap
in - end of the swap out`` is its free time; tensors are swapped by the largest ``FT`` first for as long as it is not
below 0. What is still needed comes from a hybrid: of each tensor that is left the exposed seconds of its swap are set
against those of making it again, the cheaper one is taken, and tensors are taken by ``MSPS``, bytes spared a second of
computation, the largest first. O(n log n) in tensors.

Ours departs in four things. The accesses are those of the trace and their times those of its costs, with nothing
waiting: no iteration is run for it. The link takes one copy after the other, so that swaps are hidden only until all
copies of a direction fill the pass that they run under. What is made again is made once, with its whole block: the
paper's rules for tensors that are made from others that are not there have nothing to decide, and a tensor's seconds
are those of its op. And the point at which a swap in begins is the runtime's to find (as far ahead as there is room),
where the paper moves it by feedback.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from forebay.planners.activations.literature.layers import Choice, Layer, all_again, all_moved
from forebay.planners.activations.literature.mixing import Move, as_many_as_need_be
from forebay.planners.activations.literature.moments import Idle, Moments, idle_of, under
from forebay.planners.activations.literature.placing import Answer, Room, placed
from forebay.planners.bench import Bench
from forebay.planners.problem import Problem
from forebay.plans import Plan

__all__ = ["capuchin", "exposed", "leanest", "ranked"]


def capuchin(problem: Problem, bench: Bench | None = None) -> Plan:
    """Raises ``DoesNotFit``, and ``ConfigError`` without a batch."""
    return placed(bench or Bench(problem), "capuchin", "when each tensor is used", _decide, leanest)


def _decide(room: Room) -> Answer | None:
    idle, moments = idle_of(room.bench, room.layers), Moments.of(room.bench)
    return as_many_as_need_be(room, ranked(idle, moments))


def leanest(layers: tuple[Layer, ...]) -> Choice:
    """Blocks that may run again do, the others move what they can."""
    return {layer.name: all_again(layer) if layer.may_rerun else all_moved(layer) for layer in layers}


def exposed(one: Idle) -> float:
    """Seconds of a swap that nothing hides: all of it where the link has no time left for it."""
    return max(-one.free, one.kept.link_seconds) if one.movable else inf


def ranked(idle: Sequence[Idle], moments: Moments) -> list[Move]:
    """All that can be done, in the order in which it is."""
    # Those whose swap costs nothing, until the copies of one direction fill its pass.
    free = sorted((one for one in idle if one.movable and one.free >= 0), key=lambda one: -one.free)
    first = under(free, *moments.passes)
    taken = {(one.layer.name, one.name) for one in first}
    rest = [(_spared_a_second(one), one) for one in idle if (one.layer.name, one.name) not in taken]
    rest = sorted((pair for pair in rest if pair[0] > 0), key=lambda pair: -pair[0])
    swaps = [Move(one, again=False) for one in first]
    return swaps + [Move(one, again=_is_made_again(one)) for _, one in rest]


def _is_made_again(one: Idle) -> bool:
    again = one.rerun_seconds
    return again is not None and again <= exposed(one)


def _spared_a_second(one: Idle) -> float:
    """Bytes that are spared for a second that is lost; 0 where nothing can be done."""
    again = one.rerun_seconds
    seconds = min(inf if again is None else again, exposed(one))
    if seconds == inf:
        return 0.0
    return one.nbytes / seconds if seconds else inf
