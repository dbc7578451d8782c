"""Which blocks are updated ahead of their step: those first that gain most, as far as there is room, and only if a step
is faster by it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.checking import check
from forebay.machine import Machine
from forebay.memory import Tier
from forebay.planners import Bench, Problem, alternatives, make_plan
from forebay.planners.homes import more_on_disk
from forebay.planners.parts import Draft
from forebay.planners.policies import POLICIES, settled
from forebay.planners.reasons import bought_by_speculation
from forebay.planners.speculation import (
    GAIN,
    MORE_GAIN,
    ahead,
    candidates,
    judged,
    second_copies,
    unhindered,
    usually,
)
from forebay.plans import Plan, Update
from forebay.trace import Trace
from forebay.units import format_seconds
from tests.null.planning import ENOUGH, asked, chain, machine

pytestmark = pytest.mark.usefixtures("short_searches")

N = 8
ELEMENTS = 2 * 64 * 64
PARAMETERS, STATES = 4 * ELEMENTS, 2 * 4 * ELEMENTS
"""Bytes of one block: fp32, with two moments."""

# Updates take half as long as compute; without any under backward they are too long for the next forward.
BALANCED = machine(compute=4e8, h2d=1e9, d2h=1e9, update=4e8)
QUICK = machine(compute=4e8, h2d=1e9, d2h=1e9, update=1e10)


@cache
def trace() -> Trace:
    return chain(N, saved=2)


def problem(on: Machine = BALANCED, *, host: int = ENOUGH, disk: int = 0, pinned: int | None = None) -> Problem:
    """Something that streams: the device has room for little more than three blocks and what a step makes."""
    return asked(trace(), on, device=400_000, host=host, disk=disk, pinned=pinned)


def without(asked_for: Problem, plan: Plan) -> float:
    """Seconds of a step of ``plan`` without updates ahead of it."""
    return Bench(asked_for).exact(Draft.of(plan).updating(Update.AHEAD, ())).step_seconds


def seconds(plan: Plan) -> float:
    assert plan.step_seconds is not None
    return plan.step_seconds


@pytest.mark.parametrize("policy", ["stream", "stream-recompute", "keep", "auto"])
def test_updates_run_under_backward_where_a_step_waits_for_them(policy: str) -> None:
    asked_for = problem()
    plan = make_plan(asked_for, policy)
    assert plan.updated(Update.AHEAD)
    assert seconds(plan) < (1 - GAIN) * without(asked_for, plan)
    check(trace(), BALANCED, plan)


def test_they_are_spread_over_the_model() -> None:
    """And the one whose gradient lands first is among them; the last ones alone would gain less."""
    asked_for = problem()
    plan = make_plan(asked_for, "stream")
    bench, draft = Bench(asked_for), Draft.of(plan)
    able = candidates(bench, draft)
    assert able == tuple(reversed([b.name for b in trace().model.blocks]))
    count = len(plan.updated(Update.AHEAD))
    assert 1 < count < N
    assert set(plan.updated(Update.AHEAD)) == {able[number * N // count] for number in range(count)}
    for more in range(1, N):
        last = frozenset(able[:more])
        other = draft.updating(Update.AHEAD, last)
        assert seconds(plan) <= bench.exact(other).step_seconds


@pytest.mark.parametrize("policy", ["stream", "auto", "resident"])
def test_none_where_updates_are_hidden_anyway(policy: str) -> None:
    asked_for = replace(
        problem(QUICK), budget=replace(problem().budget, device=ENOUGH if policy == "resident" else 400_000)
    )
    assert make_plan(asked_for, policy).updated(Update.AHEAD) == ()


def test_second_copies_are_within_the_host_and_pay_for_themselves() -> None:
    """With room for more and more of them no step is slower; with none there are none."""
    free = make_plan(problem(), "stream")
    base = Draft.of(free).updating(Update.AHEAD, ())
    least = Bench(problem()).arenas(base).host
    found = []
    for copies in range(N + 1):
        host = least + copies * (PARAMETERS + STATES)
        plan = make_plan(problem(host=host), "stream")
        assert plan.host == least + len(plan.updated(Update.AHEAD)) * (PARAMETERS + STATES) <= host
        found.append(plan)
    assert found[0].updated(Update.AHEAD) == () and found[-1] == replace(free, budget=found[-1].budget)
    assert all(seconds(more) <= seconds(less) for less, more in pairwise(found))
    # One byte less than a second copy is none.
    assert make_plan(problem(host=least + PARAMETERS + STATES - 1), "stream").updated(Update.AHEAD) == ()


@pytest.mark.parametrize("update", [2e7, 1e8, 4e8, 1e10])
@pytest.mark.parametrize("compute", [1e8, 4e8, 2e9])
def test_no_updates_ahead_are_worth_more_than_updates_that_take_no_time(compute: float, update: float) -> None:
    """So nothing is simulated where those would gain nothing."""
    bench = Bench(problem(machine(compute=compute, h2d=1e9, d2h=1e9, update=update)))
    draft = settled(bench, POLICIES["stream"])
    able, least = candidates(bench, draft), unhindered(bench, draft)
    for count in range(1, N + 1):
        ahead_of_step = draft.updating(Update.AHEAD, able[:count])
        assert least <= bench.seconds(ahead_of_step) * (1 + 1e-9)
    fresh = Bench(bench.problem)
    assert ahead(fresh, draft) == draft or least <= fresh.seconds(draft) * (1 - GAIN)
    if least > fresh.seconds(draft) * (1 - GAIN):
        assert fresh.simulated == 1


@pytest.mark.thinned(2)
@pytest.mark.parametrize("update", [1e7, 3e7, 1e8, 3e8])
def test_of_a_long_model_as_many_are_tried_as_backward_has_time_for(update: float) -> None:
    """And a few more and fewer: what is found is as fast as with any number of them."""
    on = machine(compute=4e8, h2d=1e9, d2h=1e9, update=update)
    bench = Bench(asked(chain(80, width=64, saved=1, activation=64), on, device=60_000))
    draft = settled(bench, POLICIES["stream"])
    assert bench.is_long
    found = ahead(bench, draft)
    assert bench.simulated <= 9
    able = candidates(bench, draft)
    every = [draft]
    for count in range(1, 1 + len(able)):
        chosen = frozenset(able[number * len(able) // count] for number in range(count))
        every.append(draft.updating(Update.AHEAD, chosen))
    assert found in every
    assert bench.seconds(found) <= (1 + GAIN) * min(map(bench.seconds, every))


def test_long_drafts_are_compared_with_as_many_as_there_is_room_for() -> None:
    """None where the host has no room for the second copies; what is not long as it is."""
    on = machine(compute=4e8, h2d=1e9, d2h=1e9, update=1e8)
    trace = chain(80, width=64, saved=1, activation=64)
    bench = Bench(asked(trace, on, device=60_000))
    draft = settled(bench, POLICIES["stream"])
    usual = usually(bench, draft)
    assert 0 < len(usual.updated(Update.AHEAD)) < len(draft.placements) and usual.plain == draft
    assert judged(bench, draft) == bench.seconds(usual) < bench.seconds(draft)
    assert usually(bench, usual) == usual
    full = bench.with_limits(asked(trace, on, device=60_000, host=bench.arenas(draft).host))
    assert usually(full, draft) == draft
    short = Bench(problem(on))
    draft = settled(short, POLICIES["stream"])
    assert not short.is_long and usually(short, draft) == draft


def on_disk(bench: Bench) -> Draft:
    """All blocks at home on disk."""
    draft = settled(bench, POLICIES["stream"])
    homes = tuple(replace(p, parameters=Tier.DISK, states=Tier.DISK) for p in draft.placements)
    return replace(draft, placements=homes, streaming=replace(draft.streaming, host_slots=(PARAMETERS,) * 3))


def test_what_is_on_disk_has_its_second_copy_there() -> None:
    """Nothing is copied, so that more is never worse; what passes through the host is no more."""
    on = machine(compute=4e8, h2d=1e9, d2h=1e9, update=1e10, disk=3e8)
    bench = Bench(problem(on, disk=ENOUGH))
    draft = on_disk(bench)
    found = ahead(bench, draft)
    assert bench.seconds(found) < (1 - GAIN) * bench.seconds(draft)
    nbytes = len(found.updated(Update.AHEAD)) * (PARAMETERS + STATES)
    assert second_copies(bench, found) == {Tier.HOST: 0, Tier.PINNED: 0, Tier.DISK: nbytes}
    every = draft.updating(Update.AHEAD, [p.block for p in draft.placements])
    assert bench.seconds(every) <= bench.seconds(found) * (1 + MORE_GAIN)
    check(trace(), on, bench.plan("all", every))
    # A disk that has room for one copy of everything and three more.
    once = bench.arenas(draft)
    room = once.disk + 3 * (PARAMETERS + STATES) + 1
    few = ahead(Bench(problem(on, disk=room)), draft)
    assert len(few.updated(Update.AHEAD)) == min(3, len(found.updated(Update.AHEAD)))


def test_on_a_full_host_states_make_room_for_second_copies() -> None:
    """They go to the disk, if there is one and the step gains by it."""
    large = chain(N, width=1024, saved=2)  # beside which what passes to a disk through the host is little
    device = 4 * sum(p.nbytes for p in large.model.blocks[0].parameters)

    def bench(disk_rate: float = 1e10, host: int = ENOUGH, disk: int = 0) -> Bench:
        on = machine(compute=2e9, h2d=2e10, d2h=2e10, update=2e9, disk=disk_rate)
        return Bench(asked(large, on, device=device, host=host, disk=disk))

    draft = settled(bench(), POLICIES["stream"])
    host = bench().arenas(draft).host
    full = bench(host=host, disk=ENOUGH)
    assert settled(full, POLICIES["stream"]) == draft and not full.arenas(draft).disk
    found = ahead(full, draft)
    sizes = full.arenas(found)
    assert found.updated(Update.AHEAD) and sizes.host <= host and sizes.disk
    assert full.seconds(found) < (1 - GAIN) * full.seconds(draft)
    assert full.problem.machine is not None
    check(large, full.problem.machine, full.plan("full", found))
    # Without a disk, and with one that would take longer than they gain, it stays as it is.
    assert ahead(bench(host=host), draft) == draft
    assert ahead(bench(disk_rate=1e8, host=host, disk=ENOUGH), draft) == draft


def test_what_it_gains_is_said_beside_a_plan_that_needs_no_disk() -> None:
    """What went to the disk for the sake of second copies would only cost without them."""
    on = machine(compute=4e8, h2d=1e9, d2h=1e9, update=1e10, disk=3e8)
    bench = Bench(problem(on, disk=ENOUGH))
    at_disk, at_host = on_disk(bench), settled(bench, POLICIES["stream"])
    found = ahead(bench, at_disk)
    assert bench.seconds(found) < (1 - GAIN) * bench.seconds(at_disk)
    (line,) = bought_by_speculation(bench, found)
    assert bench.seconds(at_host) < bench.seconds(at_disk)
    assert line.endswith(f"({format_seconds(bench.seconds(at_host))} otherwise)")


def test_more_may_go_to_disk_than_has_to() -> None:
    """A second copy there takes no host memory: the most on disk first, the states alone last."""
    on = machine(disk=3e8)
    draft = settled(Bench(problem(on)), POLICIES["stream"])
    assert list(more_on_disk(Bench(problem(on)), draft)) == []
    own = draft.placed(trace().model.blocks[1].name, (Tier.DEVICE, Tier.HOST, Tier.HOST))
    for one in (draft, own):
        found = list(more_on_disk(Bench(problem(on, disk=ENOUGH)), one))
        assert [sum(p.parameters is Tier.DISK for p in more.placements) for more in found] == [8, 6, 4, 0]
        assert all(p.states is Tier.DISK for more in found for p in more.placements)
    # A slot of a block's own is one for all then.
    assert found[0].streaming.slots == (*draft.streaming.slots, PARAMETERS)


def test_nothing_loses_its_page_locked_memory_to_a_second_copy() -> None:
    base = Bench(problem()).arenas(Draft.of(make_plan(problem(), "stream")).updating(Update.AHEAD, ()))
    locked = sum(nbytes for _, nbytes in base.pinnable)
    assert make_plan(problem(pinned=locked), "stream").updated(Update.AHEAD) == ()
    enough = make_plan(problem(pinned=locked + N * PARAMETERS), "stream")
    assert enough.updated(Update.AHEAD) and enough.pinned == locked + len(enough.updated(Update.AHEAD)) * PARAMETERS


def test_where_cores_are_shared_only_the_disk_is_worth_waiting_for_under_backward() -> None:
    shared = replace(problem(), overlap_update=False)
    bench = Bench(shared)
    draft = Draft.of(make_plan(problem(), "stream"))
    assert candidates(bench, draft) == () and ahead(bench, draft.updating(Update.AHEAD, ())).updated(Update.AHEAD) == ()
    name = trace().model.blocks[2].name
    assert candidates(bench, draft.placed(name, (Tier.HOST, Tier.HOST, Tier.DISK))) == (name,)


def test_frozen_and_resident_blocks_are_no_candidates() -> None:
    first, second, *_ = (b.name for b in trace().model.blocks)
    bench = Bench(problem())
    draft = Draft.of(make_plan(problem(), "stream")).updating(Update.AHEAD, ())
    resident = (Tier.DEVICE, Tier.DEVICE, Tier.DEVICE)
    assert first not in candidates(bench, draft.placed(first, resident))
    frozen = replace(
        trace(),
        segments=tuple(replace(s, ops=tuple(replace(o, gradients=()) for o in s.ops)) for s in trace().segments),
    )
    assert candidates(Bench(asked(frozen, BALANCED, device=400_000)), draft) == ()
    assert second in candidates(bench, draft)


def test_the_reasons_and_the_alternative_say_what_it_costs() -> None:
    asked_for = problem()
    bench = Bench(asked_for)
    plan = make_plan(asked_for, "auto", bench)
    line = next(reason for reason in plan.reasons if "second copy" in reason)
    host = second_copies(bench, Draft.of(plan))[Tier.HOST]
    assert host and "of host memory" in line and " saves " in line and "otherwise" in line
    if len(plan.updated(Update.AHEAD)) < len(candidates(bench, Draft.of(plan))):
        assert f"updates of {len(plan.updated(Update.AHEAD))} of" in line
    found = alternatives(asked_for, plan, bench)
    plain = [other for other in found if other.plan.planner == "auto without second copies"]
    assert plain and plain[0].plan.host == plan.host - host and plain[0].step_seconds > seconds(plan)
    assert not any(other.plan.updated(Update.AHEAD) for other in found)


@settings(max_examples=15)
@given(st.floats(2e7, 2e9), st.floats(1e8, 1e10), st.floats(5e6, 1e9), st.integers(0, 12))
def test_never_slower_than_without_and_never_over_the_host(
    compute: float, link: float, update: float, copies: int
) -> None:
    host = 1_100_000 + copies * (PARAMETERS + STATES)
    asked_for = problem(machine(compute=compute, h2d=link, d2h=link, update=update), host=host)
    plan = make_plan(asked_for, "stream")
    assert plan.host <= host
    assert seconds(plan) <= without(asked_for, plan) * (1 - GAIN * bool(plan.updated(Update.AHEAD)))
    assert make_plan(asked_for, "stream") == plan
