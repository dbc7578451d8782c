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
from tests.null.obeying import can_be_obeyed, obeyed
from tests.null.planning import ENOUGH
from tests.null.strategies import machines, traces


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """A random trace and machine, and budgets from too little to plenty."""
    trace = draw(traces())
    disk = draw(st.booleans())
    update = draw(st.sampled_from(["step", "step", "backward"]))
    whole = sum(b.nbytes + b.gradient_nbytes + 4 * 3 * b.trainable_numel for b in trace.model.blocks)
    device = draw(st.integers(1, 40)) * 4096 + draw(st.integers(0, 20)) * whole // 10
    host = draw(st.sampled_from([ENOUGH, 64 << 20, 9 << 20, 64 << 10])) + draw(st.integers(0, 10)) * whole // 10
    on_disk = draw(st.sampled_from([ENOUGH, 1 + draw(st.integers(1, 40)) * whole // 20]))
    budget = Budget(
        device,
        host,
        draw(st.sampled_from([None, 1, 100_000])),
        DiskBudget("folder", on_disk) if disk else None,
    )
    return Problem(
        model=trace.model,
        footprint=Footprint(0, 0, measured=False),
        budget=budget,
        host_limit=host,
        disk_limit=on_disk if disk else 0,
        state_names=trace.state_names,
        overlap_update=draw(st.booleans()),
        trace=trace,
        machine=draw(machines(trace.device, disk or None)),
        micro_batches=1 if update == "backward" else draw(st.sampled_from([1, 2])),
        compress=draw(st.sampled_from([0, 0, 0, 4])),
        update=update,
        disk_copies=draw(st.sampled_from([1, 2])),
        checksums=disk and draw(st.booleans()),
    )


def outcome(asked: Problem, policy: str) -> Plan | DoesNotFit:
    try:
        return make_plan(asked, policy)
    except DoesNotFit as refused:
        return refused


@settings(max_examples=40)
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
    # Numbers change by the name of the policy, and with leave (``Problem.compress``).
    codes = any(t.lossy for s in plan.activations for t in s.treatments)
    assert bool(plan.changes_numbers) == (policy in INEXACT or codes) and (asked.compress or not codes)
    if any(placed.on_disk for placed in plan.placements):
        assert (plan.streaming.disk_copies, plan.streaming.checksums) == (asked.disk_copies, asked.checksums)
    peaks = simulate(asked.trace, asked.machine, plan).peaks
    assert peaks[Tier.DEVICE] <= plan.device <= asked.budget.device
    assert peaks.get(Tier.HOST, 0) <= plan.host <= asked.host_limit
    assert peaks.get(Tier.PINNED, 0) <= plan.pinned
    assert peaks.get(Tier.DISK, 0) <= plan.disk <= asked.disk_limit
    assert make_plan(asked, policy) == plan


def tight(asked: Problem, host: int) -> Problem:
    """The same with some hundred KiB of the host at most, where many are refused."""
    return replace(asked, budget=replace(asked.budget, host=host), host_limit=host)


@settings(max_examples=50)
@given(problems(), st.integers(1, 300), st.sampled_from(sorted(PLANNERS)))
def test_whatever_a_refusal_names_would_do(asked: Problem, host: int, policy: str) -> None:
    """Each of the remedies that are no estimates, with all that it asks for at once, and nothing else."""
    asked = tight(asked, host << 10)
    refused = outcome(asked, policy)
    if isinstance(refused, Plan):
        return
    for remedy in filter(can_be_obeyed, refused.nearest):
        event(f"{refused.tier or 'not served'}: {remedy.what}, {len(remedy.at_once)} at once")
        again = outcome(*obeyed(asked, policy, remedy))
        assert isinstance(again, Plan), (policy, str(refused), remedy.words, str(again))


@settings(max_examples=8)
@given(problems())
def test_the_device_that_a_refusal_names_is_enough(asked: Problem) -> None:
    refused = outcome(replace(asked, budget=replace(asked.budget, device=1)), "auto")
    assert isinstance(refused, DoesNotFit) and refused.tier == "device"
    enough = replace(asked, budget=Budget(refused.needed), host_limit=ENOUGH, disk_limit=0, checksums=False)
    assert make_plan(enough, "auto").device == refused.needed
