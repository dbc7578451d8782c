"""``mobius``: a pipeline whose stages are swapped, each for all micro-batches, with what comes next on its way.

Feng, Xie, Tian, Wang, Lu and Shu, "Mobius: fine tuning large-scale models on commodity GPU servers", ASPLOS 2023. A
model is cut into more stages than there are GPUs, and all of them are in host memory. A stage is brought to its GPU,
runs for every micro-batch, and makes room for the next one of that GPU, which is prefetched under compute into memory
that is set aside for it; the last stages stay for the backward that begins with them. What goes between stages waits on
the host, the rest is made again in backward, and gradients leave to the host, where the optimizer is. How many layers a
stage has is decided by an integer programme over the time of a step, and stages are mapped to GPUs such that those that
share a root complex do not swap at the same time (cross mapping).

Ours departs in five things. One device: there is nothing to map; several are simulated (``planners.parallel.wrapped``).
All micro-batches pass a block, not a stage of several, before the next one computes, so the programme is over the room
alone: how many layers are on the device, all but one of them prefetched: two, four, eight or sixteen, as far as they
fit with all micro-batches; each is simulated and the fastest taken. What goes between stages stays on the device where
that is faster and there is room. The update is over before the next forward begins, as with the optimizer on the host
that the paper builds on (``zero-offload``). What the host has no room for goes to disk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from forebay.planners.bench import Bench
from forebay.planners.parts import Draft, Level
from forebay.planners.problem import Problem
from forebay.planners.states.drafting import finished, serial
from forebay.planners.states.grouping import grouped, through_each
from forebay.plans import Plan

__all__ = ["mobius"]

LEAST: Final = 2
"""Layers on the device at least, where there is room: one computes, one comes."""

TRIES: Final = 4
"""Numbers of layers on the device that are tried, each about twice the one before."""


def mobius(problem: Problem, bench: Bench | None = None) -> Plan:
    """The fastest step of all micro-batches, over the number of layers on the device. Raises ``DoesNotFit``,
    ``CannotServe`` for a step of one micro-batch, and ``ConfigError`` without a batch."""
    bench = bench or Bench(problem)
    best = grouped(bench, "mobius", _drafts)
    ahead = best.streaming.prefetch_distance
    said = f"each layer comes once in forward and once in backward for all {problem.micro_batches} micro-batches"
    return finished(bench, "mobius", best, f"{said}, up to {ahead} layers ahead")


def _drafts(bench: Bench, levels: Sequence[Level]) -> Iterator[Draft]:
    return map(serial, through_each(bench, levels, _stages(bench)))


def _stages(bench: Bench) -> list[tuple[int, ...]]:
    """Slots for more and more layers, the least that is enough among them."""
    most = len(bench.model.blocks)
    counts = dict.fromkeys(min(most, LEAST << power) for power in range(TRIES))
    least = bench.slot_options(LEAST)
    return list(dict.fromkeys((least[-1], *(bench.slot_options(count)[0] for count in counts))))
