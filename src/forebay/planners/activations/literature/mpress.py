"""``mpress``: what one stage of a pipeline gives up: tensors that lie idle for long are swapped, the rest runs again.

Zhou, Wang, Yu, Li, Bai, Yan and Xu, "MPress: democratizing billion-scale model training on multi-GPU servers via
memory-saving inter-operator parallelism", HPCA 2023. In a pipeline the first devices hold activations of the most
micro-batches, and the last ones have room to spare. Tensors go to those over links between devices (D2D swap, in
stripes over several of them), the ones that live longest first; what there is no room for there is swapped to the host
where that hides, or runs again. A planner begins with one assignment, has an emulator play it, and tries others while
the step becomes faster. O(n log n) in tensors, and a simulation for each assignment that is tried.

This is a stage that has no other device: swaps to the host in place of those to devices. The whole of it, over several,
is in ``planners.parallel.mpress_pipeline``. Ours departs in two things. The emulator is asked about two assignments,
and not for as long as it gains: nothing is swapped while anything can run again, or what hides is, the tensors that lie
idle for longest first. And what runs again does so once, with its whole block; the cheapest a byte comes first.
"""

from __future__ import annotations

from collections.abc import Sequence

from forebay.planners.activations.literature.capuchin import leanest
from forebay.planners.activations.literature.mixing import Move, as_many_as_need_be
from forebay.planners.activations.literature.moments import Idle, Moments, idle_of, under
from forebay.planners.activations.literature.placing import Answer, Room, placed
from forebay.planners.bench import Bench
from forebay.planners.problem import Problem
from forebay.plans import Plan

__all__ = ["by_idleness", "mpress", "run_again", "with_swapped"]


def mpress(problem: Problem, bench: Bench | None = None) -> Plan:
    """Raises ``DoesNotFit``, and ``ConfigError`` without a batch."""
    return placed(bench or Bench(problem), "mpress", "how long each tensor lies idle", _decide, leanest)


def _decide(room: Room) -> Answer | None:
    idle, moments = idle_of(room.bench, room.layers), Moments.of(room.bench)
    waiting = [one for one in by_idleness(idle) if one.free >= 0]
    hidden = under(waiting, *moments.passes)
    found = [as_many_as_need_be(room, with_swapped(idle, swapped)) for swapped in dict.fromkeys((tuple(hidden), ()))]
    answers = [answer for answer in found if answer is not None]
    return min(answers, key=lambda answer: room.seconds(answer.level), default=None)


def by_idleness(idle: Sequence[Idle]) -> list[Idle]:
    """Those that can be swapped, the longest idle first."""
    return sorted((one for one in idle if one.movable), key=lambda one: one.left - one.asked)


def run_again(idle: Sequence[Idle]) -> list[Idle]:
    """Those that can be made again, the cheapest a byte first."""
    able = [(one.rerun_seconds, one) for one in idle]
    known = [(seconds / max(1, one.nbytes), place) for place, (seconds, one) in enumerate(able) if seconds is not None]
    return [idle[place] for _, place in sorted(known)]


def with_swapped(idle: Sequence[Idle], swapped: Sequence[Idle]) -> list[Move]:
    """``swapped`` first, then what runs again, then what is left."""
    taken = {(one.layer.name, one.name) for one in swapped}
    again = [one for one in run_again(idle) if (one.layer.name, one.name) not in taken]
    taken |= {(one.layer.name, one.name) for one in again}
    rest = [one for one in by_idleness(idle) if (one.layer.name, one.name) not in taken]
    return [
        *(Move(one, again=False) for one in swapped),
        *(Move(one, again=True) for one in again),
        *(Move(one, again=False) for one in rest),
    ]
