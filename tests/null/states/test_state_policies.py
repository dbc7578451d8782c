"""Published policies for model states: each decides what its paper says, and its plan keeps every promise."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from forebay.checking import check
from forebay.errors import CannotServe, ConfigError, DoesNotFit
from forebay.lowering.liveness import device_bound
from forebay.machine import Machine
from forebay.memory import Tier
from forebay.planners import PLANNERS, STATES, Bench, make_plan
from forebay.planners.states.elixir import grid
from forebay.plans import Plan, Update
from forebay.simulation import forecast, simulate
from forebay.timeline import Lane
from forebay.trace import Trace
from tests.null.planning import ENOUGH, asked, chain, machine
from tests.null.synthetic import block, problem
from tests.null.tracing import Layer, chain_trace

LAYERS = 8
TRACE = chain(LAYERS)
LARGE = chain(LAYERS, width=512)
"""3 MiB of parameters a layer: beside it what passes through the host on its way to disk is little."""

BLOCK = TRACE.model.blocks[0].nbytes
GRADIENT = TRACE.model.blocks[0].gradient_nbytes
NAMES = tuple(b.name for b in TRACE.model.blocks)
ON = machine(disk=1e8)


def ends_trace() -> Trace:
    """Four layers between an embedding and a head that are three times as large."""
    sizes = [("embed", 192), *((f"layers.{i}", 64) for i in range(4)), ("head", 192)]
    blocks = [block(name, ((width, 64), "float32", True), ((64, 64), "float32", True)) for name, width in sizes]
    return chain_trace(blocks, [Layer(b.name, saved=(8192, 8192), out=8192) for b in blocks], input_nbytes=8192)


def made(policy: str, device: int = ENOUGH, *, host: int = ENOUGH, disk: int = 0, trace: Trace = TRACE) -> Plan:
    return make_plan(asked(trace, ON, device=device, host=host, disk=disk), policy)


def outcome(policy: str, device: int, host: int, trace: Trace) -> Plan | DoesNotFit:
    try:
        return made(policy, device, host=host, disk=ENOUGH, trace=trace)
    except DoesNotFit as refused:
        return refused


def refusal(
    policy: str, device: int = ENOUGH, *, host: int = ENOUGH, disk: int = 0, trace: Trace = TRACE
) -> DoesNotFit:
    with pytest.raises(DoesNotFit) as refused:
        made(policy, device, host=host, disk=disk, trace=trace)
    return refused.value


EVERYTHING = made("resident").device
SOME = made("zero-offload").device
LEAST = made("l2l").device


# All of them.


def test_they_are_selected_by_name() -> None:
    assert tuple(STATES) == (
        "l2l",
        "zero-offload",
        "zero-infinity",
        "patrickstar",
        "moesys",
        "harmony",
        "stronghold",
        "elixir",
        "mobius",
        "angel-ptm",
        "smart-infinity",
        "lohan",
    )
    assert all(PLANNERS[name] is STATES[name] for name in STATES)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("policy", STATES)
@pytest.mark.parametrize("trace", [TRACE, ends_trace()], ids=["chain", "ends"])
@pytest.mark.parametrize("share", [0.3, 0.6, 1.0])
def test_its_plan_is_right_and_within_its_budgets(policy: str, trace: Trace, share: float) -> None:
    device = round(share * made("resident", trace=trace).device)
    host = make_plan(asked(trace, ON, device=ENOUGH), "stream").host * 3 // 4
    for budget in (ENOUGH, host):
        plan = outcome(policy, device, budget, trace)
        if isinstance(plan, CannotServe):
            assert plan.nearest  # none of these models is for it
            continue
        if isinstance(plan, DoesNotFit):
            assert plan.needed > plan.allowed and plan.nearest[0].needed == plan.needed
            continue
        assert plan.planner == policy and not plan.changes_numbers
        check(trace, ON, plan)
        peaks = simulate(trace, ON, plan).peaks
        assert peaks[Tier.DEVICE] <= plan.device == device_bound(trace, plan) <= device
        assert peaks.get(Tier.HOST, 0) <= plan.host <= budget
        assert peaks.get(Tier.DISK, 0) <= plan.disk


@pytest.mark.parametrize("policy", ["l2l", "stronghold", "elixir", "lohan"])
def test_what_needs_a_profile_says_so_without_a_batch(policy: str) -> None:
    with pytest.raises(ConfigError, match=f"policy {policy} needs .* give one"):
        make_plan(problem([block("one", ((8, 8), "float32", True))], device=ENOUGH), policy)


@pytest.mark.parametrize("policy", ["zero-offload", "zero-infinity"])
def test_what_needs_none_plans_without_a_batch(policy: str) -> None:
    blocks = [block(f"layers.{i}", ((8, 8), "float32", True)) for i in range(3)]
    assert make_plan(problem(blocks, device=ENOUGH), policy).planner == policy


@pytest.mark.parametrize("policy", ["l2l", "zero-offload", "stronghold"])
def test_where_the_host_is_too_small_a_disk_helps_another_policy_only(policy: str) -> None:
    host = made(policy, trace=LARGE).host - 1
    without, within = (refusal(policy, host=host, disk=disk, trace=LARGE) for disk in (0, ENOUGH))
    for refused in (without, within):
        assert (refused.tier, refused.allowed) == ("host", host) and "nothing on disk" in str(refused)
    assert any("policy zero-infinity with a disk of" in r.words for r in without.nearest)
    assert any(r.words.startswith("policy zero-infinity or auto") for r in within.nearest)
    assert made("zero-infinity", host=host, disk=ENOUGH, trace=LARGE).disk > 0


# l2l.


def test_l2l_has_two_layers_on_the_device_and_runs_every_one_again() -> None:
    plan = made("l2l")
    assert plan.streaming.slots == (BLOCK, BLOCK) and plan.streaming.prefetch_distance == 1
    assert {(p.parameters, p.gradients, p.states) for p in plan.placements} == {(Tier.HOST,) * 3}
    assert plan.recompute == NAMES


def test_l2l_does_with_one_layer_where_there_is_no_room_for_two() -> None:
    none = refusal("l2l", 1)
    plan = made("l2l", none.needed)
    assert plan.streaming.slots == (BLOCK,) and plan.streaming.prefetch_distance == 0


def test_l2l_does_not_grow_with_the_layers_but_by_their_inputs() -> None:
    """Constant memory but for the stash: as many inputs more as there are layers more."""
    longer = make_plan(asked(chain(2 * LAYERS), ON, device=ENOUGH), "l2l")
    assert longer.device - made("l2l").device == LAYERS * 8192


def test_l2l_has_one_slot_more_for_what_is_larger_than_a_layer() -> None:
    trace = ends_trace()
    sizes = sorted({b.nbytes for b in trace.model.blocks}, reverse=True)
    assert made("l2l", trace=trace).streaming.slots == (sizes[0], sizes[1], sizes[1])


# zero-offload.


def test_zero_offload_has_parameters_on_the_device_and_all_else_on_the_host() -> None:
    plan = made("zero-offload")
    homes = {(p.parameters, p.gradients, p.states) for p in plan.placements}
    assert homes == {(Tier.DEVICE, Tier.HOST, Tier.HOST)}
    assert plan.streaming.slots == () and not plan.streaming.overlap_update and not plan.updated(Update.AHEAD)


def test_zero_offload_moves_every_parameter_in_and_every_gradient_out_once_a_step() -> None:
    """The least that any cut moves with all fp32 on the host: 2 + 2 bytes a 16-bit parameter in the paper."""
    moved = forecast(TRACE, ON, made("zero-offload")).moved
    assert (moved[Lane.H2D], moved[Lane.D2H]) == (LAYERS * BLOCK, LAYERS * GRADIENT)


def test_zero_offload_updates_between_backward_and_the_next_forward() -> None:
    timeline = simulate(TRACE, ON, made("zero-offload"))
    updates = [e for e in timeline.events if e.lane is Lane.UPDATE]
    compute = [e for e in timeline.events if e.lane is Lane.COMPUTE]
    assert updates
    for one in compute:
        assert not any(u.start < one.end and one.start < u.end for u in updates)


def test_zero_offload_refuses_where_the_device_has_no_room_for_the_parameters() -> None:
    refused = refusal("zero-offload", LAYERS * BLOCK)
    assert refused.tier == "device" and "keeps all parameters on the device" in str(refused)
    assert any(r.words.startswith("policy zero-infinity or auto") for r in refused.nearest)
    assert made("zero-offload", refused.needed).device <= refused.needed


# zero-infinity.


def test_zero_infinity_streams_everything_and_fetches_ahead() -> None:
    plan = made("zero-infinity")
    assert {p.parameters for p in plan.placements} == {Tier.HOST} and plan.disk == 0
    assert plan.streaming.prefetch_distance >= 1 and not plan.streaming.overlap_update


def test_zero_infinity_puts_states_on_disk_before_parameters() -> None:
    free = made("zero-infinity", trace=LARGE)
    assert {p.states for p in free.placements} == {Tier.HOST}
    some = made("zero-infinity", host=free.host * 3 // 4, disk=ENOUGH, trace=LARGE)
    few = made("zero-infinity", host=free.host * 9 // 20, disk=ENOUGH, trace=LARGE)
    assert 0 < on_disk(some, "states") <= LAYERS and on_disk(some, "parameters") == 0
    assert on_disk(few, "states") == LAYERS and on_disk(few, "parameters") > 0


def on_disk(plan: Plan, what: str) -> int:
    return sum(getattr(p, what) is Tier.DISK for p in plan.placements)


def test_zero_infinity_without_a_disk_asks_for_one() -> None:
    refused = refusal("zero-infinity", host=made("zero-infinity", trace=LARGE).host - 1, trace=LARGE)
    assert refused.tier == "host" and any(r.what == "disk" for r in refused.nearest)


# elixir.


@pytest.mark.parametrize("share", [0.35, 0.5, 0.8])
@pytest.mark.parametrize("on", [ON, machine(h2d=1e7), machine(update=1e7)], ids=["even", "slow link", "slow update"])
def test_elixir_is_the_best_of_its_grid(share: float, on: Machine) -> None:
    wanted = asked(TRACE, on, device=round(share * EVERYTHING))
    plan, bench = make_plan(wanted, "elixir"), Bench(wanted)
    drafts = list(grid(bench))
    seconds = [bench.exact(draft).step_seconds for draft in drafts]
    assert plan.step_seconds == min(seconds)
    resident = [len(draft.resident) for draft in drafts]
    cached = [sum(p.parameters is Tier.DEVICE for p in draft.placements) for draft in drafts]
    # Both answers of the paper: all room to cached blocks; as much as there is to resident ones.
    assert resident[0] == 0 and resident == sorted(resident) and cached[0] == max(cached)
    assert not plan.streaming.overlap_update


def test_elixir_with_room_for_everything_and_a_slow_host_asks_nothing_of_it() -> None:
    plan = make_plan(asked(TRACE, machine(h2d=1e6, d2h=1e6, update=1e6), device=ENOUGH), "elixir")
    assert all(p.resident for p in plan.placements) and plan.host == 0


# auto beside them.

CASES: Sequence[tuple[str, Trace, Machine]] = (
    ("compute", chain(6, batch=4), machine(compute=1e8)),
    ("slow link", chain(6), machine(h2d=2e7, d2h=2e7)),
    ("slow update", chain(6), machine(update=5e7)),
    ("ends", ends_trace(), machine()),
)


@pytest.mark.thinned(6)
@pytest.mark.parametrize("share", [0.35, 0.6, 0.9])
@pytest.mark.parametrize(("trace", "on"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_auto_is_never_behind_one_of_them_by_more_than_one_percent(trace: Trace, on: Machine, share: float) -> None:
    device = round(share * make_plan(asked(trace, on, device=ENOUGH), "resident").device)
    wanted = asked(trace, on, device=device)
    best = make_plan(wanted, "auto").step_seconds
    assert best is not None
    for policy in STATES:
        try:
            theirs = make_plan(wanted, policy).step_seconds
        except DoesNotFit:
            continue
        assert theirs is not None and best <= 1.01 * theirs, policy
