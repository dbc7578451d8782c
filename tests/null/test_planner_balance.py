"""How many updates run ahead of their step and how many on the device, beside trying every pair of numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from forebay.checking import check
from forebay.errors import DoesNotFit
from forebay.machine import Machine
from forebay.memory import Tier
from forebay.planners import Bench, Problem, balance, make_plan
from forebay.planners.auto import levels, searched
from forebay.planners.balance import SPENT, SPENT_LAST, balanced
from forebay.planners.bench import SIMULATIONS
from forebay.planners.device_updates import candidates as device_candidates
from forebay.planners.device_updates import fastest_there
from forebay.planners.homes import at_home_anew, on_host
from forebay.planners.parts import DEDICATED, KEPT, RESIDENT, Draft
from forebay.planners.policies import POLICIES
from forebay.planners.policies import settled as settled_by
from forebay.planners.shapes import Filling, around, filled
from forebay.planners.speculation import candidates, fastest_ahead, fits
from forebay.plans import Update
from forebay.trace import Trace
from tests.null.planning import ENOUGH, asked, chain, lopsided, machine

N = 8

MACHINES = [
    machine(compute=compute, h2d=h2d, d2h=h2d, update=update, disk=1e8)
    for compute in (2e8, 1e9)
    for h2d in (2e8, 1e9)
    for update in (3e7, 1e8, 4e8)
]


@cache
def trace() -> Trace:
    return chain(N, saved=2)


def problem(on: Machine, *, device: int = ENOUGH, host: int = ENOUGH) -> Problem:
    return asked(trace(), on, device=device, host=host)


def anything(draft: Draft) -> bool:
    return True


def one_after_the_other(bench: Bench, draft: Draft) -> Draft:
    """``draft`` with what the two planners before this one make of it."""
    return fastest_there(bench, (fastest_ahead(bench, draft, anything), draft), anything)


def every_pair(bench: Bench, draft: Draft) -> float:
    """Seconds of the fastest pair of numbers, each simulated, with a window that is wide enough for all."""
    able = device_candidates(bench, draft)
    window = bench.sizer(draft.streaming.update_chunk).update_window(able)
    least = bench.seconds(draft)
    for there in range(len(able) + 1):
        streaming = replace(draft.streaming, update_window=window if there else 0)
        some = replace(draft.updating(Update.DEVICE, able[:there]), streaming=streaming)
        others = candidates(bench, some)
        for ahead in range(len(others) + 1):
            chosen = {others[number * len(others) // ahead] for number in range(ahead)}
            least = min(least, bench.seconds(some.updating(Update.AHEAD, chosen)))
    return least


@pytest.mark.thinned(2)
@pytest.mark.parametrize("on", range(len(MACHINES)))
def test_it_is_near_the_best_of_all_pairs(on: int) -> None:
    bench = Bench(problem(MACHINES[on]))
    streamed = settled_by(bench, POLICIES["stream"])
    before = one_after_the_other(bench, streamed)
    simulated = bench.simulated
    found = balanced(bench, before, anything)
    assert bench.simulated - simulated <= (SPENT + SPENT_LAST) * SIMULATIONS
    assert bench.seconds(found) <= bench.seconds(before)
    assert bench.seconds(found) <= 1.02 * every_pair(bench, streamed)
    check(trace(), MACHINES[on], bench.plan("balanced", found))


def handed_on(on: Machine, spare: int, layers: int = 16) -> tuple[Bench, Draft]:
    """A bench with ``spare`` bytes of the device more than streaming takes, and what the two before leave there."""
    whole = chain(layers, saved=2)
    roomy = Bench(asked(whole, on, device=ENOUGH, host=ENOUGH))
    least = roomy.device(settled_by(roomy, POLICIES["stream"]))
    bench = Bench(asked(whole, on, device=least + spare, host=ENOUGH))
    return bench, one_after_the_other(bench, searched(bench, levels(bench)))


def test_both_numbers_change_where_neither_alone_gains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(balance, "LEAVING", ())  # as many blocks stay
    bench, before = handed_on(machine(compute=1e9, h2d=2e8, d2h=2e8, update=1e8), 1_000_000)
    found = balanced(bench, before, anything)
    assert bench.seconds(found) < 0.95 * bench.seconds(before)
    assert len(found.updated(Update.AHEAD)) > len(before.updated(Update.AHEAD))
    assert 0 < len(found.updated(Update.DEVICE)) < len(before.updated(Update.DEVICE))
    for how in (Update.AHEAD, Update.DEVICE):  # one as it is and the other as it was
        assert bench.seconds(found) < bench.seconds(found.updating(how, before.updated(how)))


def test_a_block_that_stays_may_be_worth_less_than_those_that_need_not_run_again() -> None:
    bench, before = handed_on(machine(compute=1e9, h2d=2e8, d2h=2e8, update=1e8), 1_200_000)
    found = balanced(bench, before, anything)
    assert bench.seconds(found) < 0.95 * bench.seconds(before)
    assert len(found.resident) < len(before.resident) and len(found.recompute) < len(before.recompute)
    assert fits(bench, found)


def test_a_single_slot_gives_way_to_several() -> None:
    """Through one slot nothing is fetched ahead, and an update on the device waits for what it reads."""
    on = machine(compute=1e9, h2d=2e8, d2h=2e8, update=1e8)
    bench, before = handed_on(on, 600_000)
    single = before.plain
    for staying in bench.model.blocks[:2]:
        single = single.placed(staying.name, RESIDENT)
    streaming = replace(single.streaming, slots=single.streaming.slots[-1:], prefetch_distance=0)
    single = replace(single, streaming=streaming)
    assert bench.fits_device(single) and len(single.streaming.slots) == 1
    found = balanced(bench, single, anything)
    assert len(found.streaming.slots) > 1 and bench.seconds(found) < 0.9 * bench.seconds(single)
    check(bench.known.costs.trace, on, bench.plan("balanced", found))


@pytest.mark.parametrize(("update", "compute"), [(2e8, 1e9), (4e8, 4e9), (8e8, 4e9)])
def test_blocks_that_no_slot_is_shared_by_leave_for_slots_of_their_own(update: float, compute: float) -> None:
    """What does not stay has a slot of its own, and what does keeps compute busy with its updates."""
    bench, before = handed_on(machine(compute=compute, h2d=4e9, d2h=4e9, update=update), 2_000_000)
    assert not before.streaming.slots and not before.recompute
    found = balanced(bench, before, anything)
    assert bench.seconds(found) < 0.98 * bench.seconds(before)
    assert len(found.resident) < len(before.resident) and not found.streaming.slots
    elsewhere = [sum(len(draft.updated(how)) for how in (Update.AHEAD, Update.DEVICE)) for draft in (before, found)]
    assert elsewhere[0] < elsewhere[1]
    assert fits(bench, found)


@settings(max_examples=10, deadline=None)
@given(
    on=st.sampled_from(MACHINES),
    whole=st.sampled_from([trace, lopsided]),
    device=st.integers(500_000, 2_400_000),
    host=st.integers(1_500_000, 4_000_000),
    disk=st.sampled_from([0, 1 << 30]),
    dedicate=st.booleans(),
)
def test_it_is_no_slower_and_keeps_every_budget(
    on: Machine, whole: Callable[[], Trace], device: int, host: int, disk: int, dedicate: bool
) -> None:
    bench = Bench(asked(whole(), on, device=device, host=host, disk=disk))
    try:
        before = searched(bench, levels(bench))
    except DoesNotFit:
        event("does not fit")
        return
    if dedicate:  # what is left of the device is slots of blocks' own
        full = at_home_anew(bench, filled(bench, on_host(bench, before), Filling(most=len(before.resident))))
        before = full or before
    found = balanced(bench, before, anything)
    event("as it was" if found == before else "fewer stay" if len(found.resident) < len(before.resident) else "numbers")
    assert bench.seconds(found) <= bench.seconds(before)
    if found != before:
        assert fits(bench, found)
        plan = bench.plan("balanced", found)
        assert plan.device <= device and plan.host <= bench.problem.limit(Tier.HOST)
        check(whole(), on, plan)


def test_what_may_not_be_taken_is_not() -> None:
    bench = Bench(problem(MACHINES[0]))
    before = settled_by(bench, POLICIES["stream"])
    assert balanced(bench, before, lambda draft: False) == before
    assert balanced(bench, before, anything) != before


def test_slots_of_their_own_make_room_for_the_window() -> None:
    on = machine(compute=4e8, h2d=1e9, d2h=1e9, update=1e8)
    roomy = Bench(problem(on))
    least = roomy.device(settled_by(roomy, POLICIES["stream"]))
    bench = Bench(problem(on, device=least + 150_000))
    full = filled(bench, settled_by(bench, POLICIES["stream"]), Filling(most=0))
    own = [p for p in full.placements if p.parameters is Tier.DEVICE and not p.resident]
    found = balanced(bench, full, anything)
    assert own and found.updated(Update.DEVICE)
    assert sum(p.parameters is Tier.DEVICE for p in found.placements) < len(own)
    assert bench.seconds(found) < bench.seconds(full)


def test_what_no_slot_holds_keeps_its_own() -> None:
    """An embedding and a head, in slots of their own, beside layers that pass through slots of a layer's size: no room
    for a window is made of those."""
    on = machine(compute=4e8, h2d=1e9, d2h=1e9, update=1e8)
    roomy = Bench(asked(lopsided(), on, device=ENOUGH, host=ENOUGH))
    blocks = roomy.model.blocks
    draft = around(roomy, (blocks[0], blocks[-1]), DEDICATED, 2, KEPT)
    for spare in (0, 40_000, 120_000, 400_000, 2_000_000):
        bench = Bench(asked(lopsided(), on, device=roomy.device(draft) + spare, host=ENOUGH))
        found = balanced(bench, draft, anything)
        check(lopsided(), on, bench.plan("balanced", found))
        assert all(p.parameters is Tier.DEVICE for p in (found.placements[0], found.placements[-1]))
    assert found != draft


@pytest.mark.thinned(8)
@pytest.mark.parametrize("on", range(len(MACHINES)))
def test_who_has_a_faster_plan_is_not_searched_for_to_the_end(on: int) -> None:
    """The plan is what it would be, or no faster than the one that there is; and that takes fewer simulations."""
    least, most = (make_plan(problem(MACHINES[on]), policy).device for policy in ("stream-recompute", "resident"))
    alone = problem(MACHINES[on], device=(least + most) // 2)
    bench = Bench(alone)
    plan = make_plan(alone, "auto", bench)
    assert plan.step_seconds is not None
    simulated = []
    for part in (0.5, 0.95, 0.99, 1.001):
        beside = alone.beside(part * plan.step_seconds)
        other = Bench(beside)
        found = make_plan(beside, "auto", other)
        check(trace(), MACHINES[on], found)
        assert found == plan or (found.step_seconds or 0.0) >= part * plan.step_seconds
        simulated.append(other.simulated)
    assert found == plan and simulated[-1] == bench.simulated
    assert max(simulated) == bench.simulated
    if on < len(MACHINES) // 2:  # where compute is fast there may be nothing to balance
        assert simulated[0] < bench.simulated
