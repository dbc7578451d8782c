"""``harmony`` and ``mobius``: all micro-batches of a step pass a block together. No torch."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forebay.budgets import Budget
from forebay.checking import check
from forebay.errors import CannotServe, ConfigError, DoesNotFit
from forebay.figures import with_figures
from forebay.lowering import accumulation_of
from forebay.machine import Machine
from forebay.memory import Tier
from forebay.planners import Problem, make_plan
from forebay.planners.room import leave_room
from forebay.planning import assess
from forebay.plans import Plan, Update
from forebay.simulation import Costs, simulate, together
from forebay.states import Masters
from forebay.timeline import Lane
from forebay.trace import Trace
from tests.null.planning import ENOUGH, asked, chain, machine
from tests.null.synthetic import block, problem
from tests.null.updating import updating

LAYERS, COUNT = 6, 3
TRACE = chain(LAYERS)
LARGE = chain(LAYERS, width=512)
"""3 MiB of parameters a layer: beside it what passes through the host on its way to disk is little."""

BLOCK = TRACE.model.blocks[0].nbytes
NAMES = tuple(b.name for b in TRACE.model.blocks)
ON = machine(disk=1e8)
GROUPED = ["harmony", "mobius"]


def wanted(
    device: int = ENOUGH, *, host: int = ENOUGH, on: Machine = ON, disk: int = 0, trace: Trace = TRACE
) -> Problem:
    return asked(trace, on, device=device, host=host, disk=disk)


def made(
    policy: str, device: int = ENOUGH, *, host: int = ENOUGH, on: Machine = ON, disk: int = 0, trace: Trace = TRACE
) -> Plan:
    problem = wanted(device, host=host, on=on, disk=disk, trace=trace)
    room = leave_room(problem, COUNT, lambda asked, bench: make_plan(asked, policy, bench))
    return with_figures(trace, on, room.plan, micro_batches=COUNT)


def seconds(plan: Plan) -> float:
    found = plan.seconds_of_step(COUNT, COUNT)
    assert found is not None
    return found


@pytest.mark.parametrize("policy", GROUPED)
def test_one_micro_batch_is_refused_with_what_would_do(policy: str) -> None:
    with pytest.raises(CannotServe, match=f"policy {policy} groups the micro-batches .* this step has one") as refused:
        make_plan(wanted(), policy)
    (remedy,) = refused.value.nearest
    assert f"{policy} with 2 micro-batches or more" in remedy.words and "zero-infinity or auto with one" in remedy.words
    report = assess("a chain", TRACE, ON, Budget(ENOUGH, ENOUGH), policy)
    assert not report.fits and "this step has one" in report.reasons[0]
    assert assess("a chain", TRACE, ON, Budget(ENOUGH, ENOUGH), policy, micro_batches=2).fits


@pytest.mark.parametrize("policy", GROUPED)
def test_without_a_batch_it_asks_for_one(policy: str) -> None:
    blind = replace(problem([block("one", ((8, 8), "float32", True))], device=ENOUGH), micro_batches=2)
    with pytest.raises(ConfigError, match=f"policy {policy} needs .* give one"):
        make_plan(blind, policy)


@pytest.mark.parametrize("policy", GROUPED)
@pytest.mark.parametrize(("share", "disk"), [(0.2, False), (0.35, True), (0.6, False)])
def test_its_plan_is_right_and_has_room_for_all_micro_batches(policy: str, share: float, disk: bool) -> None:
    """With the disk: the host has room for seven eighths of what is not on the device."""
    trace = LARGE if disk else TRACE
    device = round(share * make_plan(wanted(trace=trace), "resident").device)
    host = make_plan(wanted(trace=trace), "stream").host * 7 // 8 if disk else ENOUGH
    plan = made(policy, device, host=host, disk=ENOUGH if disk else 0, trace=trace)
    check(trace, ON, plan)
    needs = accumulation_of(trace, plan)
    assert needs is not None and plan.planner == policy and not plan.changes_numbers
    assert needs.needed(Tier.DEVICE, COUNT) <= device and needs.needed(Tier.HOST, COUNT) <= host
    peaks = simulate(trace, ON, plan).peaks
    assert peaks[Tier.DEVICE] <= plan.device <= device and peaks.get(Tier.HOST, 0) <= plan.host <= host
    assert (plan.disk > 0) == disk and plan.recompute == NAMES


@pytest.mark.parametrize("policy", GROUPED)
def test_where_nothing_fits_it_says_what_would(policy: str) -> None:
    with pytest.raises(DoesNotFit) as refused:
        made(policy, BLOCK // 2)
    assert refused.value.tier == "device" and refused.value.nearest[0].needed == refused.value.needed


@pytest.mark.parametrize("policy", GROUPED)
def test_a_layer_comes_twice_a_step_however_many_micro_batches(policy: str) -> None:
    """Forward and backward; what is still there when it is asked for again comes once."""
    plan, costs = replace(made(policy), accumulation=None), Costs(TRACE, ON, Masters.WHOLE)
    two, eight = (together(plan, costs, count).moved for count in (2, 8))
    activations = plan.streaming.host_activations
    for count, moved in ((2, two), (8, eight)):
        weights = moved[Lane.H2D] - count * activations
        assert LAYERS * BLOCK <= weights <= 2 * LAYERS * BLOCK


def test_harmony_has_two_layers_on_the_device() -> None:
    plan = made("harmony")
    assert plan.streaming.slots == (BLOCK, BLOCK) and plan.streaming.prefetch_distance == 1
    assert any(f"for all {COUNT} micro-batches" in reason for reason in plan.reasons)


def test_harmony_updates_a_layer_right_after_its_backward_where_that_is_faster() -> None:
    slow = machine(update=1e8)
    plan = made("harmony", on=slow)
    assert plan.updated(Update.AHEAD) == NAMES
    costs = Costs(TRACE, slow, Masters.WHOLE)
    assert seconds(plan) < together(updating(plan, Update.AHEAD), costs, COUNT).seconds
    assert seconds(plan) < seconds(made("mobius", on=slow))


def test_mobius_has_as_many_layers_on_the_device_as_are_fastest() -> None:
    """With a slow link more of them: the last ones of the forward are there for the backward."""
    slow = machine(h2d=2e7, d2h=2e7)
    plan = made("mobius", on=slow)
    count = len(plan.streaming.slots)
    assert count > 2 and plan.streaming.prefetch_distance == count - 1
    costs = Costs(TRACE, slow, Masters.WHOLE)
    fewer = replace(plan, streaming=replace(plan.streaming, slots=(BLOCK, BLOCK), prefetch_distance=1))
    assert seconds(plan) < together(fewer, costs, COUNT).seconds
    assert not plan.updated(Update.AHEAD) and not plan.streaming.overlap_update


def test_inputs_move_to_the_host_where_the_device_has_no_room_for_those_of_all() -> None:
    """Room for two layers and one micro-batch, and not for the inputs of every layer of three more."""
    free = made("harmony")
    needs = free.accumulation
    assert needs is not None and needs.device_further > 0
    tight = made("harmony", needs.needed(Tier.DEVICE, COUNT) - 2 * needs.device_further)
    assert tight.accumulation is not None
    assert tight.streaming.host_activations > 0 or tight.streaming.slots < free.streaming.slots
