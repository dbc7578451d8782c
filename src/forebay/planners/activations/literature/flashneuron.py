"""``flashneuron``: tensors go to the disk in the order in which they are made, as many as need be.

Bae, Lee, Jin, Son, Kim, Jang, Ham and Lee, "FlashNeuron: SSD-enabled large-batch training of very deep neural
networks", FAST 2021, section 3.2. An iteration with everything offloaded gives times and sizes. Linear tensor
selection: tensors are taken from the first on, in the order of the forward, until what is left fits; the first ones lie
idle the longest. Where the writes of those take longer than the forward, ``sum of bytes / write bandwidth > T``,
tensors that compress well take their place until the writes hide. They come back a few at a time ahead of backward.
O(log n) looks at what fits.

Ours departs in three things. Nothing is compressed: half precision changes the numbers, and how sparse a tensor is no
trace says. So writes that do not hide make the step longer, which the plan says. Without a disk in the budget the host
takes the disk's place. And copies pass through a ring on the host, where the paper's go from the GPU to the drive.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from forebay.memory import Tier
from forebay.planners.activations.literature.layers import every_moved
from forebay.planners.activations.literature.mixing import Move, as_many_as_need_be
from forebay.planners.activations.literature.moments import Moments, idle_of
from forebay.planners.activations.literature.placing import Answer, Room, placed
from forebay.planners.bench import Bench
from forebay.planners.homes import all_activations_on_disk
from forebay.planners.problem import Problem
from forebay.plans import Plan

__all__ = ["flashneuron"]


def flashneuron(problem: Problem, bench: Bench | None = None) -> Plan:
    """Raises ``DoesNotFit``, and ``ConfigError`` without a batch."""
    bench = bench or Bench(problem)
    on_disk = partial(all_activations_on_disk, bench) if problem.limit(Tier.DISK) else None
    return placed(bench, "flashneuron", "what is made when", _decide, every_moved, then=on_disk)


def _decide(room: Room) -> Answer | None:
    moves = [Move(one, again=False) for one in idle_of(room.bench, room.layers) if one.movable]
    answer = as_many_as_need_be(room, moves)
    if answer is None:
        return None
    return replace(answer, said=(*answer.said, _hiding(room.bench, answer.level.moved)))


def _hiding(bench: Bench, nbytes: int) -> str:
    """Whether the writes hide under the forward."""
    machine = bench.costs.machine
    to_disk = machine.disk is not None and bench.problem.limit(Tier.DISK)
    rate = machine.disk.write.curve.best if machine.disk is not None and to_disk else machine.leaving.curve.best
    turn = Moments.of(bench).turn
    if not nbytes:
        return "nothing is written: everything fits"
    return f"writing takes {nbytes / rate / turn:.0%} of the time of the forward"
