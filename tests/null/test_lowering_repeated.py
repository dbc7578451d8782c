"""The third step of a sketch is the second one once more, and the last step of a program is like all that follow."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import pytest
from hypothesis import event, given, settings

from forebay.errors import DeviceOutOfMemory
from forebay.lowering import lower, sketch
from forebay.machine import Machine
from forebay.planners import Bench, make_plan
from forebay.simulation import Costs, Score, pace, settled_seconds
from forebay.states import Masters
from tests.null.ahead import cases_ahead
from tests.null.at_storage import cases_at_storage
from tests.null.on_device import cases_on_device
from tests.null.planning import ENOUGH, asked, chain, lopsided, machine
from tests.null.strategies import Case, cases

pytestmark = pytest.mark.usefixtures("short_searches")

KINDS = {"hosted": cases, "ahead": cases_ahead, "on the device": cases_on_device, "at the storage": cases_at_storage}

LOWERING = import_module("forebay.lowering.lower")


def steps(case: Case) -> tuple[float, ...]:
    program = sketch(case.trace, case.plan)
    return pace(Score.of(program, Costs(case.trace, case.machine, Masters.WHOLE)))


@pytest.mark.parametrize("kind", KINDS)
def test_it_takes_as_long_as_one_that_is_walked_through(kind: str) -> None:
    """To the last bit: what it waits for beside is two steps old."""

    @settings(max_examples=15, deadline=None)
    @given(KINDS[kind]())
    def same(case: Case) -> None:
        counterparts: Callable[..., object] = LOWERING.counterparts
        found = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LOWERING, "counterparts", lambda *given: found.append(counterparts(*given)) or found[-1])
            try:
                repeated = steps(case)
            except DeviceOutOfMemory:
                return
            patch.setattr(LOWERING, "counterparts", lambda *given: None)
            assert steps(case) == repeated
        event("walked" if not found else "repeated" if found[-1] else "nothing alike")

    same()


MACHINES = {
    "slow updates": machine(compute=4e8, h2d=1e9, d2h=1e9, update=1e8),
    "as slow as compute": machine(compute=4e8, h2d=1e9, d2h=1e9, update=4e8),
    "slow links": machine(compute=1e9, h2d=2e8, d2h=2e8, update=4e8),
}


@pytest.mark.thinned(3)
@pytest.mark.parametrize("on", MACHINES.values(), ids=MACHINES.keys())
@pytest.mark.parametrize("policy", ["stream", "stream-recompute", "auto"])
def test_what_is_foretold_is_a_step_like_all_that_follow(policy: str, on: Machine) -> None:
    for trace in (chain(8), lopsided()):
        whole = make_plan(asked(trace, on, device=ENOUGH), "resident").device
        problem = asked(trace, on, device=whole // 3)
        plan = make_plan(problem, policy)
        costs = Bench(problem).costs
        seconds = [
            settled_seconds(pace(Score.of(program, costs)), program)
            for program in (lower(trace, plan), lower(trace, plan, steps=8))
        ]
        assert seconds[0] == pytest.approx(seconds[1], rel=1e-3)
        assert plan.step_seconds == pytest.approx(seconds[0])


def test_the_second_step_is_shorter() -> None:
    """It begins with less that hangs over than all later ones, which is why there is a third one."""
    shares = []
    for trace in (chain(8), chain(16), lopsided()):
        whole = make_plan(asked(trace, MACHINES["slow links"], device=ENOUGH), "resident").device
        problem = asked(trace, MACHINES["slow links"], device=whole // 3)
        taken = pace(Score.of(lower(trace, make_plan(problem, "stream"), steps=5), Bench(problem).costs))
        assert taken[2:] == pytest.approx([taken[2]] * 3)
        shares.append(taken[1] / taken[2])
    assert min(shares) < 0.95 and max(shares) < 1
