"""One budget for several models: what each has of it, and what is refused. No torch."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from forebay.budgets import Budget, DiskBudget, DiskShare
from forebay.checking import check
from forebay.errors import CannotServe, ConfigError, DoesNotFit
from forebay.memory import Tier
from forebay.planners import Problem, make_plan
from forebay.planners.several import STEPS, divide, within
from forebay.simulation import Costs, alternating
from forebay.states import Masters
from forebay.trace import Trace
from tests.null.planning import ENOUGH, asked, chain, machine

ON = machine(compute=2e8, disk=1e8)
TRACES = (chain(2), chain(3, activation=16384))
POLICY = "zero-infinity"
"""What the host has no room for is on disk."""


@cache
def least(trace: Trace, policy: str = POLICY) -> int:
    """Bytes of the device with which there is a plan."""
    with pytest.raises(DoesNotFit) as refused:
        make_plan(asked(trace, ON, device=1), policy)
    return refused.value.needed


def together(device: int, **more: int) -> list[Problem]:
    return [asked(trace, ON, device=device, **more) for trace in TRACES]


NEEDED = sum(map(least, TRACES))


@pytest.mark.parametrize(("policy", "room"), [(POLICY, 1.0), (POLICY, 2.0), ("hydra", 1.0), ("hydra", 1.5)])
def test_each_has_a_plan_and_all_of_them_are_within_the_budget(policy: str, room: float) -> None:
    needed = sum(least(trace, "l2l" if policy == "hydra" else policy) for trace in TRACES)
    problems = together(int(needed * room), host=1 << 22)
    made = divide(problems, policy)
    assert [plan.planner for plan in made.plans] == [policy] * 2
    for tier in (Tier.DEVICE, Tier.HOST, Tier.DISK):
        assert sum(plan.peaks(1)[tier] for plan in made.plans) <= problems[0].limit(tier)
    assert sum(plan.budget.device for plan in made.plans) <= problems[0].budget.device
    assert sum(plan.budget.host or 0 for plan in made.plans) <= 1 << 22
    # Nothing is kept back: but for what does not divide.
    assert sum(plan.budget.device for plan in made.plans) > problems[0].budget.device - 2
    assert all(two > one for one, two in zip(made.step_seconds(1), made.step_seconds(2), strict=True))
    for trace, plan in zip(TRACES, made.plans, strict=True):
        check(trace, ON, plan)


def test_what_is_left_goes_where_a_round_gains_most_by_it() -> None:
    """No other part of the budget for either of them gives a faster round, of those that are tried, and half each is
    one of them."""
    needed = sum(least(trace, "stream") for trace in TRACES)
    problems = together(int(needed * 1.5))
    made = divide(problems, "stream")
    left = problems[0].budget.device - needed
    halves = [make_plan(asked(trace, ON, device=least(trace, "stream") + left // 2), "stream") for trace in TRACES]
    even = alternating(halves, [Costs(trace, ON, Masters.WHOLE) for trace in TRACES], STEPS)
    assert made.forecast.seconds <= even.seconds * (1 + 1e-9)
    # In words of a step: not slower than training one after the other, each with all of the budget.
    alone = [make_plan(problem, "stream") for problem in problems]
    each = [alternating([p], [Costs(t, ON, Masters.WHOLE)], STEPS).seconds for p, t in zip(alone, TRACES, strict=True)]
    assert max(made.step_seconds()) <= made.forecast.seconds
    assert made.forecast.seconds < 1.2 * sum(each)


def test_with_room_for_everything_everything_stays() -> None:
    made = divide(together(ENOUGH), "auto")
    assert all(p.resident for plan in made.plans for p in plan.placements)


def test_a_part_of_every_disk() -> None:
    """In proportion to what each folder may hold, and no more than all of it together."""
    traces = [chain(layers, width=512) for layers in (2, 3)]
    host = sum(make_plan(asked(trace, ON, device=ENOUGH), POLICY).host for trace in traces) * 3 // 4
    disk = DiskBudget("one", 48 << 20, (DiskShare("two", 16 << 20),))
    budget = Budget(ENOUGH, host, None, disk)
    problems = [replace(asked(t, ON, device=1, host=host, disk=48 << 20), budget=budget) for t in traces]
    made = divide(problems, POLICY)
    assert any(plan.disk for plan in made.plans)
    folders = [plan.budget.disk.folders for plan in made.plans if plan.budget.disk is not None]
    assert len(folders) == 2 and all([share.path for share in own] == ["one", "two"] for own in folders)
    for number, most in enumerate((32 << 20, 16 << 20)):
        assert 0 < sum(own[number].nbytes or 0 for own in folders) <= most
    for own in folders:
        assert own[0].nbytes == pytest.approx(2 * (own[1].nbytes or 0), rel=1e-3)


# What cannot be.


def test_no_room_for_all_says_what_each_needs() -> None:
    with pytest.raises(DoesNotFit, match=r"device: the models need .* together and .* are allowed \(model 0") as found:
        divide(together(NEEDED - 1), POLICY)
    assert (found.value.needed, found.value.allowed, found.value.tier) == (NEEDED, NEEDED - 1, "device")


def test_what_all_of_them_need_is_enough() -> None:
    """Though the first that lacks room is noticed before the others were asked."""
    with pytest.raises(DoesNotFit, match="device: the models need") as found:
        divide(together(max(map(least, TRACES)) + 1), POLICY)
    assert found.value.needed == NEEDED
    assert len(divide(together(found.value.needed), POLICY).plans) == 2


def test_the_host_that_all_of_them_need_is_enough_with_a_disk_too() -> None:
    traces = [chain(layers, width=512) for layers in (2, 3)]

    def wanted(host: int) -> list[Problem]:
        return [asked(trace, ON, device=ENOUGH, host=host, disk=1 << 40) for trace in traces]

    with pytest.raises(DoesNotFit, match="host") as alone:
        make_plan(wanted(1)[1], POLICY)
    with pytest.raises(DoesNotFit, match="host: the models need") as found:
        divide(wanted(alone.value.needed + 1), POLICY)
    assert found.value.needed > found.value.allowed == alone.value.needed + 1
    assert len(divide(wanted(found.value.needed), POLICY).plans) == 2


@pytest.mark.parametrize("nbytes", [40960, 40961, 40962, 7])
def test_of_several_folders_every_byte_is_somebodys(nbytes: int) -> None:
    """So that a plan is within the budget that it was made for."""
    disk = DiskBudget("one", 3 << 30, (DiskShare("two", 1 << 30), DiskShare("three", 1 << 30)))
    problem = asked(TRACES[0], ON, device=ENOUGH, disk=3 << 30)
    problem = replace(problem, budget=replace(problem.budget, disk=disk))
    part = within(problem, 1, 1, nbytes).budget.disk
    assert part is not None and part.nbytes == nbytes == sum(folder.nbytes or 0 for folder in part.folders)


def test_no_room_for_one_says_which() -> None:
    with pytest.raises(DoesNotFit, match=r"^model 1: device memory") as found:
        divide(together(max(map(least, TRACES)) - 1), POLICY)
    allowed = max(map(least, TRACES)) - 1
    assert (found.value.needed, found.value.allowed) == (allowed + 1, allowed) and found.value.nearest


def test_too_small_a_host_is_refused() -> None:
    with pytest.raises(DoesNotFit, match="host") as found:
        divide(together(NEEDED * 2, host=1 << 14), POLICY)
    assert found.value.tier == "host"


def test_a_policy_that_serves_no_such_model_says_so() -> None:
    with pytest.raises(CannotServe, match=r"^model 0: .*moesys"):
        divide(together(ENOUGH), "moesys")
    with pytest.raises(ConfigError, match="unknown policy 'nonsense'"):
        divide(together(ENOUGH), "nonsense")


def test_one_model_is_not_several() -> None:
    with pytest.raises(ConfigError, match="two models or more, got 1"):
        divide(together(ENOUGH)[:1], POLICY)


def test_they_share_one_budget_and_one_machine() -> None:
    first, second = together(ENOUGH)
    with pytest.raises(ConfigError, match="model 1: it has another budget or machine"):
        divide([first, replace(second, host_limit=7)], POLICY)
    with pytest.raises(ConfigError, match=r"model 1: .* known only with a batch"):
        divide([first, replace(second, trace=None, machine=None)], POLICY)
