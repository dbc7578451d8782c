"""``ppaware``: what one stage of a pipeline gives up: as much is offloaded as hides, and what is cheap runs again.

Yuan, Liu, Ye, Zhang, Tan, Chen, Song and Zhang (Kuaishou), "Accelerating the training of large language models using
efficient activation rematerialization and optimal hybrid parallelism", USENIX ATC 2024. Pipeline-parallel-aware
offloading: with one forward and one backward in turn, stage p of P holds activations of P - p micro-batches, so earlier
stages offload more, each as large a share as the link moves while the stage computes. Compute-memory balanced
checkpointing: of what is left the tensors run again that spare the most bytes for an operation (norms, activation
functions), and products stay. O(n log n) in tensors.

This is a stage by itself, whose one micro-batch is offloaded under the forward and comes back under the backward; all
stages of a pipeline are in ``planners.parallel.ppaware_pipeline``. Ours departs in three things. The fewest tensors are
given up that the budget asks for, where the paper's shares are parameters of a search that also chooses the degrees of
parallelism. What is offloaded are whole tensors, those that would take the most to make again a byte, where the paper
cuts each layer's at a share. And what costs operations is said by the trace, which counts those of products alone:
among the others the least seconds a byte decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from forebay.planners.activations.literature.capuchin import leanest
from forebay.planners.activations.literature.mixing import Move, as_many_as_need_be
from forebay.planners.activations.literature.moments import Idle, Moments, idle_of, under
from forebay.planners.activations.literature.placing import Answer, Room, placed
from forebay.planners.bench import Bench
from forebay.planners.problem import Problem
from forebay.plans import Plan

__all__ = ["balanced", "ppaware"]


def ppaware(problem: Problem, bench: Bench | None = None) -> Plan:
    """Raises ``DoesNotFit``, and ``ConfigError`` without a batch."""
    return placed(bench or Bench(problem), "ppaware", "when each tensor is used", _decide, leanest)


def _decide(room: Room) -> Answer | None:
    idle, moments = idle_of(room.bench, room.layers), Moments.of(room.bench)
    return as_many_as_need_be(room, balanced(idle, *moments.passes))


def balanced(idle: Sequence[Idle], out: float, back: float) -> list[Move]:
    """All that can be done, in the order in which it is: what the link hides in ``out`` seconds on its way and
    ``back`` on its way back, the dearest to make again first; then what runs again, the cheapest first; then the rest
    of what can be offloaded."""
    dearest = sorted((one for one in idle if one.movable), key=_price, reverse=True)
    hidden = under(dearest, out, back)
    taken = {(one.layer.name, one.name) for one in hidden}
    left = [one for one in sorted(idle, key=_price) if (one.layer.name, one.name) not in taken]
    again = [one for one in left if one.rerun_seconds is not None]
    rest = [one for one in left if one.rerun_seconds is None and one.movable]
    return [
        *(Move(one, again=False) for one in hidden),
        *(Move(one, again=True) for one in again),
        *(Move(one, again=False) for one in rest),
    ]


def _price(one: Idle) -> tuple[float, float]:
    """Operations a byte that it takes to make it again, and seconds; infinite where it cannot be."""
    seconds = one.rerun_seconds
    if seconds is None:
        return inf, inf
    graph, nbytes = one.layer.graph, max(1, one.nbytes)
    return graph.nodes[graph.places[one.name]].flops / nbytes, seconds / nbytes
