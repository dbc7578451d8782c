"""Activations that the host has no room for go on to disk."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forebay.arenas import DISK_BLOCK
from forebay.calls import Calls
from forebay.checking import check
from forebay.errors import DoesNotFit
from forebay.lowering.liveness import device_bound
from forebay.memory import Tier
from forebay.planners import Bench, Problem, make_plan
from forebay.planners.activations.choosing import all_moved
from forebay.planners.homes import ACTIVATION_RING, Tenant, at_home, on_host, with_a_disk
from forebay.planners.parts import Draft, all_resident, all_streamed
from forebay.planners.reasons import against, exactness, kept
from forebay.plans import Plan, Streaming
from forebay.simulation import simulate
from forebay.treatments import Fate
from forebay.units import MiB, format_seconds
from tests.null.planning import ENOUGH, asked, chain, machine

SIZE = MiB
"""Bytes of each activation."""

LAYERS, SAVED = 8, 3
EACH = (SAVED + 1) * SIZE
"""Bytes that a layer moves: what its linears make, and what it puts out."""

TRACE = chain(LAYERS, saved=SAVED, activation=SIZE)
ON = machine(compute=2e7, h2d=1e10, d2h=1e10, disk=1e9)
"""Compute takes the most, so that nothing is made again that can move."""

STAGING = ACTIVATION_RING * SIZE + DISK_BLOCK
"""Bytes of the host that the way to disk takes: the ring, and a buffer for what O_DIRECT does not take."""


def problem(host: int, disk: int = ENOUGH, device: int = ENOUGH) -> Problem:
    return asked(TRACE, ON, device=device, host=host, disk=disk)


def fates(plan: Plan | Draft) -> dict[str, set[Fate]]:
    """Where what each block moves goes."""
    return {b: {t.fate for t in s.treatments} - {Fate.KEEP} for s in plan.activations for b in s.blocks}


def all_of_it() -> int:
    """Bytes on the host with every activation there, and nothing else."""
    plan = make_plan(problem(ENOUGH), "offload-all")
    assert plan.host == plan.streaming.host_activations == LAYERS * EACH
    return plan.host


@pytest.mark.parametrize("blocks", [3, 5, LAYERS])
def test_the_first_blocks_go_to_disk_as_many_as_it_takes(blocks: int) -> None:
    host = STAGING + (LAYERS - blocks) * EACH
    plan = make_plan(problem(host), "offload-all")
    names = [b.name for b in TRACE.model.blocks]
    assert fates(plan) == {n: {Fate.DISK if i < blocks else Fate.OFFLOAD} for i, n in enumerate(names)}
    assert plan.host == host and plan.disk == plan.streaming.disk_activations == blocks * EACH
    check(TRACE, ON, plan)
    assert plan.device == device_bound(TRACE, plan)
    peaks = simulate(TRACE, ON, plan).peaks
    assert peaks[Tier.HOST] <= host and peaks[Tier.DISK] == plan.disk and peaks[Tier.DEVICE] <= plan.device


def test_without_a_disk_the_same_has_no_room_and_a_disk_is_named() -> None:
    bench = Bench(problem(STAGING + EACH, disk=0))
    draft = all_resident(bench.model, all_moved(bench))
    with pytest.raises(DoesNotFit, match="host memory"):
        at_home(bench, draft)
    assert with_a_disk(bench, draft) == (LAYERS - 1) * EACH


def test_with_enough_host_nothing_goes_to_disk() -> None:
    plan = make_plan(problem(all_of_it()), "offload-all")
    assert plan.disk == 0 and plan.streaming.disk_window == 0
    assert set().union(*fates(plan).values()) == {Fate.OFFLOAD}


def test_a_smaller_ring_where_the_host_has_room_for_no_more() -> None:
    host = SIZE + DISK_BLOCK
    plan = make_plan(problem(host), "offload-all")
    assert plan.streaming.disk_window == SIZE and plan.host == host
    less = Bench(problem(host - 1))
    with pytest.raises(DoesNotFit, match="host memory"):
        at_home(less, all_resident(less.model, all_moved(less)))


def test_a_disk_too_small_is_refused() -> None:
    bench = Bench(problem(STAGING, disk=LAYERS * EACH - 1))
    with pytest.raises(DoesNotFit, match="disk"):
        at_home(bench, all_resident(bench.model, all_moved(bench)))


def test_auto_uses_the_disk_where_it_is_faster() -> None:
    """Half of what is saved has no room on the device: with a disk it moves there, without one it is made again."""
    standing = sum(16 * b.trainable_numel for b in TRACE.model.blocks)
    everything = Bench(problem(ENOUGH))
    assert everything.liveness is not None
    device = standing + everything.liveness.profile().peak // 2
    with_disk = problem(STAGING + EACH, device=device)
    bench = Bench(with_disk)
    plan = make_plan(with_disk, "auto", bench)
    without = make_plan(problem(STAGING + EACH, disk=0, device=device), "auto")
    assert plan.streaming.disk_activations > 0 and any("of activations" in r or "on disk" in r for r in plan.reasons)
    assert plan.step_seconds is not None and without.step_seconds is not None
    assert bench.bound <= plan.step_seconds < 0.95 * without.step_seconds
    check(TRACE, ON, plan)


def test_what_went_to_disk_comes_back_as_it_was() -> None:
    """Activations, states and parameters."""
    bench = Bench(problem(STAGING + EACH))
    slot = TRACE.model.blocks[0].nbytes
    level = all_moved(bench)
    for draft in (all_resident(bench.model, level), all_streamed(bench.model, Streaming((slot,) * 2), level)):
        for first in (Tenant.STATES, Tenant.ACTIVATIONS):
            there = at_home(bench, draft, first=first)
            assert bench.arenas(there).disk > 0
            assert on_host(bench, there) == draft


def test_what_goes_first_is_for_the_caller_to_say() -> None:
    """As little as the host has no room for: states alone, or activations alone."""
    bench = Bench(problem(ENOUGH))
    slot = TRACE.model.blocks[0].nbytes
    draft = all_streamed(bench.model, Streaming((slot,) * 2), all_moved(bench))
    host = bench.arenas(draft).host
    states = bench.arenas(draft).host_states
    assert states < LAYERS * EACH
    less = Bench(replace(bench.problem, host_limit=host - 1, budget=replace(bench.problem.budget, host=host - 1)))
    by_activations = at_home(less, draft, first=Tenant.ACTIVATIONS)
    assert less.arenas(by_activations).disk_states == 0 < by_activations.streaming.disk_activations


@pytest.mark.parametrize(
    ("states", "homes", "words"),
    [
        (1, 0, "the states of 1 block are on disk"),
        (3, 0, "the states of 3 blocks are on disk"),
        (0, 2, "the parameters of 2 blocks are on disk"),
        (3, 3, "the states and the parameters of 3 blocks are on disk"),
        (4, 2, "the states of 4 blocks and the parameters of 2 are on disk"),
        (0, 0, ""),
    ],
)
def test_the_reasons_name_what_is_on_disk_and_nothing_else(states: int, homes: int, words: str) -> None:
    bench = Bench(problem(ENOUGH))
    draft = all_streamed(bench.model, Streaming((TRACE.model.blocks[0].nbytes,)))
    placements = [
        replace(p, states=Tier.DISK if i < states else p.states, parameters=Tier.DISK if i < homes else p.parameters)
        for i, p in enumerate(draft.placements)
    ]
    said = [reason for reason in kept(replace(draft, placements=tuple(placements))) if "disk" in reason]
    assert said == ([f"{words}: the host has no room for all of them"] if words else [])


def test_reasons_speak_of_the_same_step_where_comparisons_are_coarse() -> None:
    """Updates of a model of many chunks are compared in fewer: what is shown fits to the step that is promised."""
    on = machine(compute=1e10, update=1e8)
    trace = chain(3, width=256)
    standing = sum(16 * b.trainable_numel for b in trace.model.blocks)
    bench = Bench(asked(trace, on, device=standing // 2))
    streaming = Streaming((trace.model.blocks[0].nbytes,) * 2, update_chunk=1024)
    draft, other = (all_streamed(bench.model, replace(streaming, prefetch_distance=n)) for n in (1, 0))
    mine, coarse = bench.exact(draft).step_seconds, bench.seconds(draft)
    assert mine != coarse
    words = against(bench, draft, other, "otherwise", exactness(bench, draft))
    theirs = mine * bench.seconds(other) / coarse
    assert f"({format_seconds(theirs)} " in words


def test_what_is_on_disk_moves_in_calls_that_suit_it() -> None:
    """And what a plan says of them is decided with the rest of it: nothing is simulated or proven once more for it."""
    assert ON.disk is not None
    slow = replace(ON, disk=replace(ON.disk, reads=Calls(2 * MiB, 3), writes=Calls(MiB)))
    for host, calls in ((STAGING, (Calls(2 * MiB, 3), Calls(MiB))), (ENOUGH, (Calls(), Calls()))):
        asking = asked(TRACE, slow, device=ENOUGH, host=host, disk=ENOUGH)
        bench = Bench(asking)
        plan = make_plan(asking, "offload-all", bench)
        assert (plan.streaming.disk_reads, plan.streaming.disk_writes) == calls
        assert bool(plan.disk) is (host == STAGING)
        played = bench.played(plan)
        assert bench.played(replace(plan, reasons=()))[0] is played[0]
        assert on_host(bench, Draft.of(plan)).streaming.disk_reads == Calls()
