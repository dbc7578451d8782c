"""From a plan to a timeline: what ``check`` accepts never overfills a tier, and all steps end where they began."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given

from forebay.checking import check
from forebay.errors import ConfigError, DoesNotFit
from forebay.lowering import lower
from forebay.memory import Kind, Tier
from forebay.program import Verb
from forebay.simulation import Costs, forecast, limits, play, simulate
from forebay.states import Masters
from forebay.timeline import Lane
from tests.null.simulating import MACHINE
from tests.null.strategies import Case, cases, roomy
from tests.null.synthetic import block
from tests.null.tracing import chain_trace

pytestmark = pytest.mark.usefixtures("short_searches")

CHAIN = chain_trace([block(f"layers.{i}", ((64, 64), "float32", True)) for i in range(4)])
HELD = 640
"""Bytes of outputs that live on in the next forward."""


@given(case=cases())
def test_what_is_accepted_never_overfills_a_tier(case: Case) -> None:
    try:
        check(case.trace, case.machine, case.plan)
    except DoesNotFit:
        return  # refused: nothing was promised
    for usage in simulate(case.trace, case.machine, case.plan).tiers:
        assert usage.limit is None or usage.peak <= usage.limit, usage


@given(case=cases())
def test_a_budget_below_what_is_simulated_is_refused(case: Case) -> None:
    # The simulated peak is one that the program can reach: who accepted less would have promised too much.
    peak = simulate(case.trace, case.machine, case.plan).tiers[0].peak
    tight = replace(case.plan, budget=replace(case.plan.budget, device=peak - 1))
    with pytest.raises(DoesNotFit) as caught:
        check(case.trace, case.machine, tight)
    assert caught.value.tier == Tier.DEVICE.value
    assert caught.value.needed >= peak


@given(case=cases())
def test_a_step_ends_with_what_it_began_with(case: Case) -> None:
    program = lower(case.trace, case.plan)
    timeline = play(program, Costs(case.trace, case.machine, Masters.WHOLE), levels=True)
    usage = timeline.tiers[0]
    standing = sum(program.standing.get(Tier.DEVICE, {}).values())
    assert standing <= usage.live <= standing + case.trace.held_nbytes
    assert sum(usage.at_peak.values()) == usage.peak
    # What the device holds over time ends there too, and was never more than the peak, which it comes to.
    assert sum(timeline.levels[-1].live.values()) == usage.live
    assert max(level.high for level in timeline.levels) == usage.peak
    assert all(sum(level.live.values()) <= level.high for level in timeline.levels)
    assert all(one.time < other.time for one, other in pairwise(timeline.levels))


@given(case=cases())
def test_the_limit_is_never_above_the_step(case: Case) -> None:
    # Ops take what a roofline says: at least their FLOPs over the rate. In the last step every lane is full of that
    # step's work or of the same work of the step before.
    made = forecast(case.trace, case.machine, case.plan)
    assert made.limits == limits(case.trace, case.machine, case.plan)
    assert made.limits[Lane.COMPUTE] <= made.step_seconds * (1 + 1e-9)
    assert made.low <= made.step_seconds <= made.high


def test_a_simulation_says_the_budgets_of_its_plan() -> None:
    plan = roomy(CHAIN)
    timeline = simulate(CHAIN, MACHINE, plan)
    allowed = {usage.tier: usage.limit for usage in timeline.tiers}
    assert allowed[Tier.DEVICE] == plan.budget.device
    assert allowed[Tier.HOST] == plan.budget.host
    assert allowed[Tier.DISK] is None


def test_costs_can_be_shared_between_plans() -> None:
    costs = Costs(CHAIN, MACHINE, Masters.WHOLE)
    plan = roomy(CHAIN)
    assert simulate(CHAIN, MACHINE, plan, costs=costs) == simulate(CHAIN, MACHINE, plan)


def test_a_streamed_step_moves_each_block_both_ways() -> None:
    # One slot: four blocks forward, four backward, of which the first backward block is still in the slot.
    made = forecast(CHAIN, MACHINE, roomy(CHAIN, slots=1))
    assert made.moved[Lane.D2H] == 4 * 64 * 64 * 4
    assert 6 * 64 * 64 * 4 <= made.moved[Lane.H2D] <= 8 * 64 * 64 * 4


def test_a_resident_model_moves_nothing() -> None:
    plan = roomy(CHAIN, (Tier.DEVICE, Tier.DEVICE, Tier.DEVICE))
    made = forecast(CHAIN, MACHINE, plan)
    assert not any(n for lane, n in made.moved.items() if lane is not Lane.COMPUTE)
    assert made.busy[Lane.STALL] == 0
    # Alone on its lane, a step is the sum of its ops and its updates.
    program = lower(CHAIN, plan)
    costs = Costs(CHAIN, MACHINE, Masters.WHOLE)
    last = [a for a in program.actions if a.step == program.steps - 1]
    assert made.step_seconds == pytest.approx(sum(costs.action(a) for a in last))
    assert sum(a.nbytes for a in last if a.verb is Verb.UPDATE) == made.moved[Lane.COMPUTE]


def test_micro_batches_multiply_compute() -> None:
    plan = roomy(CHAIN)
    one, three = (forecast(CHAIN, MACHINE, plan, micro_batches=n) for n in (1, 3))
    assert three.limits[Lane.COMPUTE] == pytest.approx(3 * one.limits[Lane.COMPUTE])
    assert three.step_seconds > one.step_seconds


def test_a_disk_that_the_machine_lacks_is_refused() -> None:
    plan = roomy(CHAIN, (Tier.DISK, Tier.HOST, Tier.DISK))
    with pytest.raises(ConfigError, match="machine paper has none"):
        simulate(CHAIN, replace(MACHINE, disk=None), plan)


def test_outputs_that_live_on_are_held_through_the_next_forward() -> None:
    trace = replace(CHAIN, held_nbytes=HELD)
    plan = roomy(trace)
    without = simulate(CHAIN, MACHINE, plan).tiers[0]
    assert without.peak <= simulate(trace, MACHINE, plan).tiers[0].peak <= without.peak + HELD
    assert without.at_peak[Kind.PARAMETER] >= sum(plan.streaming.slots)
