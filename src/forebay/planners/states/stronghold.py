"""``stronghold``: a window of layers moves over the model, as small as hides every transfer under compute.

Sun et al., "STRONGHOLD: fast and affordable billion-scale deep learning model training", SC 2022. Layers enter the
window from the host ahead of their use and leave it afterwards; gradients leave in backward and the host updates layers
concurrently, while backward goes on. The first and last layers (embedding, head) stay on the device. The window's size
is worked out from a profile of the first iterations: the least for which the fetch of the layer that enters takes no
longer than the computation of the layers that are in the window, in forward and in backward, and for which gradients
leave as fast; and no more than there is memory for.

With m layers in the window, layer i + m - 1 begins to come when layer i begins to compute, and the link brings one
after the other, so that it is there at a(i + m - 1) = max(a(i + m - 2), start(i)) + bytes / bandwidth. The inequality
is a(j) <= start(j) for every layer j behind the first m - 1; in backward the same in the other order. Gradients: that
of layer i has left before the layer m - 1 further on is done. Where the paper compares layer by layer, this one adds up
what the link is behind: a long model needs more than one layer to be fetched in time.

Ours departs in that the window is counted in blocks, in that an update under backward goes into a second copy (see
``l2l``) and only where the step is faster for it, and in that one stream of computation is planned for, where the paper
runs several micro-batches beside each other when a layer leaves room on the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from forebay.machine import Machine
from forebay.model import Block, Model
from forebay.planners.bench import Bench
from forebay.planners.parts import HOSTED, Draft, Level, repeated_size
from forebay.planners.problem import Problem
from forebay.planners.shapes import Home, around, wide
from forebay.planners.speculation import ahead
from forebay.planners.states.drafting import (
    as_much_stays,
    expect_trace,
    finished,
    levels,
    on_device,
    on_host,
)
from forebay.plans import Plan
from forebay.simulation import Costs
from forebay.trace import Phase

__all__ = ["LEAST", "Use", "stronghold", "uses", "window"]

LEAST: Final = 2
"""Layers in the smallest window: one computes, one comes."""

ROUNDING: Final = 1e-9
"""Seconds, as a share of a step, by which sums in another order may differ."""


def stronghold(problem: Problem, bench: Bench | None = None) -> Plan:
    """Streams through the smallest window that hides its transfers, or the largest that fits. Raises ``DoesNotFit``,
    and ``ConfigError`` without a batch."""
    bench = bench or Bench(problem)
    expect_trace(bench, "stronghold", "the seconds of every layer")
    ends, level = _where_ends_stay(bench)
    draft = _shape(bench, ends, LEAST, level)
    moving = bench.streamed(draft)
    wanted = window(uses(bench.costs, level), moving, bench.costs.machine)
    most = len(moving) if wanted is None else wanted
    shapes = ((layers, _shape(bench, ends, layers, level)) for layers in range(most, LEAST, -1))
    layers, draft = next((one for one in shapes if bench.fits_device(one[1])), (LEAST, draft))
    draft = wide(bench, draft, (layers - 1) * max((block.gradient_nbytes for block in moving), default=0))
    draft = ahead(bench, on_host(bench, draft, "stronghold"))
    return finished(bench, "stronghold", draft, *_said(min(layers, len(moving)), wanted))


@dataclass(frozen=True)
class Use:
    """One run of a block: when its computation starts and ends, in seconds, where nothing ever has to wait."""

    block: str
    phase: Phase
    start: float
    end: float


def uses(costs: Costs, level: Level) -> tuple[Use, ...]:
    """Every run of a block in a step, in order; backward of a block that ``level`` recomputes has its forward before
    it."""
    trace, clock, found, again = costs.trace, 0.0, list[Use](), dict[str, float]()
    for visit in trace.visits:
        segment = trace.segments[visit.segment]
        end = clock + costs.ops(visit.first_op, visit.first_op + len(segment.ops))
        if visit.phase is Phase.BACKWARD:
            end += again.pop(visit.block, 0.0)
        elif visit.block in level.recompute:
            again[visit.block] = costs.ops(visit.first_op, visit.first_op + max(0, segment.saves_until))
        if found and (found[-1].block, found[-1].phase) == (visit.block, visit.phase):
            found[-1] = replace(found[-1], end=end)
        else:
            found.append(Use(visit.block, visit.phase, clock, end))
        clock = end
    return tuple(found)


def window(runs: Sequence[Use], moving: Sequence[Block], machine: Machine) -> int | None:
    """The fewest of the blocks ``moving`` in the window with which no transfer is late; None if some are late even with
    all of them."""
    blocks = {block.name: block for block in moving}
    late = ROUNDING * (runs[-1].end if runs else 0.0)
    phases = [[run for run in runs if run.phase is phase and run.block in blocks] for phase in Phase]
    for layers in range(LEAST, 1 + len(moving)):
        if all(_in_time(turn, blocks, machine, layers - 1, late) for turn in phases):
            return layers
    return None


def _in_time(turn: Sequence[Use], blocks: Mapping[str, Block], machine: Machine, ahead: int, late: float) -> bool:
    """Whether what is fetched so many layers ``ahead`` arrives before its layer computes and, in backward, gradients
    have left before the layer is done that is so many further on."""
    # Only in backward both directions are busy.
    share = machine.duplex if turn and turn[0].phase is Phase.BACKWARD else 1.0
    arrived = left = 0.0
    for here, there in zip(turn, turn[ahead:], strict=False):
        arrived = max(arrived, here.start) + machine.h2d.seconds(blocks[there.block].nbytes) / share
        if arrived > there.start + late:
            return False
        if here.phase is Phase.BACKWARD:
            left = max(left, here.end) + machine.d2h.seconds(blocks[here.block].gradient_nbytes) / share
            if left > there.end + late:
                return False
    return True


def _where_ends_stay(bench: Bench) -> tuple[Home, Level]:
    """How much of the blocks that are no layers stays beside the smallest window (``as_much_stays``). Raises
    ``DoesNotFit``."""
    stays = as_much_stays(bench, _ends(bench.model), LEAST)
    if stays is not None:
        return stays
    draft = _shape(bench, HOSTED, LEAST, levels(bench)[-1])
    keeps = f"keeps a window of {LEAST} layers on the device beside the activations of a step"
    raise on_device(bench, draft, "stronghold", keeps)


def _shape(bench: Bench, ends: Home, layers: int, level: Level) -> Draft:
    """A window of so many layers, with all that is no layer at ``ends``, and no window for gradients."""
    draft = around(bench, _ends(bench.model), ends, layers, level)
    return replace(draft, streaming=replace(draft.streaming, prefetch_distance=layers - 1))


def _ends(model: Model) -> list[Block]:
    """Blocks that are no layers: larger than the repeated ones (an embedding, a head), or in use throughout."""
    layers = [block for block in model.blocks if not block.held]
    repeated = repeated_size(layers) if layers else 0
    return [block for block in model.blocks if block.held or block.nbytes > repeated]


def _said(layers: int, wanted: int | None) -> tuple[str, ...]:
    """The window in words."""
    if not layers:
        return ()
    window = f"a window of {layers} layers"
    if wanted is None:
        return (f"{window}, as many as fit: no window hides every transfer under compute",)
    if layers < wanted:
        return (f"{window}, as many as fit: {wanted} would hide every transfer under compute",)
    return (f"{window}, the fewest that hide every transfer under compute",)
