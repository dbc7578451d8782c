"""The part of the device that is the loop's: no plan takes it, the checker knows, and a refusal adds it up."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from forebay.budgets import Budget
from forebay.checking import check
from forebay.errors import ConfigError, DoesNotFit
from forebay.memory import Tier
from forebay.planners import Problem, make_plan
from forebay.plans import Plan
from forebay.units import KiB, MiB
from tests.null.planning import asked, chain, machine

RESERVE = 100 * KiB


def question(device: int) -> Problem:
    return asked(chain(), machine(), device=device)


def with_reserve(problem: Problem, device: int) -> Problem:
    return replace(problem, budget=replace(problem.budget, device=device, device_reserve=RESERVE))


def least(problem: Problem) -> int:
    """Bytes of the device that a plan needs."""
    with pytest.raises(DoesNotFit) as refused:
        make_plan(problem, "auto")
    assert refused.value.tier == Tier.DEVICE.value
    return refused.value.needed


@pytest.mark.parametrize("policy", ["auto", "recompute", "zero-infinity"])
def test_a_plan_is_the_one_for_the_rest(policy: str) -> None:
    problem = question(MiB)
    plain = make_plan(replace(problem, budget=Budget(MiB - RESERVE, problem.budget.host)), policy)
    reserved = make_plan(with_reserve(problem, MiB), policy)
    assert reserved.device <= MiB - RESERVE
    assert replace(reserved, budget=plain.budget) == plain


def test_a_machine_has_no_more_than_it_has() -> None:
    problem = question(MiB)
    assert problem.machine is not None
    small = replace(problem, machine=replace(problem.machine, device_capacity=300 * KiB))
    assert with_reserve(small, MiB).limit(Tier.DEVICE) == 300 * KiB - RESERVE
    smaller = replace(problem, machine=replace(problem.machine, device_capacity=RESERVE // 2))
    assert with_reserve(smaller, MiB).limit(Tier.DEVICE) == 0


def test_the_checker_leaves_it_to_the_loop() -> None:
    problem = question(MiB)
    assert problem.trace is not None and problem.machine is not None
    plan = make_plan(with_reserve(problem, MiB), "auto")
    check(problem.trace, problem.machine, plan)
    check(problem.trace, problem.machine, replace(plan, budget=plan.budget.with_planned_device(plan.device)))
    with pytest.raises(DoesNotFit, match="device"):
        check(problem.trace, problem.machine, replace(plan, budget=plan.budget.with_planned_device(plan.device - 1)))


def test_what_a_refusal_asks_for_is_enough_and_no_more() -> None:
    """It speaks of what a plan may take; what to give is that and the reserve."""
    needed = least(question(1))
    with pytest.raises(DoesNotFit) as refused:
        make_plan(with_reserve(question(1), RESERVE + 1), "auto")
    assert (refused.value.needed, refused.value.allowed) == (needed, 1)
    assert "device memory beside device_reserve=100.0 KiB: " in str(refused.value)
    first = refused.value.nearest[0]
    given = Budget.of(first.words.split()[1].rstrip(",;")).device
    assert make_plan(with_reserve(question(1), given), "auto").device <= given - RESERVE
    assert needed + RESERVE <= given < needed + RESERVE + 2 * KiB
    with pytest.raises(DoesNotFit):
        make_plan(with_reserve(question(1), needed + RESERVE - 1), "auto")


@pytest.mark.parametrize("reserve", [-1, MiB, 2 * MiB])
def test_a_reserve_is_a_part_of_the_budget(reserve: int) -> None:
    with pytest.raises(ConfigError, match=r"device_reserve is the part of device_memory that no plan takes, got .* of"):
        Budget(MiB, device_reserve=reserve)


def test_a_plan_that_was_written_before_there_was_one_has_none() -> None:
    plan = make_plan(question(MiB), "auto")
    told = json.loads(plan.to_json())
    assert told["budget"].pop("device_reserve") == 0
    assert Plan.from_json(json.dumps(told)) == plan
