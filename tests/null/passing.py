"""Plans whose blocks are updated in backward. No torch."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from forebay.arenas import arenas_of, gradient_nbytes
from forebay.lowering.liveness import Liveness
from forebay.memory import Tier
from forebay.planners.in_backward import usable
from forebay.plans import Plan, Update
from forebay.trace import Trace
from tests.null.updating import updating

__all__ = ["passing"]


def passing(trace: Trace, plan: Plan, slots: int = 2, names: Collection[str] | None = None) -> Plan:
    """``plan`` in which ``names`` (None: all that may be, and train) are updated in backward, through ``slots`` slots
    for gradients of the largest, with budgets of as many times what it needs as before."""
    able = usable(Liveness(trace)) if names is None else names
    chosen = tuple(p.block for p in plan.placements if not p.resident and p.block in able)
    if not chosen:
        return plan
    largest = max(gradient_nbytes(trace.model.block(name)) for name in chosen)
    streaming = replace(plan.streaming, gradient_slots=(largest,) * slots)
    made = updating(plan, Update.BACKWARD, chosen, streaming=streaming)
    sizes = arenas_of(trace.model, made, trace.state_names)
    pinned = plan.pinned and sum(nbytes for _, nbytes in sizes.pinnable)
    limits = {Tier.HOST: 1 << 50, Tier.PINNED: (1 << 50) if plan.budget.pinned else None}
    budget = replace(plan.budget, host=limits[Tier.HOST], pinned=limits[Tier.PINNED])
    return replace(made, budget=budget, host=sizes.host, disk=sizes.disk, pinned=pinned)
