"""More of a budget is not slower, and what is small enough to solve exactly is solved as well."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.errors import DoesNotFit
from forebay.planners import Bench, Problem, make_plan
from forebay.planners.activations.choosing import exact
from forebay.planners.homes import at_home
from forebay.planners.search import TIE
from forebay.plans import Plan
from tests.null.planning import asked, chain, machine
from tests.null.test_planner_properties import problems


def seconds(problem: Problem) -> float | None:
    """Of a step; None where nothing fits."""
    try:
        plan: Plan = make_plan(problem, "auto")
    except DoesNotFit:
        return None
    return plan.step_seconds


@settings(max_examples=20)
@given(problems(), st.integers(1, 64), st.integers(1, 64))
def test_more_device_memory_is_not_slower(problem: Problem, first: int, second: int) -> None:
    """But for a tie: of plans that differ by no more the simpler one is taken."""
    low, high = sorted((first, second))
    less, more = (
        seconds(replace(problem, budget=replace(problem.budget, device=problem.budget.device * part // 32 + 1)))
        for part in (low, high)
    )
    if less is not None:
        assert more is not None and more <= less * (1 + TIE)


MACHINES = {
    "link-bound": machine(compute=1e11),
    "compute-bound": machine(compute=2e7),
    "balanced": machine(compute=4e8),
    "slow updates": machine(compute=1e11, update=5e7),
}


@pytest.mark.parametrize("on", MACHINES)
@pytest.mark.parametrize("blocks", [3, 8])
def test_auto_is_within_one_percent_of_the_whole_programme(on: str, blocks: int) -> None:
    """The programme solved for whole blocks by branch and bound, lowered and simulated like every other draft."""
    trace = chain(blocks, saved=2, activation=65536)
    everything = Bench(asked(trace, MACHINES[on], device=1 << 50))
    assert everything.liveness is not None
    standing = sum(16 * b.trainable_numel for b in trace.model.blocks) + everything.liveness.profile().peak
    for part in (0.6, 0.8):
        problem = asked(trace, MACHINES[on], device=round(part * standing))
        bench = Bench(problem)
        plan = make_plan(problem, "auto", bench)
        best = min(bench.exact(at_home(bench, draft)).step_seconds for draft in exact(bench))
        assert plan.step_seconds is not None and plan.step_seconds <= 1.01 * best
