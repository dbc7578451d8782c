"""Planners that are given a trace and a machine: what they decide, why, and what else there is."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import combinations

import pytest

from forebay.arenas import arenas
from forebay.errors import ConfigError, DoesNotFit
from forebay.lowering.liveness import device_bound
from forebay.machine import Machine
from forebay.memory import Tier
from forebay.planners import PLANNERS, alternatives, make_plan
from forebay.planners.bench import SIMULATIONS, SIMULATIONS_LEAST, Bench
from forebay.planners.parts import KEPT, recomputable
from forebay.planners.search import PLAIN, Search
from forebay.planners.shapes import least_device, levels
from forebay.plans import Plan
from forebay.simulation import simulate
from tests.null.planning import ENOUGH, asked, chain, machine
from tests.null.synthetic import ADAM, block, problem
from tests.null.tracing import Layer, chain_trace

TRACE = chain(6)
NAMES = tuple(b.name for b in TRACE.model.blocks)
EVERYTHING = make_plan(asked(TRACE, machine(), device=ENOUGH), "resident").device
STREAMED = make_plan(asked(TRACE, machine(), device=ENOUGH), "stream").device
LEAST = make_plan(asked(TRACE, machine(), device=ENOUGH), "stream-recompute").device

FOR_OTHERS = {
    "moesys",
    "harmony",
    "mobius",
    "smart-infinity",
    "smart-infinity-compressed",
    "angel-ptm-lock-free",
    "hydra",
    "tmo",
    "selective",
    "distflashattn",
    "loongtrain",
}
"""They refuse a dense model, a step of one micro-batch, no disk, one model, one device, a model without attention."""


def at(policy: str, *, device: int = ENOUGH, pinned: int | None = None) -> Plan:
    return make_plan(asked(TRACE, machine(), device=device, pinned=pinned), policy)


# The fixed policies.


def test_resident_keeps_everything_and_drops_nothing() -> None:
    plan = at("resident")
    assert all(p.resident for p in plan.placements) and plan.recompute == ()
    assert (plan.host, plan.disk, plan.streaming.slots) == (0, 0, ())
    with pytest.raises(DoesNotFit) as refused:
        at("resident", device=EVERYTHING - 1)
    assert (refused.value.tier, refused.value.needed) == ("device", EVERYTHING)


def test_recompute_keeps_everything_and_runs_every_block_again() -> None:
    plan = at("recompute")
    assert all(p.resident for p in plan.placements) and plan.recompute == NAMES
    assert plan.device < EVERYTHING
    with pytest.raises(DoesNotFit):
        at("recompute", device=plan.device - 1)


@pytest.mark.parametrize("device", [LEAST, STREAMED, (STREAMED + EVERYTHING) // 2, EVERYTHING])
def test_baselines_fix_the_activations_and_place_the_rest_as_auto_does(device: int) -> None:
    best = at("auto", device=device).step_seconds
    assert best is not None
    for policy, recomputes, fixed in (("keep", (), "stream"), ("chen", NAMES, "stream-recompute")):
        try:
            plan = at(policy, device=device)
        except DoesNotFit:
            assert policy == "keep" and device < STREAMED
            continue
        assert plan.planner == policy and plan.recompute == recomputes and plan.device <= device
        assert plan.step_seconds is not None and plan.step_seconds >= 0.99 * best
        if device >= STREAMED:
            assert plan.step_seconds <= (at(fixed, device=device).step_seconds or 0.0)


def test_stream_keeps_nothing() -> None:
    plan = at("stream")
    assert not any(p.parameters is Tier.DEVICE for p in plan.placements) and plan.recompute == ()


def test_stream_recompute_does_both() -> None:
    plan = at("stream-recompute")
    assert not any(p.parameters is Tier.DEVICE for p in plan.placements) and plan.recompute == NAMES
    assert plan.device == LEAST < STREAMED


def test_recomputation_without_a_batch_is_refused() -> None:
    for policy in ("recompute", "stream-recompute"):
        with pytest.raises(ConfigError, match="by what a block saves: no batch was given; give one"):
            make_plan(problem([block("one", ((8, 8), "float32", True))], device=ENOUGH), policy)


@pytest.mark.parametrize("policy", [policy for policy in PLANNERS if policy not in FOR_OTHERS])
def test_every_plan_says_what_was_simulated(policy: str) -> None:
    """Its device bytes are the bound, never below the simulated peak; its seconds are the simulator's."""
    plan = make_plan(asked(TRACE, machine(), device=ENOUGH, micro_batches=2), policy)
    assert plan.planner == policy and plan.fingerprint == TRACE.fingerprint
    timeline = simulate(TRACE, machine(), plan)
    assert plan.step_seconds == timeline.step_seconds[-1]
    assert plan.device == device_bound(TRACE, plan)
    peaks = timeline.peaks
    assert peaks[Tier.DEVICE] <= plan.device
    assert peaks.get(Tier.HOST, 0) <= plan.host


# Which blocks may recompute.


def test_what_is_held_has_two_modules_or_saves_little_does_not_recompute() -> None:
    parameters = ((16, 16), "float32", True)
    blocks = [
        block("plain", parameters),
        replace(block("shared", parameters), modules=("shared", "other")),
        block("twice", parameters),
        block("small", parameters),
        block("around", parameters, held=True),
        block("last", parameters),
    ]
    layers = [Layer(n, saved=(1024, 1024)) for n in ("plain", "shared", "twice", "twice")]
    layers += [Layer("small", saved=(512,)), Layer("around", saved=(1024, 1024)), Layer("last", saved=(1024, 1024))]
    # "small" is given the 512 bytes that "twice" puts out, and saves 512 of its own and its result of 512 ...
    layers[4] = Layer("small", saved=(64,), out=64)
    assert recomputable(chain_trace(blocks, layers)) == ("plain", "twice", "last")


# auto.


def test_auto_keeps_all_that_fits() -> None:
    plan = make_plan(asked(TRACE, machine(h2d=1e7, d2h=1e7), device=EVERYTHING), "auto")
    assert all(p.resident for p in plan.placements) and plan.recompute == ()
    assert plan.reasons[0] == "parameters, gradients and states fit on the device"


def test_auto_gives_up_what_fits_for_a_step_that_is_plainly_faster() -> None:
    """Here the host updates some blocks while the device computes."""
    plan, plain = at("auto", device=EVERYTHING), at("resident", device=EVERYTHING)
    assert not all(p.resident for p in plan.placements)
    assert plan.step_seconds is not None and plain.step_seconds is not None
    assert plan.step_seconds < (1 - PLAIN) * plain.step_seconds


def test_auto_recomputes_where_nothing_else_fits() -> None:
    bench = Bench(asked(TRACE, machine(), device=ENOUGH))
    without = bench.device(least_device(bench, [KEPT]))
    plan = at("auto", device=without - 1)
    assert plan.recompute and plan.device <= without - 1
    assert any("without it at least" in reason for reason in plan.reasons), plan.reasons


def test_recomputation_that_hides_under_the_link_makes_room() -> None:
    """Compute costs nothing here and the link everything: activations give way to blocks that stay."""
    trace = chain(6, batch=16)
    on = machine(compute=1e15)
    without = make_plan(asked(trace, on, device=ENOUGH), "stream")
    plan = make_plan(asked(trace, on, device=without.device), "auto")
    assert plan.recompute and any(p.resident for p in plan.placements)
    assert plan.step_seconds is not None and without.step_seconds is not None
    assert plan.step_seconds < without.step_seconds


def test_recomputation_that_shows_is_left_out() -> None:
    """Compute is all that counts here: blocks stream rather than run again."""
    plan = make_plan(asked(TRACE, machine(compute=1e6, update=1e12), device=STREAMED), "auto")
    assert plan.recompute == ()


@pytest.mark.parametrize("device", [LEAST, STREAMED, (STREAMED + EVERYTHING) // 2])
def test_the_same_question_gets_the_same_answer(device: int) -> None:
    assert at("auto", device=device) == at("auto", device=device)


@pytest.mark.parametrize("blocks", [3, 40])
def test_a_search_ends_after_so_many_simulations(blocks: int) -> None:
    trace = chain(blocks)
    need = make_plan(asked(trace, machine(), device=ENOUGH), "stream").device
    bench = Bench(asked(trace, machine(), device=need))
    Search(bench, levels(bench)).run()
    assert 1 < bench.simulated <= SIMULATIONS


@pytest.mark.parametrize("most", [1, 4000])
def test_a_search_ends_after_so_many_actions(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """But not before it has simulated a few drafts; the last one may go over."""
    monkeypatch.setattr("forebay.planners.bench.ACTIONS", most)
    trace = chain(40)
    need = make_plan(asked(trace, machine(), device=ENOUGH), "stream").device
    bench = Bench(asked(trace, machine(), device=need))
    Search(bench, levels(bench)).run()
    each = bench.actions / bench.simulated
    assert SIMULATIONS_LEAST <= bench.simulated <= max(SIMULATIONS_LEAST, 1 + most / each * 2)


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    ("on", "lane"),
    [
        (machine(compute=1e6, update=1e12), "compute binds"),
        (machine(h2d=1e5), r"the way from host to device \(h2d\) binds"),
        (machine(d2h=1e5), r"the way from device to host \(d2h\) binds"),
        (machine(update=1e5), "the update on the host binds"),
        (machine(disk=1e5), r"from disk \(disk_read\) binds|to disk \(disk_write\) binds"),
    ],
    ids=["compute", "h2d", "d2h", "update", "disk"],
)
def test_the_reasons_say_what_binds(on: Machine, lane: str) -> None:
    wanted = asked(TRACE, on, device=LEAST)
    if on.disk is not None:
        trace = chain(3, width=1024, activation=1024)
        wanted = asked(trace, on, device=make_plan(asked(trace, on, device=ENOUGH), "stream").device)
        host = make_plan(wanted, "auto").host
        wanted = replace(wanted, host_limit=host * 3 // 4, disk_limit=ENOUGH)
    plan = make_plan(wanted, "auto")
    assert any(re.search(lane, reason) for reason in plan.reasons), plan.reasons


def test_the_reasons_say_what_was_bought() -> None:
    plan = at("auto", device=(STREAMED + EVERYTHING) // 2)
    resident = sum(p.resident for p in plan.placements)
    assert 0 < resident < 6
    assert any(f"keeping {resident} blocks on the device saves" in reason for reason in plan.reasons), plan.reasons


# Page-locked memory.


def test_arenas_are_page_locked_whole_or_not_at_all() -> None:
    """First the parameters, then the gradients, then the staging; what the budget has no room for stays pageable."""
    free = at("stream")
    sizes = arenas(TRACE.model, free.placements, free.streaming, ADAM)
    moving = sizes.gradient_staging + sizes.host_slots
    assert free.pinned == sizes.host_parameters + sizes.host_gradients + moving
    tight = at("stream", pinned=free.pinned - 1)
    assert tight.pinned == sizes.host_parameters + sizes.host_gradients
    none = at("auto", pinned=1, device=STREAMED)
    assert none.pinned == 0
    assert any("stay pageable" in reason for reason in none.reasons), none.reasons
    on_cpu = chain_trace(TRACE.model.blocks, device="cpu")
    assert make_plan(asked(on_cpu, machine(kind="cpu"), device=ENOUGH), "stream").pinned == 0


# Alternatives.


def test_alternatives_are_other_plans_that_fit_the_fastest_first() -> None:
    wanted = asked(TRACE, machine(), device=EVERYTHING)
    plan = make_plan(wanted, "auto")
    others = alternatives(wanted, plan)
    assert len(others) == 3
    assert [o.step_seconds for o in others] == sorted(o.step_seconds for o in others)
    for other in others:
        assert (other.plan.placements, other.plan.recompute) != (plan.placements, plan.recompute)
        assert other.peaks[Tier.DEVICE] == other.plan.device <= EVERYTHING
        assert "a step" in other.words and "times as long" in other.words
    shapes = {(o.plan.placements, o.plan.recompute) for o in others}
    assert len(shapes) == 3


@pytest.mark.parametrize("compute", [1e6, 1e9])
def test_what_is_named_differs_by_more_than_two_percent_in_something(compute: float) -> None:
    """A block of 32 bytes that stays makes another kind of plan, with the same figures."""
    layers = [*TRACE.model.blocks, block("norm", ((8,), "float32", True))]
    trace = chain_trace(layers, [Layer(b.name, (8192,) * 3 if b.nbytes > 64 else (64,), out=8192) for b in layers])
    needed = [make_plan(asked(trace, machine(), device=ENOUGH), p).device for p in ("stream-recompute", "resident")]
    wanted = asked(trace, machine(compute=compute), device=round(0.95 * needed[0] + 0.05 * needed[1]))
    plan = make_plan(wanted, "auto")
    others = alternatives(wanted, plan)
    assert others
    for one, other in combinations((plan, *(o.plan for o in others)), 2):
        figures = ((p.step_seconds or 0.0, p.device, p.host, p.disk, p.pinned) for p in (one, other))
        assert any(abs(a - b) > 0.02 * max(a, b) for a, b in zip(*figures, strict=True))


def test_where_nothing_else_fits_there_is_no_alternative() -> None:
    wanted = asked(TRACE, machine(), device=make_least())
    assert all(o.plan.device <= wanted.budget.device for o in alternatives(wanted, make_plan(wanted, "auto")))


def make_least() -> int:
    with pytest.raises(DoesNotFit) as refused:
        at("auto", device=1)
    return refused.value.needed


def test_without_a_trace_nothing_is_compared() -> None:
    wanted = problem([block("one", ((8, 8), "float32", True))], device=ENOUGH)
    with pytest.raises(ConfigError, match="give a batch"):
        alternatives(wanted, make_plan(wanted, "auto"))


# What a problem must be.


def test_a_trace_needs_a_machine_and_the_right_model() -> None:
    good = asked(TRACE, machine(), device=1)
    with pytest.raises(ConfigError, match="go together"):
        replace(good, machine=None)
    with pytest.raises(ConfigError, match="another model"):
        replace(good, model=chain(2).model)
    with pytest.raises(ConfigError, match="has none"):
        replace(good, disk_limit=1)


def test_a_machine_smaller_than_the_budget_is_the_limit() -> None:
    small = replace(machine(), device_capacity=EVERYTHING - 1)
    plan = make_plan(asked(TRACE, small, device=ENOUGH), "auto")
    assert plan.device <= EVERYTHING - 1
