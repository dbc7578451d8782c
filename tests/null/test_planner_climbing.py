"""Small changes by chance at the end of ``auto``: never slower, always within the budgets, and the same every time."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.checking import check
from forebay.machine import Machine
from forebay.planners import Bench, Problem
from forebay.planners.bench import ACTIONS, SIMULATIONS
from forebay.planners.climbing import SPENT, _Changes, climbed
from forebay.planners.homes import at_home_anew
from forebay.planners.parts import Draft
from forebay.planners.policies import POLICIES
from forebay.planners.policies import settled as settled_by
from forebay.planners.speculation import fits
from forebay.plans import Update
from tests.null.planning import ENOUGH, asked, chain, machine

TRACE = chain(12, saved=2)
DEVICE = 420_000
SLOW = machine(compute=4e8, h2d=1e9, d2h=1e9, update=6e7, disk=1e8)
"""Its host is slower than anything else."""


def problem(on: Machine = SLOW, *, device: int = DEVICE, host: int = ENOUGH, disk: int = 0) -> Problem:
    return asked(TRACE, on, device=device, host=host, disk=disk)


def streamed(bench: Bench) -> Draft:
    """Everything streams, and every update is made at its step: far from the best."""
    draft = settled_by(bench, POLICIES["stream"])
    assert not draft.updated(Update.AHEAD) and not draft.updated(Update.DEVICE)
    return draft


def anything(draft: Draft) -> bool:
    return True


def test_it_climbs_from_far_below() -> None:
    """To a step that is a tenth shorter and more, and to the same draft every time."""
    found = []
    for _ in range(2):
        bench = Bench(problem())
        start = streamed(bench)
        found.append(climbed(bench, start, anything))
        assert bench.seconds(found[-1]) < 0.9 * bench.seconds(start)
        assert fits(bench, found[-1])
    assert found[0] == found[1]
    check(TRACE, SLOW, bench.plan("auto", found[0]))


def test_it_stops_where_nothing_gains_or_nothing_may_be_taken() -> None:
    bench = Bench(problem())
    top = climbed(bench, streamed(bench), anything)
    began = bench.simulated, bench.actions
    assert bench.seconds(climbed(bench, top, anything)) <= bench.seconds(top)
    start = streamed(bench)
    assert climbed(bench, start, lambda draft: False) == start
    assert bench.simulated - began[0] <= 2 * SPENT * SIMULATIONS and bench.actions - began[1] <= 3 * SPENT * ACTIONS
    # With updates that take no time no step is shorter than its computation.
    quick = Bench(problem(machine(compute=1e7, h2d=1e12, d2h=1e12, update=1e13)))
    start = streamed(quick)
    before = quick.simulated
    assert climbed(quick, start, anything) == start and quick.simulated - before <= 1


@given(seed=st.integers(0, 10_000), beside=st.sampled_from([0, 100_000, 400_000, ENOUGH]))
@settings(max_examples=12)
def test_changes_of_changes_are_drafts_that_can_be_planned(seed: int, beside: int) -> None:
    """Wherever chance leads, and however little of the host is beside what everything takes: what fits is accepted by
    the checker, and keeps its budgets."""
    free = Bench(problem())
    draft = streamed(free)
    host = free.arenas(draft).host + beside
    bench = Bench(problem(host=host))
    changes = _Changes(bench)
    changes._random.seed(seed)
    for _ in range(20):
        changed = changes.of(draft)
        if changed is not None and fits(bench, changed):
            draft = changed
            plan = bench.plan("auto", draft)
            check(TRACE, SLOW, plan)
            assert plan.device <= DEVICE and plan.host <= host


def test_what_has_no_room_on_the_device_is_not_placed_anew() -> None:
    """And a window for updates on the device that is one for small chunks is not asked to hold large ones."""
    bench = Bench(problem(disk=ENOUGH, device=1 << 21))
    draft = streamed(bench)
    wide = replace(draft, streaming=replace(draft.streaming, slots=(1 << 21, *draft.streaming.slots)))
    assert at_home_anew(bench, wide) is None
    block = draft.placements[0].block
    small = replace(draft.streaming, update_chunk=1024)
    window = bench.sizer(1024).update_window([block])
    moved = replace(draft, streaming=replace(small, update_window=window)).updating(Update.DEVICE, [block])
    assert bench.fits_device(moved) and at_home_anew(bench, moved) is None
    assert at_home_anew(bench, moved.plain) is not None
