"""``harmony`` and ``mobius`` over several devices: more stages than devices, each swapped for all micro-batches.

Harmony (Li et al., VLDB 2022): packs of layers are tasks, bound to devices one after the other and wrapped around them;
a pack runs for the whole group of micro-batches while it is there, and is updated as soon as its gradients are. Mobius
(Feng et al., ASPLOS 2023): the same pipeline, with stages mapped such that those that follow each other do not share a
root complex. Both keep everything at home on the host, hand on what a stage makes by way of it, and run a stage again
for its backward. ``simulation.swapping.wrapped`` plays it.

Both search how many stages there are: here some multiples of the devices, as far as two stages have room on one;
all are even in their forwards, where Harmony searches packs of other sizes and Mobius solves an integer programme. How
many micro-batches pass together is the user's to say. Ours differ in their mapping alone: updates overlap with backward
and the next forward in both. O(stages * micro-batches) actions are played for each number of stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from forebay.errors import DoesNotFit
from forebay.memory import Tier
from forebay.planners.parallel.bench import ServerBench
from forebay.planners.parallel.mapping import crossed, in_order
from forebay.servers import DeviceShare, Server, ServerPlan
from forebay.simulation.stages import Stage
from forebay.simulation.swapping import wrapped

__all__ = ["harmony", "mobius", "stage_counts"]

TURNS: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Stages of a device that are tried."""

Mapping = Callable[[Server, int], tuple[int, ...]]


def harmony(bench: ServerBench) -> ServerPlan:
    """Raises ``DoesNotFit``, and ``CannotServe`` for fewer blocks than devices."""
    return _fastest(bench, "harmony", in_order)


def mobius(bench: ServerBench) -> ServerPlan:
    """Raises ``DoesNotFit``, and ``CannotServe`` for fewer blocks than devices."""
    return _fastest(bench, "mobius", crossed)


def stage_counts(blocks: int, devices: int) -> Iterator[int]:
    """Numbers of stages that are tried for so many blocks."""
    return (turns * devices for turns in TURNS if turns * devices <= blocks)


def _fastest(bench: ServerBench, policy: str, mapping: Mapping) -> ServerPlan:
    bench.stages(policy, bench.server.devices)  # or say that there are too few blocks
    found, needs, refusals = list[ServerPlan](), list[int](), list[DoesNotFit]()
    for count in stage_counts(len(bench.layers), bench.server.devices):
        stages = bench.stages(policy, count)
        needs.append(max(_needs(bench, stages)))
        if needs[-1] <= bench.limit:
            try:
                found.append(_played(bench, policy, stages, mapping(bench.server, count)))
            except DoesNotFit as refusal:
                refusals.append(refusal)
    if not found and refusals:
        raise min(refusals, key=lambda refusal: refusal.needed)
    if not found:
        raise bench.refusal(policy, Tier.DEVICE, min(needs), bench.limit, "for two stages, and a pass of one")
    return min(found, key=lambda plan: plan.step_seconds)


def _needs(bench: ServerBench, stages: Sequence[Stage]) -> list[int]:
    """Bytes on the device while each stage computes: itself, another one that comes, its gradients, and all that one
    micro-batch saves in it."""
    two = 2 * max(stage.parameters for stage in stages) + bench.beside
    before = (None, *stages)
    return [
        two + stage.gradients + bench.saved(stage, other) + bench.passing(stage)
        for other, stage in zip(before, stages, strict=False)
    ]


def _played(bench: ServerBench, policy: str, stages: Sequence[Stage], placed: Sequence[int]) -> ServerPlan:
    count, devices = bench.micro_batches, bench.server.devices
    # Inputs of all stages wait for backward, and of one of them the gradients of what it has made.
    handed = [stage.handed for stage in stages[:-1]]
    host = bench.host_states() + count * (sum(handed) + max(handed, default=0))
    bench.expect_host(policy, host)
    played = wrapped(stages, bench.costs, bench.server, placed, count)
    needs = _needs(bench, stages)
    shares = []
    for device in range(devices):
        own = [place for place, on in enumerate(placed) if on == device]
        seconds = count * sum(stages[place].forward + stages[place].backward for place in own)
        blocks = sum(len(stages[place].blocks) for place in own)
        shares.append(DeviceShare(blocks, seconds, max(needs[place] for place in own)))
    said = f"{len(stages)} stages, {len(stages) // devices} on each device in turn, each for {count} micro-batches"
    return ServerPlan(policy, max(played.step_seconds), tuple(shares), host, played.moved_a_step, (said,))
