"""The predicted figures that a plan carries, and the words for where they come from. No torch."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forebay.figures import source_of, with_figures
from forebay.machine import Machine
from forebay.planners import make_plan
from forebay.plans import Plan
from forebay.simulation import Costs, simulate
from forebay.states import Masters
from tests.null.planning import asked, chain, machine
from tests.null.test_report_run import PLAN

TRACE = chain(4)
PAPER = machine()
OPS = sum(len(TRACE.segments[visit.segment].ops) for visit in TRACE.visits)
WIDE = 1 << 40


def planned(policy: str, on: Machine = PAPER) -> Plan:
    return with_figures(TRACE, on, make_plan(asked(TRACE, on, device=WIDE), policy))


def step(plan: Plan, micro_batches: int) -> float:
    """Seconds of the last step of a simulation of its own."""
    return simulate(TRACE, PAPER, plan, micro_batches=micro_batches).step_seconds[-1]


def test_a_further_micro_batch_of_a_resident_model_costs_its_ops_and_no_update() -> None:
    plan = planned("resident")
    alone = Costs(TRACE, PAPER, Masters.WHOLE).ops(0, OPS)
    assert plan.micro_batch_seconds == pytest.approx(alone)
    assert plan.step_seconds is not None and plan.step_seconds > alone
    assert plan.seconds_of_step(3) == pytest.approx(step(plan, 3))


@pytest.mark.parametrize("policy", ["auto", "stream", "stream-recompute"])
def test_a_step_of_several_micro_batches_is_near_its_simulation(policy: str) -> None:
    plan = planned(policy)
    assert plan.seconds_of_step() == plan.step_seconds == pytest.approx(step(plan, 1))
    assert plan.seconds_of_step(2) == pytest.approx(step(plan, 2))
    # The first micro-batch waits for the updates of the step before; from the third on all are alike.
    assert plan.seconds_of_step(5) == pytest.approx(step(plan, 5), rel=0.05)


def test_a_plan_that_nobody_simulated_gets_its_seconds() -> None:
    known = planned("stream")
    bare = replace(known, step_seconds=None, micro_batch_seconds=None, notes=())
    assert bare.seconds_of_step() is bare.seconds_of_step(2) is None
    assert with_figures(TRACE, PAPER, bare) == known


def test_figures_come_back_from_json() -> None:
    plan = planned("stream")
    assert Plan.from_json(plan.to_json()) == plan
    older = PLAN.to_json().replace('"micro_batch_seconds": 1.2,', "")
    assert Plan.from_json(older).seconds_of_step(2) is None


def test_typical_rates_are_called_a_rough_guess_with_the_remedy() -> None:
    (words,) = planned("resident").notes
    assert words.startswith("the step time is a rough guess")
    assert "typical for paper" in words and "run forebay doctor" in words
    assert "12 % of the op seconds were measured" in source_of(PAPER, 0.12)


def test_measured_rates_say_which_machine_and_how_much_was_measured_op_by_op() -> None:
    here = replace(PAPER, source="measured")
    assert planned("resident", here).notes == ("predicted seconds follow from the measured rates of paper",)
    assert source_of(here, 0.97).startswith("97 % of the op seconds were measured op by op")


def test_a_remark_on_a_typical_machine_is_not_repeated() -> None:
    bare = make_plan(asked(TRACE, PAPER, device=WIDE), "resident")
    assert len(with_figures(TRACE, PAPER, bare, ("its disk is a common one",)).notes) == 1
    measured = with_figures(TRACE, replace(PAPER, source="measured"), bare, ("its disk is a common one",))
    assert measured.notes[1:] == ("its disk is a common one",)
