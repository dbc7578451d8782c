"""Plans under which no save copies what is on disk: two places there, counted, proven and said."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forebay.arenas import arenas, arenas_of
from forebay.budgets import Budget, DiskBudget
from forebay.checking import check
from forebay.errors import CannotServe, DoesNotFit, PlanInvalid
from forebay.memory import Tier
from forebay.planners import Problem, make_plan
from forebay.planning import assess
from forebay.plans import Plan, Update
from forebay.simulation import simulate
from forebay.units import format_bytes
from tests.null.planning import ENOUGH, asked, chain, machine

pytestmark = pytest.mark.usefixtures("short_searches")

TRACE = chain(8, width=256)
ON = machine(compute=1e8, h2d=1e9, d2h=1e9, disk=1e9, update=1e9)
STATES = 2 * 4 * sum(p.numel for block in TRACE.model.blocks for p in block.parameters)
"""Bytes of both moments."""

SAID = "what is on disk has two places there: updates write beside the last checkpoint, no save copies it"


def problem(host: int, *, disk_copies: int, disk: int = ENOUGH, device: int = 1 << 21) -> Problem:
    return replace(asked(TRACE, ON, device=device, host=host, disk=disk), disk_copies=disk_copies)


def least_host(disk_copies: int) -> int:
    """Too few bytes for the states."""
    plan = make_plan(problem(ENOUGH, disk_copies=disk_copies), "stream")
    assert plan.disk == 0 and plan.streaming.disk_copies == 1 and SAID not in plan.reasons
    return plan.host - STATES // 2


def on_disk(plan: Plan) -> set[str]:
    return {p.block for p in plan.placements if Tier.DISK in (p.parameters, p.states)}


@pytest.mark.thinned(2)
@pytest.mark.parametrize("policy", ["stream", "auto"])
def test_twice_the_bytes_on_disk_and_no_other(policy: str) -> None:
    host = least_host(1)
    once = make_plan(problem(host, disk_copies=1), "stream")
    plan = make_plan(problem(host, disk_copies=2), policy)
    assert on_disk(plan) and plan.streaming.disk_copies == 2
    if policy == "stream":
        assert plan.placements == once.placements and plan.host == once.host
        assert plan.disk == 2 * once.disk > 0
        assert SAID in plan.reasons and SAID not in once.reasons
    check(TRACE, ON, plan)
    peaks = simulate(TRACE, ON, plan).peaks
    assert peaks[Tier.DISK] == plan.disk


@pytest.mark.thinned(3)
@pytest.mark.parametrize(("compute", "update"), [(1e8, 1e8), (1e9, 3e8), (1e9, 1e9)])
def test_what_is_updated_ahead_on_disk_has_three_places(compute: float, update: float) -> None:
    """One that updates read, one that those ahead of their step write, and one that the checkpoint has. Of a host that
    is nearly full more goes to the disk for second copies. And where there is a disk with the room, no step is slower
    than one that no checkpoint leaves alone."""
    on = machine(compute=compute, h2d=1e9, d2h=1e9, disk=1e9, update=update)
    everything = make_plan(replace(problem(ENOUGH, disk_copies=2), machine=on), "stream").host
    found = set[int]()
    for host in range(5 * everything // 8, everything, everything // 8):
        plan = make_plan(replace(problem(host, disk_copies=2), machine=on), "auto")
        check(TRACE, on, plan)
        there = on_disk(plan)
        ahead = there.intersection(plan.updated(Update.AHEAD))
        sizes = arenas_of(TRACE.model, plan, TRACE.state_names)
        sizer = {p.block: (p.parameters is Tier.DISK, p.states is Tier.DISK) for p in plan.placements}
        once = {
            b.name: b.nbytes * sizer[b.name][0] + 8 * b.trainable_numel * sizer[b.name][1] for b in TRACE.model.blocks
        }
        assert plan.disk == sizes.disk == sum(once[b] * (3 if b in ahead else 2) for b in there)
        assert sizes.disk_other_parameters + sizes.disk_other_states == sum(once.values())
        assert any("or three: updates write" in reason for reason in plan.reasons) == bool(ahead)
        found.add(len(ahead))
        # The same search over the same drafts.
        without = make_plan(replace(problem(host, disk_copies=1), machine=on), "auto")
        assert plan.placements == without.placements and plan.step_seconds == without.step_seconds
    assert max(found) > 1


def test_the_proof_counts_both_places() -> None:
    plan = make_plan(problem(least_host(1), disk_copies=2), "stream")
    short = replace(plan, disk=plan.disk - 1)
    with pytest.raises((DoesNotFit, PlanInvalid), match="disk"):
        check(TRACE, ON, short)
    budget = replace(plan.budget, disk=replace(plan.budget.disk, nbytes=plan.disk - 1)) if plan.budget.disk else None
    assert budget is not None
    with pytest.raises(DoesNotFit, match="disk"):
        check(TRACE, ON, replace(plan, budget=budget))


def test_a_disk_with_room_for_one_is_refused() -> None:
    host = least_host(1)
    once = make_plan(problem(host, disk_copies=1), "stream")
    assert make_plan(problem(host, disk_copies=1, disk=once.disk), "stream").disk == once.disk
    assert make_plan(problem(host, disk_copies=2, disk=2 * once.disk), "stream").disk == 2 * once.disk
    with pytest.raises(DoesNotFit) as refusal:
        make_plan(problem(host, disk_copies=2, disk=2 * once.disk - 1), "stream")
    assert refusal.value.tier == Tier.DISK.value


@pytest.mark.thinned(2)
@pytest.mark.parametrize("policy", ["stream", "auto", "smart-infinity"])
def test_a_report_says_what_of_the_disk_saves_in_place_take(policy: str) -> None:
    """As much as the plan that has both places; where there is no room for them, that saves copy."""
    budget = Budget(1 << 21, least_host(1), None, DiskBudget("/disk", ENOUGH))
    report = assess("chain", TRACE, ON, budget, policy)
    assert report.plan is not None and report.plan.disk
    said = [note for note in report.notes if "saved on its way" in note]
    if policy == "smart-infinity":
        assert not said
        return
    streaming = replace(report.plan.streaming, disk_copies=2)
    needed = arenas(TRACE.model, report.plan.placements, streaming, TRACE.state_names).disk
    assert needed >= 2 * report.plan.disk - sum(report.second_copies.values())
    (words,) = said
    assert f"it takes {format_bytes(needed)} of the disk" in words
    small = replace(budget, disk=DiskBudget("/disk", report.plan.disk))
    report = assess("chain", TRACE, ON, small, policy)
    assert any("saved on its way" in note and "it copies what is on disk" in note for note in report.notes)


def test_updates_where_states_lie_are_refused() -> None:
    with pytest.raises(CannotServe, match="crash_safe has updates write beside the last checkpoint"):
        make_plan(problem(ENOUGH, disk_copies=2), "smart-infinity")


@pytest.mark.thinned(2)
@pytest.mark.parametrize("policy", ["stream", "auto", "smart-infinity"])
def test_checksums_take_eight_bytes_a_page_of_the_host(policy: str) -> None:
    said = "what is read of it is held against checksums of what was written: 8 bytes of the host for each 4.0 KiB"
    host = least_host(1)
    asked = problem(host, disk_copies=1)
    plan = make_plan(replace(asked, checksums=True), policy)
    assert on_disk(plan) and plan.streaming.checksums
    assert any(said in reason for reason in plan.reasons)
    check(TRACE, ON, plan)
    peaks = simulate(TRACE, ON, plan).peaks
    assert peaks[Tier.HOST] == plan.host <= host
    without = make_plan(asked, policy)
    assert not without.streaming.checksums and not any(said in reason for reason in without.reasons)
    if policy == "smart-infinity":  # everything is on disk in both
        assert plan.host == without.host + 8 * plan.disk // 4096
    with pytest.raises((DoesNotFit, PlanInvalid), match="host"):
        check(TRACE, ON, replace(plan, host=plan.host - 1))
    assert make_plan(replace(problem(ENOUGH, disk_copies=1), checksums=True), "stream").streaming.checksums is False
