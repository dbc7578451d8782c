"""Plans whose blocks are updated on the device and are at home elsewhere. No torch."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from hypothesis import strategies as st

from forebay.arenas import Sizer, arenas_of
from forebay.plans import Plan, Update
from forebay.trace import Trace
from tests.null.ahead import ahead
from tests.null.strategies import Case, cases
from tests.null.updating import updating

__all__ = ["cases_on_device", "on_device"]


def on_device(trace: Trace, plan: Plan, names: Collection[str] | None = None, *, cells: int = 2, more: int = 0) -> Plan:
    """``plan`` in which ``names`` (None: all blocks that may be) are updated on the device, in a window of ``cells``
    chunks and ``more`` bytes. What was to be updated ahead of its step and is named goes there instead; budgets have
    room for it."""
    there = tuple(p.block for p in plan.placements if not p.resident and (names is None or p.block in names))
    sizer = Sizer(trace.model, trace.state_names, plan.streaming.update_chunk, plan.streaming.masters)
    window = sizer.update_window(there, cells) + more
    streaming = replace(plan.streaming, update_window=max(1, window) if there else 0)
    plan = updating(plan, Update.DEVICE, there, streaming=streaming)
    sizes = arenas_of(trace.model, plan, trace.state_names)
    return replace(
        plan,
        device=plan.device + streaming.update_window,
        host=sizes.host,
        disk=sizes.disk,
        budget=replace(plan.budget, device=max(plan.budget.device, plan.device + streaming.update_window)),
    )


@st.composite
def cases_on_device(draw: st.DrawFn) -> Case:
    """A case of ``cases``, with treatments, in which any of the blocks that may are updated on the device, and any of
    the others ahead of their step."""
    case = draw(cases(activations=True))
    names = [p.block for p in case.plan.placements if not p.resident]
    there = draw(st.sets(st.sampled_from(names), min_size=1)) if names else set[str]()
    left = sorted(set(names) - there)
    early = draw(st.sets(st.sampled_from(left))) if left else ()
    plan = ahead(case.trace, case.plan, early) if early else case.plan
    return replace(case, plan=on_device(case.trace, plan, there, cells=draw(st.integers(1, 3))))
