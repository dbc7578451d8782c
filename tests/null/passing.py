"""Plans whose blocks are updated in backward. No torch."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from forebay.arenas import arenas_of, gradient_nbytes
from forebay.lowering.liveness import Liveness, device_bound
from forebay.memory import Tier
from forebay.planners.in_backward import Usable
from forebay.plans import Plan, Update
from forebay.trace import Trace
from tests.null.synthetic import block
from tests.null.tracing import Layer, chain_trace
from tests.null.updating import updating

__all__ = ["passing", "read_late", "run_late"]


def passing(trace: Trace, plan: Plan, slots: int = 2, names: Collection[str] | None = None) -> Plan:
    """``plan`` in which ``names`` (None: all that may be, and train) are updated in backward, through ``slots`` slots
    for gradients of the largest of those that do not stay on the device, with budgets of as many times what it needs as
    before."""
    able = Usable.of(Liveness(trace))
    chosen = [p for p in plan.placements if (able.admits(p) if names is None else p.block in names)]
    chosen = [p for p in chosen if trace.model.block(p.block).gradient_nbytes]
    if not chosen:
        return plan
    leaving = [gradient_nbytes(trace.model.block(p.block)) for p in chosen if not p.resident]
    streaming = replace(plan.streaming, gradient_slots=(max(leaving),) * slots if leaving else ())
    made = updating(plan, Update.BACKWARD, [p.block for p in chosen], streaming=streaming)
    sizes = arenas_of(trace.model, made, trace.state_names)
    pinned = plan.pinned and sum(nbytes for _, nbytes in sizes.pinnable)
    limits = {Tier.HOST: 1 << 50, Tier.PINNED: (1 << 50) if plan.budget.pinned else None}
    budget = replace(plan.budget, host=limits[Tier.HOST], pinned=limits[Tier.PINNED])
    device = device_bound(trace, made)
    return replace(made, budget=budget, device=device, host=sizes.host, disk=sizes.disk, pinned=pinned)


def read_late() -> Trace:
    """Backward reads what is frozen of block ``a`` after it has made all gradients of the block."""
    return _frozen_first(Layer("b", (64,), 0, 64))


def run_late() -> Trace:
    """So does what runs again of block ``a`` if that is recomputed; backward itself does not."""
    return _frozen_first()


def _frozen_first(*before: Layer) -> Trace:
    """Layers ``before``, one that reads what is frozen of block ``a``, one of ``b``, and one that trains ``a``."""
    parts = [block("a", ((32, 32), "float32", True), ((32, 32), "float32", False)), block("b", ((8,), "float32", True))]
    order = [*before, Layer("a", (2048,), 0, 1024, (1,)), Layer("b", (64,), 0, 64), Layer("a", (64,), 0, 64, (0,))]
    return chain_trace(parts, order)
