"""Plans whose blocks are updated beside the storage, where their states are. No torch."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from hypothesis import strategies as st

from forebay.arenas import arenas_of
from forebay.memory import Tier
from forebay.plans import Plan, Update
from forebay.trace import Trace
from tests.null.on_device import cases_on_device
from tests.null.strategies import Case
from tests.null.updating import updating

__all__ = ["at_storage", "cases_at_storage"]


def at_storage(trace: Trace, plan: Plan, names: Collection[str] | None = None) -> Plan:
    """``plan`` in which ``names`` (None: all blocks that may be) are updated beside the storage, and nowhere else."""
    beside = [p.block for p in plan.placements if p.states is Tier.DISK and (names is None or p.block in names)]
    plan = updating(plan, Update.STORAGE, beside)
    sizes = arenas_of(trace.model, plan, trace.state_names)
    return replace(plan, host=sizes.host, disk=sizes.disk)


@st.composite
def cases_at_storage(draw: st.DrawFn) -> Case:
    """A case of ``cases_on_device`` in which any of the blocks with states on disk are updated beside the storage."""
    case = draw(cases_on_device())
    names = [p.block for p in case.plan.placements if p.states is Tier.DISK]
    beside = draw(st.sets(st.sampled_from(names), min_size=1)) if names else set[str]()
    return replace(case, plan=at_storage(case.trace, case.plan, beside))
