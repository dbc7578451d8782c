"""Blocks that have to stay on the device, whatever the budget, and parameters that are looked after because they do
not."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from forebay.errors import CannotServe
from forebay.model import Parameter
from forebay.planners.bench import Bench
from forebay.planners.nearest import AUTO, all_on_device
from forebay.planners.parts import KEPT, Level
from forebay.plans import Plan
from forebay.trace import Trace
from forebay.units import KiB

__all__ = ["expect_there", "watched"]

MOST_WRITTEN = 64 * KiB
"""Bytes of a parameter that a forward may write to while it streams: a copy is kept beside it meanwhile, of which no
plan knows."""


def expect_there(bench: Bench, plan: Plan) -> None:
    """Raises ``CannotServe`` for a plan under which a block streams that has to stay on the device, whatever the
    budget: one that the model's own checkpoint reads itself in backward, where nothing says that the block is needed
    (``Trace.read_in_backward``), and one of which the forward writes to more than can be looked after
    (``Plan.written``)."""
    trace = bench.problem.trace
    if trace is None:
        return
    away = [p.block for p in plan.placements if not p.resident]
    read = next((name for name in away if name in trace.read_in_backward), "")
    written = next((p.name for p in _written(trace, away) if p.nbytes > MOST_WRITTEN), "")
    if not read and not written:
        return
    levels = (KEPT, Level(bench.recomputable)) if plan.planner == AUTO else ()
    (remedy,) = all_on_device(bench, levels)
    why = (
        f"a checkpoint of the model's own reads parameters of {read} in backward, and nothing says when to bring "
        f"them: it is around a function that reads them itself, outside of their module's forward; call the module "
        f"inside it, take it out of the model (a plan recomputes where it gains by it), or give {remedy.words}"
        if read
        else f"the forward writes to parameter {written} (max_norm of an embedding, weight.data = ...), which would be "
        f"lost where it is on the device for a forward alone; change it between steps, with "
        f"model.load_state_dict(values, strict=False), or give {remedy.words}"
    )
    raise CannotServe(why, nearest=(remedy,))


def watched(bench: Bench, plan: Plan) -> Plan:
    """``plan`` with the parameters that the forward writes to while they stream (``Plan.written``)."""
    trace = bench.problem.trace
    if trace is None or not trace.written:
        return plan
    away = [p.block for p in plan.placements if not p.resident]
    return replace(plan, written=tuple(p.name for p in _written(trace, away)))


def _written(trace: Trace, away: Collection[str]) -> list[Parameter]:
    """The parameters of blocks ``away`` that the forward writes to."""
    blocks = [block for block in trace.model.blocks if block.name in away]
    return [p for block in blocks for p in block.parameters if p.name in trace.written]
