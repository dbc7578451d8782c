"""More of a budget is not slower, and what is small enough to solve exactly is solved as well."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.budgets import DiskBudget
from forebay.errors import DoesNotFit
from forebay.planners import Bench, Problem, make_plan
from forebay.planners.homes import at_home
from forebay.planners.search import PLAIN, TIE
from forebay.plans import Plan
from forebay.units import MiB
from tests.null.planning import asked, chain, machine, whole_drafts
from tests.null.test_planner_properties import problems


def planned(problem: Problem) -> Plan | None:
    """None where nothing fits."""
    try:
        return make_plan(problem, "auto")
    except DoesNotFit:
        return None


def is_no_slower(more: Plan | None, less: Plan) -> bool:
    """Whether ``more`` takes no longer a step than ``less`` does, but for a tie: of plans that differ by no more the
    simpler one is taken; and where everything stays as it is, that is taken for ``PLAIN``."""
    if more is None or more.step_seconds is None or less.step_seconds is None:
        return False
    plain = not more.recompute and not more.activations and all(p.resident for p in more.placements)
    return more.step_seconds <= less.step_seconds * (1 + (PLAIN if plain else TIE))


@settings(max_examples=8)
@given(problems(), st.integers(1, 64), st.integers(1, 64))
def test_more_device_memory_is_not_slower(problem: Problem, first: int, second: int) -> None:
    low, high = sorted((first, second))
    less, more = (
        planned(replace(problem, budget=replace(problem.budget, device=problem.budget.device * part // 32 + 1)))
        for part in (low, high)
    )
    assert less is None or is_no_slower(more, less)


@settings(max_examples=6)
@given(problems(), st.integers(0, 32), st.integers(0, 32), st.sampled_from(["host", "disk"]))
def test_more_host_memory_or_disk_is_not_slower(problem: Problem, first: int, second: int, tier: str) -> None:
    """From nothing to what all parameters, gradients and states take, and the buffers on the way to disk."""
    low, high = (with_room(problem, tier, part) for part in sorted((first, second)))
    less, more = planned(low), planned(high)
    assert less is None or is_no_slower(more, less)


def with_room(problem: Problem, tier: str, part: int) -> Problem:
    """``problem`` with so many parts in 32 of its parameters, gradients and states on the host or on disk; what the
    other one has stays."""
    whole = sum(b.nbytes + b.gradient_nbytes + 4 * 3 * b.trainable_numel for b in problem.model.blocks)
    room = part * whole // 32 + 1
    if tier == "disk" and problem.disk_limit:
        return replace(problem, disk_limit=room, budget=replace(problem.budget, disk=DiskBudget("folder", room)))
    room += 5 * MiB if problem.disk_limit else 0
    return replace(problem, host_limit=room, budget=replace(problem.budget, host=room))


def test_more_memory_is_not_slower_where_there_is_time_for_a_few_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with models of thousands of moves: a search has time for three or four such drafts, and those that come first
    must not be nearly the same."""
    import forebay.planners.bench as workbench

    monkeypatch.setattr(workbench, "ACTIONS", 4500)
    trace = chain(16, saved=6, activation=1 << 17)
    on = machine(compute=4e8, h2d=4e8, d2h=4e8, update=2e8)
    everything = Bench(asked(trace, on, device=1 << 50))
    assert everything.liveness is not None
    peak = everything.liveness.profile().peak
    found = []
    for part in (0.2, 0.3, 0.5, 0.8):
        problem = asked(trace, on, device=int(part * peak))
        bench = Bench(problem)
        found.append(make_plan(problem, "auto", bench).step_seconds or 0.0)
    assert all(more <= less * (1 + TIE) for less, more in pairwise(found))


MACHINES = {
    "link-bound": machine(compute=1e11),
    "compute-bound": machine(compute=2e7),
    "balanced": machine(compute=4e8),
    "slow updates": machine(compute=1e11, update=5e7),
}


@pytest.mark.thinned(8)
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
        best = min(bench.exact(at_home(bench, draft)).step_seconds for draft in whole_drafts(bench))
        assert plan.step_seconds is not None and plan.step_seconds <= 1.01 * best
