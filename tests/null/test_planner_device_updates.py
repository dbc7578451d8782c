"""Which blocks are updated on the device: the first ones of the forward, as many as make a step faster, where the host
holds it up with its updates and the device has memory of its own."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from forebay.checking import check
from forebay.errors import DoesNotFit
from forebay.machine import Machine
from forebay.memory import Tier
from forebay.planners import Bench, Problem, make_plan
from forebay.planners.auto import levels, searched
from forebay.planners.coarse import CHUNKS
from forebay.planners.device_updates import at_best, at_home_again, candidates, fastest_there, there
from forebay.planners.parts import Draft
from forebay.planners.policies import POLICIES, settled
from forebay.planners.search import TIE
from forebay.planners.speculation import GAIN
from forebay.plans import Plan, Update
from forebay.trace import Trace
from tests.null.planning import ENOUGH, asked, chain, machine

pytestmark = pytest.mark.usefixtures("short_searches")

N = 8
ELEMENTS = 2 * 64 * 64
CELL = 4 * 4 * ELEMENTS
"""Bytes of a block in the window: fp32, with two moments, and its gradients."""

SLOW_HOST = machine(compute=4e8, h2d=1e9, d2h=1e9, update=1e8)
QUICK = machine(compute=1e9, h2d=1e9, d2h=1e9, update=1e8)
QUICK_HOST = machine(compute=4e8, h2d=1e9, d2h=1e9, update=1e10)


@cache
def trace() -> Trace:
    return chain(N, saved=2)


def problem(on: Machine = SLOW_HOST, *, device: int = 900_000, host: int = ENOUGH) -> Problem:
    return asked(trace(), on, device=device, host=host)


def streamed(bench: Bench) -> Draft:
    """Every block passes through slots: there is room for a window."""
    return settled(bench, POLICIES["stream"])


def anything(draft: Draft) -> bool:
    return True


def seconds(plan: Plan) -> float:
    assert plan.step_seconds is not None
    return plan.step_seconds


def test_the_first_blocks_of_the_forward_where_the_host_is_slow() -> None:
    bench = Bench(problem())
    draft = streamed(bench)
    names = [b.name for b in trace().model.blocks]
    assert candidates(bench, draft) == tuple(names)
    found = there(bench, draft)
    moved, able = found.updated(Update.DEVICE), candidates(bench, found)
    assert moved and moved == able[: len(moved)]
    assert found.streaming.update_window == 3 * CELL
    assert bench.seconds(found) < (1 - GAIN) * bench.seconds(draft)
    check(trace(), SLOW_HOST, bench.plan("there", found))
    # Of all counts none is much faster, with a handful of simulations.
    tried = bench.simulated
    assert tried <= 18
    every = [found.updating(Update.DEVICE, able[:count]) for count in range(1, len(able) + 1)]
    assert bench.seconds(found) <= 1.02 * min(bench.seconds(one) for one in every)


def everything(bench: Bench, base: Draft) -> float:
    """Seconds of the fastest number of first blocks on the device, each of them simulated."""
    able = candidates(bench, base)
    window = bench.sizer(base.streaming.update_chunk).update_window(able)
    wide = replace(base, streaming=replace(base.streaming, update_window=window))
    each = [wide.updating(Update.DEVICE, able[:count]) for count in range(1, len(able) + 1)]
    return min(bench.seconds(one) for one in (base, *each))


@pytest.mark.parametrize("compute", [2e8, 4e8, 1e9])
@pytest.mark.parametrize("h2d", [2e8, 1e9])
@pytest.mark.parametrize("update", [3e7, 1e8, 4e8])
def test_what_is_not_simulated_would_have_gained_nothing(compute: float, h2d: float, update: float) -> None:
    """``at_best`` is below what each number of blocks takes, so that the answer is as good as that of trying all."""
    on = machine(compute=compute, h2d=h2d, d2h=h2d, update=update)
    bench = Bench(problem(on, device=ENOUGH))
    draft = streamed(bench)
    able = candidates(bench, draft)
    window = bench.sizer(draft.streaming.update_chunk).update_window(able)
    for count in range(1, N + 1):
        wide = replace(draft, streaming=replace(draft.streaming, update_window=window))
        simulated = bench.seconds(wide.updating(Update.DEVICE, able[:count]))
        assert at_best(bench, draft, able[:count]) <= simulated * (1 + TIE)
    fresh = Bench(problem(on, device=ENOUGH))
    found = there(fresh, draft)
    assert fresh.seconds(found) <= max(everything(bench, draft) * 1.02, (1 - GAIN) * bench.seconds(draft))
    assert fresh.simulated <= 12


def test_auto_has_them() -> None:
    asked_for = problem()
    bench = Bench(asked_for)
    plan = make_plan(asked_for, "auto", bench)
    assert plan.updated(Update.DEVICE)
    at_home = bench.exact(at_home_again(Draft.of(plan))).step_seconds
    assert seconds(plan) < at_home
    line = next(reason for reason in plan.reasons if "updated on the device" in reason)
    able = len(candidates(bench, Draft.of(plan)))
    assert line.startswith(f"the first {len(plan.updated(Update.DEVICE))} of {able} block")
    assert "through a window of" in line and "at home" in line
    assert not any("no plan that keeps, moves or recomputes" in reason for reason in plan.reasons)
    check(trace(), SLOW_HOST, plan)


def test_none_where_the_host_holds_nothing_up() -> None:
    """Known without a simulation: with updates out of the way a step is as long."""
    bench = Bench(problem(QUICK_HOST))
    draft = streamed(bench)
    before = bench.seconds(draft), bench.simulated
    assert there(bench, draft) == draft
    assert make_plan(problem(QUICK_HOST), "auto").updated(Update.DEVICE) == ()
    assert (bench.seconds(draft), bench.simulated) <= (before[0], before[1] + 2)


def test_never_where_the_memory_of_the_device_is_the_hosts() -> None:
    on = replace(SLOW_HOST, device_kind="cpu")
    for one in (
        asked(replace(trace(), device="cpu"), on, device=900_000),
        asked(trace(), on, device=900_000),
        asked(replace(trace(), device="cpu"), SLOW_HOST, device=900_000),
    ):
        bench = Bench(one)
        draft = streamed(bench)
        assert candidates(bench, draft) == () and there(bench, draft) == draft
    assert make_plan(one, "auto").updated(Update.DEVICE) == ()


def test_never_with_states_in_few_bits() -> None:
    states = ("exp_avg:8bit", "exp_avg_scale:scale")
    few = replace(trace(), state_names=states)
    bench = Bench(asked(few, SLOW_HOST, device=900_000, states=states))
    assert candidates(bench, streamed(bench)) == ()


def test_frozen_and_resident_blocks_are_no_candidates() -> None:
    first, second, *_ = (b.name for b in trace().model.blocks)
    bench = Bench(problem())
    draft = streamed(bench)
    resident = (Tier.DEVICE, Tier.DEVICE, Tier.DEVICE)
    assert candidates(bench, draft.placed(first, resident))[0] == second
    segments = tuple(replace(s, ops=tuple(replace(o, gradients=()) for o in s.ops)) for s in trace().segments)
    assert candidates(Bench(asked(replace(trace(), segments=segments), SLOW_HOST, device=900_000)), draft) == ()


def test_the_window_is_as_wide_as_there_is_room() -> None:
    """Three chunks, two or one; with no room for one, and nothing that could leave, there is nothing."""
    bench = Bench(problem())
    draft = streamed(bench)
    one_slot = replace(draft, streaming=replace(draft.streaming, slots=draft.streaming.slots[:1], prefetch_distance=0))
    taken = bench.device(one_slot)
    for cells in (3, 2, 1):
        narrow = Bench(problem(device=taken + cells * CELL))
        found = there(narrow, one_slot)
        assert found.updated(Update.DEVICE) and found.streaming.update_window == cells * CELL
        assert narrow.fits_device(found)
    assert there(Bench(problem(device=taken + CELL - 1)), one_slot) == one_slot


def test_in_coarse_steps_the_window_is_as_many_chunks() -> None:
    """Steps that only compare have fewer and larger chunks."""
    large = chain(N, width=256, saved=2)
    bench = Bench(asked(large, SLOW_HOST, device=ENOUGH))
    draft = streamed(bench)
    names = tuple(b.name for b in large.model.blocks)
    assert 1024 < 2 * 1024 < sum(b.trainable_numel for b in large.model.blocks) // CHUNKS
    for cells in (1, 2):
        window = bench.sizer(1024).update_window(names, cells)
        how = replace(draft.streaming, update_chunk=1024, update_window=window)
        assert bench.seconds(replace(draft, streaming=how).updating(Update.DEVICE, names)) > 0


def test_blocks_that_stay_make_room() -> None:
    """Of a draft that leaves none."""
    asked_for = problem(QUICK, device=800_000)
    bench = Bench(asked_for)
    kept = searched(bench, levels(bench))
    assert len(kept.resident) > 3
    found = there(bench, kept)
    assert bench.fits_device(found) and found.streaming.update_window == 3 * CELL
    assert len(found.resident) < len(kept.resident)
    assert bench.seconds(found) < bench.seconds(kept) / 1.5
    check(trace(), QUICK, bench.plan("there", found))


def test_a_block_is_in_one_of_both() -> None:
    bench = Bench(problem())
    draft = streamed(bench)
    names = tuple(b.name for b in trace().model.blocks)
    both = fastest_there(bench, (draft.updating(Update.AHEAD, names), draft), anything)
    moved, early = both.updated(Update.DEVICE), both.updated(Update.AHEAD)
    assert moved
    assert early == () or set(early) == set(names) - set(moved)
    refused = fastest_there(bench, (draft,), lambda one: False)
    assert refused == draft


@pytest.mark.slow
@pytest.mark.thinned(2)
@pytest.mark.parametrize("tier", ["device", "host"])
def test_more_of_a_budget_is_not_slower(tier: str) -> None:
    """Neither device memory, which the window takes, nor host memory, which second copies take."""
    before = float("inf")
    for part in range(4):
        device, host = (600_000 + 150_000 * part, ENOUGH) if tier == "device" else (800_000, 1_000_000 + 300_000 * part)
        more = problem(QUICK, device=device, host=host)
        try:
            plan = make_plan(more, "auto")
        except DoesNotFit:
            assert before == float("inf")
            continue
        assert seconds(plan) <= before * (1 + TIE)
        before = min(before, seconds(plan))


@settings(max_examples=3)
@given(st.floats(2e7, 2e9), st.floats(1e8, 1e10), st.floats(5e6, 1e9), st.integers(3, 16))
def test_never_slower_than_at_home_and_proven(compute: float, link: float, update: float, parts: int) -> None:
    on = machine(compute=compute, h2d=link, d2h=link, update=update)
    asked_for = problem(on, device=100_000 * parts)
    plan = make_plan(asked_for, "auto")
    event(f"{len(plan.updated(Update.DEVICE))} on the device, {len(plan.updated(Update.AHEAD))} ahead of their step")
    assert plan.device <= 100_000 * parts
    bench = Bench(asked_for)
    assert seconds(plan) <= bench.exact(at_home_again(Draft.of(plan))).step_seconds
    check(trace(), on, plan)
