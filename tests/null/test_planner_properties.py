"""Whatever is asked: a plan keeps its promises, or the refusal's figure is right."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import event, given, settings
from hypothesis import strategies as st

from forebay.budgets import Budget, DiskBudget
from forebay.checking import check
from forebay.errors import CannotServe, DoesNotFit
from forebay.memory import Tier
from forebay.planners import INEXACT, PLANNERS, Problem, make_plan
from forebay.plans import Plan
from forebay.simulation import simulate
from forebay.trace import Footprint
from tests.null.planning import ENOUGH
from tests.null.strategies import machines, traces


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """A random trace and machine, and budgets from too little to plenty."""
    trace = draw(traces())
    disk = draw(st.booleans())
    whole = sum(b.nbytes + b.gradient_nbytes + 4 * 3 * b.trainable_numel for b in trace.model.blocks)
    device = draw(st.integers(1, 40)) * 4096 + draw(st.integers(0, 20)) * whole // 10
    host = draw(st.sampled_from([ENOUGH, 64 << 20, 9 << 20, 64 << 10])) + draw(st.integers(0, 10)) * whole // 10
    budget = Budget(
        device,
        host,
        draw(st.sampled_from([None, 1, 100_000])),
        DiskBudget("folder", ENOUGH) if disk else None,
    )
    return Problem(
        model=trace.model,
        footprint=Footprint(0, 0, measured=False),
        budget=budget,
        host_limit=host,
        disk_limit=ENOUGH if disk else 0,
        state_names=trace.state_names,
        overlap_update=draw(st.booleans()),
        trace=trace,
        machine=draw(machines(trace.device, disk or None)),
        micro_batches=draw(st.sampled_from([1, 2])),
    )


def outcome(asked: Problem, policy: str) -> Plan | DoesNotFit:
    try:
        return make_plan(asked, policy)
    except DoesNotFit as refused:
        return refused


@settings(max_examples=60)
@given(problems(), st.sampled_from(sorted(PLANNERS)))
def test_what_a_planner_returns_is_accepted_and_kept(asked: Problem, policy: str) -> None:
    """By the checker, which shares no code with planners; and in the simulator no tier goes over."""
    assert asked.trace is not None and asked.machine is not None
    plan = outcome(asked, policy)
    if isinstance(plan, CannotServe):
        event("not for this model or step")
        assert plan.nearest
        return
    if isinstance(plan, DoesNotFit):
        event(f"refused: {plan.tier}")
        assert plan.needed > plan.allowed == asked.limit(Tier(plan.tier))
        assert plan.nearest[0].needed == plan.needed
        return
    event(f"recomputes: {bool(plan.recompute)}, disk: {plan.disk > 0}")
    check(asked.trace, asked.machine, plan)
    # Nobody gave leave to change the numbers (``Problem.compress``), but by the name of the policy.
    assert bool(plan.changes_numbers) == (policy in INEXACT) and not any(
        t.bits for s in plan.activations for t in s.treatments
    )
    peaks = {usage.tier: usage.peak for usage in simulate(asked.trace, asked.machine, plan).tiers}
    assert peaks[Tier.DEVICE] <= plan.device <= asked.budget.device
    assert peaks.get(Tier.HOST, 0) <= plan.host <= asked.host_limit
    assert peaks.get(Tier.PINNED, 0) <= plan.pinned
    assert peaks.get(Tier.DISK, 0) <= plan.disk <= asked.disk_limit
    assert make_plan(asked, policy) == plan


@settings(max_examples=40)
@given(problems())
def test_the_device_that_a_refusal_names_is_enough(asked: Problem) -> None:
    refused = outcome(replace(asked, budget=replace(asked.budget, device=1)), "auto")
    assert isinstance(refused, DoesNotFit) and refused.tier == "device"
    enough = replace(asked, budget=Budget(refused.needed), host_limit=ENOUGH, disk_limit=0)
    assert make_plan(enough, "auto").device == refused.needed
