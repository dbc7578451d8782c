"""Loops of one backward a step (``accumulates=False``): gradients that stay take no room before they are made."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings

from forebay.arenas import arenas
from forebay.budgets import Budget
from forebay.checking import check
from forebay.errors import ConfigError
from forebay.lowering import Liveness, device_bound, lower
from forebay.memory import Tier
from forebay.planners import Bench, make_plan
from forebay.planners.parts import all_resident, gives_up_nothing
from forebay.planning import assess
from forebay.plans import Plan
from forebay.simulation import Costs, play
from forebay.states import Masters
from forebay.trace import Trace
from forebay.units import format_bytes
from tests.null.planning import asked, chain, machine
from tests.null.strategies import RESIDENT, Case, cases, roomy
from tests.null.synthetic import block, problem

pytestmark = pytest.mark.usefixtures("short_searches")

LAYERS, WIDTH = 4, 64
GRADIENTS = LAYERS * 3 * WIDTH * WIDTH * 4


def once(plan: Plan) -> Plan:
    return replace(plan, accumulates=False)


def played(trace: Trace, plan: Plan) -> int:
    program = lower(trace, plan)
    return play(program, Costs(trace, machine(), Masters.WHOLE)).peaks[Tier.DEVICE]


def test_activations_have_the_room_of_gradients_until_these_are_made() -> None:
    """Where the most is there before the first gradient, that is all of them."""
    trace = chain(LAYERS, width=WIDTH, activation=1 << 16)
    plan = roomy(trace, RESIDENT)
    sizes = arenas(trace.model, plan.placements, plan.streaming, trace.state_names)
    profile = Liveness(trace).profile()
    need = sizes.device + profile.peak + trace.input_nbytes
    assert sizes.device_gradients == GRADIENTS
    assert (device_bound(trace, plan), device_bound(trace, once(plan))) == (need, need - GRADIENTS)
    assert played(trace, plan) == need - GRADIENTS


def test_gradients_count_from_when_they_are_made() -> None:
    """Where activations are small, the most is there when the last one is made."""
    trace = chain(LAYERS, width=WIDTH, activation=256)
    plan = once(roomy(trace, RESIDENT))
    sizes = arenas(trace.model, plan.placements, plan.streaming, trace.state_names)
    need = device_bound(trace, plan)
    assert sizes.device < need < device_bound(trace, replace(plan, accumulates=True))
    assert played(trace, plan) == need


@settings(max_examples=25, deadline=None)
@given(cases(activations=True))
def test_no_timing_goes_over_the_bound(case: Case) -> None:
    plan = once(case.plan)
    usage = play(lower(case.trace, plan), Costs(case.trace, case.machine, Masters.WHOLE)).usage(Tier.DEVICE)
    assert usage.peak <= device_bound(case.trace, plan) <= device_bound(case.trace, case.plan)


@settings(max_examples=25, deadline=None)
@given(cases(activations=True))
def test_the_checker_finds_no_more_than_the_bound(case: Case) -> None:
    assume(any(p.resident for p in case.plan.placements))
    need = device_bound(case.trace, once(case.plan))
    plan = replace(once(case.plan), device=need, budget=replace(case.plan.budget, device=need))
    check(case.trace, case.machine, plan)


def test_auto_keeps_what_there_is_room_for() -> None:
    """A budget in which all has room if no forward finds a gradient, and only then."""
    trace = chain(LAYERS, width=WIDTH, activation=1 << 16)
    wanted = asked(trace, machine(h2d=1e7, d2h=1e7), device=1 << 40)
    bench = Bench(replace(wanted, accumulates=False))
    need = bench.device(all_resident(trace.model))
    within = replace(wanted, budget=replace(wanted.budget, device=need))
    before, after = make_plan(within, "auto"), make_plan(replace(within, accumulates=False), "auto")
    assert before.accumulates and not gives_up_nothing(before)
    assert not after.accumulates and gives_up_nothing(after) and after.device == need
    assert after.step_seconds is not None and before.step_seconds is not None
    assert after.step_seconds < before.step_seconds


@pytest.mark.thinned(2)
@pytest.mark.parametrize("share", [0.5, 0.6, 0.7, 0.8, 0.9])
def test_more_room_is_never_slower(share: float) -> None:
    trace = chain(8, width=WIDTH, activation=1 << 14)
    wanted = asked(trace, machine(), device=1 << 40)
    most = Bench(wanted).device(all_resident(trace.model))
    within = replace(wanted, budget=replace(wanted.budget, device=int(share * most)))
    seconds = [make_plan(one, "auto").step_seconds or 0.0 for one in (within, replace(within, accumulates=False))]
    assert seconds[1] <= seconds[0] * 1.002


def test_what_contradicts_it_is_refused() -> None:
    trace = chain()
    wanted = asked(trace, machine(), device=1 << 40)
    with pytest.raises(ConfigError, match="accumulates=False is a loop of one backward a step, got 2 micro-batches"):
        replace(wanted, accumulates=False, micro_batches=2)
    with pytest.raises(ConfigError, match="accumulates=False needs to know when gradients are made"):
        replace(problem([block("b", ((8,), "float32", True))], device=1 << 20), accumulates=False)
    with pytest.raises(ConfigError, match="accumulates=False takes one backward a step, got 2"):
        lower(trace, once(roomy(trace)), micro_batches=2)


def test_a_report_says_what_several_backwards_would_take() -> None:
    trace = chain(LAYERS, width=WIDTH, activation=1 << 16)
    one, several = [assess("chain", trace, machine(), Budget(1 << 30), "resident", micro_batches=n) for n in (1, 2)]
    assert one.plan is not None and several.plan is not None
    assert several.plan.device - one.plan.device == GRADIENTS
    words = "a loop of several backwards a step"
    (note,) = [note for note in one.notes if note.startswith(words)]
    assert f"takes {format_bytes(GRADIENTS)} more of the device" in note
    assert not [note for note in several.notes if note.startswith(words)]
