"""The programme over the chain of blocks: beside every way to choose whole blocks, and beside simulated steps."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations_with_replacement, product
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.budgets import Budget, DiskBudget
from forebay.machine import Machine
from forebay.planners import Bench, Problem
from forebay.planners.activations.chain import Chain, Scope, standing_nbytes
from forebay.planners.activations.groups import Group, groups_of
from forebay.planners.activations.rounding import diffused, sorted_out
from forebay.planners.device_updates import there
from forebay.planners.parts import Draft
from forebay.planners.shapes import options, streamed_through, usual_window
from forebay.plans import Update
from forebay.trace import Footprint
from tests.null.planning import ENOUGH, asked, chain, machine, whole
from tests.null.strategies import Case, cases

MACHINES = {
    "link-bound": machine(compute=1e11),
    "compute-bound": machine(compute=2e7),
    "balanced": machine(compute=4e8),
    "slow updates": machine(compute=1e11, update=5e7),
}


def programme(problem: Problem) -> Chain:
    bench = Bench(problem)
    assert problem.trace is not None and bench.liveness is not None
    groups = groups_of(problem, bench.liveness, bench.costs)
    return Chain(problem, groups, bench.costs, standing_nbytes(bench.liveness, groups))


def chosen(groups: tuple[Group, ...]) -> list[list[tuple[float, ...]]]:
    """For every group, what each multiset of homes and options takes: seconds of forward's fetches, offloads and
    updates, of backward's compute, h2d and gradients; bytes of the device, bytes that stream."""
    found = []
    for group in groups:
        n = len(group.blocks)
        uses = [h.use for h in group.homes]
        homes = [
            (u.fetches, 0.0, u.update, u.backward, u.reloads, u.gradients, u.device, float(h.shared))
            for u, h in zip(uses, group.homes, strict=True)
        ]
        options = [(0.0, o.out_seconds, 0.0, o.seconds, o.back_seconds, 0.0, float(o.held), 0.0) for o in group.options]
        sums = []
        for some, others in product(*(combinations_with_replacement(kind, n) for kind in (homes, options))):
            sums.append(tuple(map(sum, zip(*some, *others, strict=True))))
        found.append(list(dict.fromkeys(sums)))
    return found


@pytest.mark.parametrize("on", MACHINES)
@pytest.mark.parametrize("part", [0.4, 0.7])
def test_whole_blocks_are_within_one_percent_of_the_best_of_all(on: str, part: float) -> None:
    """Three blocks of two ops: every choice is tried, with lanes that share nothing and one slot."""
    trace = chain(3, saved=2, activation=65536)
    everything = Bench(asked(trace, MACHINES[on], device=ENOUGH))
    standing = sum(16 * b.trainable_numel for b in trace.model.blocks)
    assert everything.liveness is not None
    room = round(part * (standing + everything.liveness.profile().peak))
    made = programme(asked(trace, MACHINES[on], device=room))
    slot = trace.model.blocks[0].nbytes
    base, best = made.base, inf
    per_byte = MACHINES[on].h2d.seconds(slot) / slot  # one fetch of the two
    for sums in product(*chosen(made.groups)):
        fetches, out, update, again, back, gradients, device, streams = map(sum, zip(*sums, strict=True))
        if base.device + device + slot <= room:
            spared = per_byte * min(slot, streams)
            forward = max(base.forward, fetches, out, update)
            best = min(best, forward + max(base.backward + again, back - spared, gradients))
    found = whole(made, room, slot, gap=1e-3)
    exact = whole(made, room, slot)
    assert found is not None and exact is not None and best < inf
    assert exact.seconds == pytest.approx(best, rel=0.01)  # it has an eye on the other lanes too, but not much
    assert found.seconds <= 1.01 * best
    shares = made.shares(room, slot)
    assert shares is not None and shares.seconds <= 1.01 * best
    assert made.bound() <= best * (1 + 1e-9)


def test_more_room_lowers_the_bound() -> None:
    trace = chain(4, saved=3, activation=1 << 16)
    bounds = [programme(asked(trace, MACHINES["balanced"], device=n << 16)).bound() for n in range(1, 40, 3)]
    assert bounds[0] == inf and bounds[-1] < inf
    assert bounds == sorted(bounds, reverse=True)


def test_less_scope_is_no_faster() -> None:
    """Nothing on the host is a narrower scope than no activation that moves; and what may not move does not."""
    made = programme(asked(chain(4, saved=3, activation=1 << 16), MACHINES["link-bound"], device=25 << 16))
    scopes = [Scope(), Scope(moves=False), Scope(host=0), Scope(moves=False, host=0)]
    found = [made.shares(25 << 16, 0, scope) for scope in scopes]
    seconds = [inf if shares is None else shares.seconds for shares in found]
    assert seconds[0] <= seconds[1] <= seconds[2] == seconds[3]
    still = found[1]
    assert still is not None
    moving = [
        s
        for g, own in zip(made.groups, still.options, strict=True)
        for o, s in zip(g.options, own, strict=True)
        if o.moved
    ]
    assert moving and max(moving) == 0.0


def test_updates_under_backward_too_are_no_slower_and_not_below_the_bound() -> None:
    made = programme(asked(chain(4, saved=3, activation=1 << 16), MACHINES["slow updates"], device=10 << 16))
    under_forward, under_both = (made.shares(10 << 16, 0, Scope(ahead=ahead)) for ahead in (False, True))
    assert under_forward is not None and under_both is not None
    assert made.bound() <= under_both.seconds < under_forward.seconds


def test_nothing_fits() -> None:
    made = programme(asked(chain(2), machine(), device=1))
    assert made.bound() == inf and made.shares(1, 0) is None and whole(made, 1, 0) is None


def limited(case: Case) -> Problem:
    """What a planner is asked that may answer with the case's plan."""
    plan, trace = case.plan, case.trace
    disk = DiskBudget("folder", ENOUGH) if plan.disk else None
    return Problem(
        model=trace.model,
        footprint=Footprint(0, 0, measured=False),
        budget=Budget(plan.device, ENOUGH, None, disk),
        host_limit=ENOUGH,
        disk_limit=ENOUGH if disk else 0,
        state_names=trace.state_names,
        overlap_update=plan.streaming.overlap_update,
        trace=trace,
        machine=case.machine,
    )


@settings(max_examples=150)
@given(cases())
def test_no_simulated_step_is_below_the_bound(case: Case) -> None:
    """Of plans drawn at random, each with just the device memory that it needs."""
    problem = limited(case)
    bench = Bench(problem)
    draft = Draft(case.plan.placements, case.plan.streaming, case.plan.recompute)
    assert programme(problem).bound() <= bench.exact(draft).step_seconds * (1 + 1e-9)


def test_no_step_with_updates_on_the_device_is_below_the_bound() -> None:
    """Links are fast and the host is slow to update: what is at home there had better be updated on the device."""
    trace = chain(8)
    probe = Bench(asked(trace, machine(), device=ENOUGH))
    base = streamed_through(probe, options(probe)[0], usual_window(probe))
    names = [p.block for p in base.placements]
    room = probe.device(base) + probe.sizer(base.streaming.update_chunk).update_window(names)
    on = machine(compute=2e7, h2d=1e9, d2h=1e9, update=1e6)
    bench = Bench(asked(trace, on, device=room))
    moved = there(bench, base)
    assert moved.updated(Update.DEVICE)
    assert bench.bound <= bench.exact(moved).step_seconds < bench.exact(base).step_seconds / 2


def test_updates_and_copies_share_the_hosts_memory() -> None:
    """An element's update touches 28 bytes, or they cross the link; its parameter comes and its gradient goes, 4 bytes
    each. The host's memory moves 1.2 GB/s, of which an update alone takes 1 and both links together no more. In the
    place of a slot and of activations a part of one block may stay."""
    trace = chain(32, activation=256)
    on = replace(machine(compute=1e11, h2d=5e8, d2h=5e8, update=1e9), host_bandwidth=1.2e9)
    probe = Bench(asked(trace, on, device=ENOUGH))
    base = streamed_through(probe, options(probe)[-1], 0)
    bench = Bench(asked(trace, on, device=probe.device(base)))
    elements = 31 / 32 * sum(b.trainable_numel for b in trace.model.blocks)
    assert 36 * elements / 1.2e9 <= bench.bound <= bench.exact(base).step_seconds
    assert 36 * elements / 1.2e9 > 28 * elements * 32 / 31 / 1e9  # the updates alone


# Rounding.


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=6), st.integers(1, 60))
def test_diffusion_is_right_to_within_one_and_even(weights: list[int], count: int) -> None:
    total = sum(weights) or 1
    weights = weights if sum(weights) else [1] + [0] * (len(weights) - 1)
    shares = [w * count / total for w in weights]
    taken = diffused(shares, count)
    for upto in range(1, count + 1):
        for choice, share in enumerate(shares):
            # Two choices are off by half at most; more of them by less than their number.
            assert abs(taken[:upto].count(choice) - share * upto / count) < max(1, len(shares) - 1)
    assert sorted_out(shares, count, range(len(shares))) == sorted(taken)


def test_diffusion_alternates() -> None:
    assert diffused([3.0, 3.0], 6) == [0, 1, 0, 1, 0, 1]
    assert sorted_out([2.0, 1.0], 3, [5.0, 1.0]) == [1, 0, 0]
    assert diffused([0.0, 2.0, 0.0, 1.0], 3) == [1, 3, 1]  # what has no share is not taken


def test_with_room_for_all_nothing_moves_but_what_costs_nothing() -> None:
    """Slow links and slow updates on the host: the step is that of the trace and of the updates on the device."""
    trace = chain(3)
    on: Machine = machine(compute=1e11, h2d=1e5, d2h=1e5, update=1e5)
    made = programme(asked(trace, on, device=ENOUGH))
    updates = sum(2 * 2 * 4 * b.trainable_numel + 3 * b.gradient_nbytes for b in trace.model.blocks)
    assert made.bound() == pytest.approx(
        made.base.forward + made.base.backward + updates / on.device_bandwidth, rel=1e-3
    )
    shares = made.shares(ENOUGH, 0)
    assert shares is not None
    assert all(home[0] == pytest.approx(len(g.blocks)) for g, home in zip(made.groups, shares.homes, strict=True))
