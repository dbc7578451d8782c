"""Plans whose blocks are updated beside the storage, where their states are. No torch."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from hypothesis import strategies as st

from forebay.arenas import arenas_of
from forebay.layout import has_residual
from forebay.memory import Tier
from forebay.plans import Plan, Update
from forebay.trace import Trace
from tests.null.on_device import cases_on_device
from tests.null.strategies import Case
from tests.null.updating import updating

__all__ = ["at_storage", "cases_at_storage"]


def at_storage(trace: Trace, plan: Plan, names: Collection[str] | None = None, density: float | None = None) -> Plan:
    """``plan`` in which ``names`` (None: all blocks that may be) are updated beside the storage, and nowhere else;
    ``density`` is the share of the elements of gradients that goes there, if any does."""
    beside = [p.block for p in plan.placements if p.states is Tier.DISK and (names is None or p.block in names)]
    plan = updating(plan, Update.STORAGE, beside)
    if beside and density is not None:
        said = (*plan.changes_numbers, "gradients go in part")
        plan = replace(plan, streaming=replace(plan.streaming, gradient_density=density), changes_numbers=said)
    sizes = arenas_of(trace.model, plan, trace.state_names)
    # A budget may be what the plan of before took, to the byte: cells and residuals can be more than states at home.
    host = None if plan.budget.host is None else max(plan.budget.host, sizes.host)
    return replace(plan, budget=replace(plan.budget, host=host), host=sizes.host, disk=sizes.disk)


@st.composite
def cases_at_storage(draw: st.DrawFn) -> Case:
    """A case of ``cases_on_device`` in which any of the blocks with states on disk are updated beside the storage."""
    case = draw(cases_on_device())
    names = [p.block for p in case.plan.placements if p.states is Tier.DISK]
    beside = draw(st.sets(st.sampled_from(names), min_size=1)) if names else set[str]()
    able = all(has_residual(p) for b in case.trace.model.blocks for p in b.parameters)
    density = draw(st.sampled_from([None, 0.003, 0.5, 1.0])) if able else None
    return replace(case, plan=at_storage(case.trace, case.plan, beside, density))
