"""Delayed updates on paper: one step late, in the words of the plan, in the program and in its seconds. No torch."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forebay.checking import check
from forebay.errors import ConfigError, PlanInvalid
from forebay.lowering import lower
from forebay.lowering.liveness import device_bound
from forebay.machine import Machine
from forebay.memory import Tier
from forebay.planners import INEXACT, PLANNERS, STATES, make_plan
from forebay.planners.states.zero_offload import WARM_UP
from forebay.plans import Placement, Plan, Streaming, Update
from forebay.program import Verb
from forebay.simulation import simulate
from forebay.timeline import Lane
from tests.null.planning import ENOUGH, asked, chain, machine

TRACE = chain(6)
PARAMETERS = TRACE.model.parameter_nbytes
SLOW = machine(update=2e7)
"""The update of a step takes longer than its forward and backward."""


def made(policy: str, on: Machine = SLOW, device: int = ENOUGH) -> Plan:
    return make_plan(asked(TRACE, on, device=device), policy)


LATEST = made("zero-offload-delayed")


def test_it_is_asked_for_by_name_and_no_exact_policy() -> None:
    assert PLANNERS["zero-offload-delayed"] is INEXACT["zero-offload-delayed"] and not set(INEXACT) & set(STATES)


def test_the_plan_is_that_of_zero_offload_and_says_what_it_changes() -> None:
    exact = made("zero-offload")
    assert LATEST.placements == exact.placements and (LATEST.device, LATEST.host) == (exact.device, exact.host)
    assert LATEST.streaming.delay_after == WARM_UP and exact.streaming.delay_after is None
    (words,) = LATEST.changes_numbers
    assert "a step late" in words and f"from step {WARM_UP + 1} on" in words and not exact.changes_numbers
    assert Plan.from_json(LATEST.to_json()) == LATEST


@pytest.mark.parametrize("on", [SLOW, machine(), machine(h2d=1e7, d2h=1e7)], ids=["update", "even", "link"])
def test_its_program_is_right_and_within_its_budgets(on: Machine) -> None:
    device = made("zero-offload", on).device
    plan = made("zero-offload-delayed", on, device)
    check(TRACE, on, plan)
    peaks = simulate(TRACE, on, plan).peaks
    assert peaks[Tier.DEVICE] <= plan.device == device_bound(TRACE, plan) <= device
    assert peaks[Tier.HOST] <= plan.host


def test_the_update_of_a_step_runs_under_the_next_one() -> None:
    """The exact step is compute and then the update; the delayed one is the longer of the two, with the copies of what
    was updated, which have to leave the host before the next update writes there."""
    exact, late = made("zero-offload"), LATEST
    timeline = simulate(TRACE, SLOW, late)
    ends = {lane: max(e.end for e in timeline.events if e.lane is lane) for lane in (Lane.COMPUTE, Lane.UPDATE)}
    updates = [e for e in timeline.events if e.lane is Lane.UPDATE]
    compute = [e for e in timeline.events if e.lane is Lane.COMPUTE]
    assert any(u.start < c.end and c.start < u.end for u in updates for c in compute)
    assert ends[Lane.UPDATE] > ends[Lane.COMPUTE]
    steps = len(timeline.step_seconds)
    updating = sum(e.end - e.start for e in updates) / steps
    computing = sum(e.end - e.start for e in compute) / steps
    copying = PARAMETERS / 1e8
    assert exact.step_seconds is not None and late.step_seconds is not None
    assert exact.step_seconds >= computing + updating
    assert max(computing, updating) <= late.step_seconds <= max(computing, updating + copying) * 1.1
    assert late.step_seconds < exact.step_seconds


def test_what_was_updated_leaves_the_host_between_two_updates() -> None:
    program = lower(TRACE, LATEST)
    block = TRACE.model.blocks[2].name
    own = [a for a in program.actions if a.block == block and a.verb in (Verb.FETCH, Verb.UPDATE)]
    updates = [a.step for a in own if a.verb is Verb.UPDATE]
    assert updates == sorted(updates) and set(updates) == set(range(program.steps))
    for step in range(1, program.steps):
        verbs = [a.verb for a in own if a.step == step]
        assert verbs[0] is Verb.FETCH and set(verbs[1:]) == {Verb.UPDATE}


def test_the_program_of_one_schedule_is_refused_for_the_other() -> None:
    exact = replace(LATEST, streaming=replace(LATEST.streaming, delay_after=None))
    with pytest.raises(PlanInvalid, match=r"it reads block .* as action .* copied it, and action .* may change that"):
        check(TRACE, SLOW, LATEST, lower(TRACE, exact))
    with pytest.raises(PlanInvalid, match=r"it reads block .* as action .* copied it, without action"):
        check(TRACE, SLOW, exact, lower(TRACE, LATEST))


def test_settling_after_each_step_makes_it_slower_and_no_more_exact() -> None:
    settled = replace(LATEST, streaming=replace(LATEST.streaming, overlap_update=False))
    check(TRACE, SLOW, settled)
    exact = made("zero-offload")
    assert exact.step_seconds is not None
    assert simulate(TRACE, SLOW, settled).step_seconds[-1] == pytest.approx(exact.step_seconds, rel=0.1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"changes_numbers": ()}, "must say in changes_numbers"),
        (
            {"placements": tuple(p.updating(Update.AHEAD) for p in LATEST.placements)},
            "set the update of block layers.0 to step",
        ),
        (
            {"placements": tuple(Placement(b.name, *[Tier.HOST] * 3) for b in TRACE.model.blocks)},
            "layers.0 on the host",
        ),
        ({"placements": tuple(Placement(b.name, *[Tier.DEVICE] * 3) for b in TRACE.model.blocks)}, "layers.0 on the"),
    ],
)
def test_what_cannot_be_delayed_is_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        replace(LATEST, **changes)  # type: ignore[arg-type]


def test_a_delay_is_a_number_of_steps() -> None:
    with pytest.raises(ConfigError, match="delay_after must be 0 steps or more"):
        Streaming(delay_after=-1)
