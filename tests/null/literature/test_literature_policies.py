"""Published planners for activations: each decides what its paper says, and its plan keeps every promise."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product

import pytest

from forebay.checking import check
from forebay.errors import CannotServe, ConfigError, DoesNotFit
from forebay.lowering.liveness import device_bound
from forebay.machine import Machine
from forebay.memory import Tier
from forebay.planners import LITERATURE, PLANNERS, Bench, make_plan
from forebay.planners.activations.items import INPUT
from forebay.planners.activations.literature.chained import links_of
from forebay.planners.activations.literature.checkmate import programme_of, solved
from forebay.planners.activations.literature.layers import layers_of
from forebay.planners.parts import KEPT, all_resident
from forebay.plans import Plan
from forebay.simulation import simulate
from forebay.trace import Trace
from forebay.treatments import Fate
from tests.null.literature.graphs import KIB, ON, tried
from tests.null.planning import ENOUGH, asked, chain, machine
from tests.null.synthetic import block, problem
from tests.null.tracing import Layer as Made
from tests.null.tracing import chain_trace

LAYERS = 6
TRACE = chain(LAYERS, activation=64 * KIB)
NAMES = tuple(b.name for b in TRACE.model.blocks)


def uneven() -> Trace:
    """Blocks of which no two are alike, with what nobody saves between them."""
    sizes = [(64, 16, 32), (8,), (128, 4), (32, 32, 32, 32), (16, 96)]
    blocks = [block(f"layers.{i}", *[((32, 32), "float32", True)] * len(own)) for i, own in enumerate(sizes)]
    layers = [
        Made(b.name, tuple(size * KIB for size in own), temporary=(24 * KIB) * (i % 2), out=16 * KIB, late=i == 3)
        for i, (b, own) in enumerate(zip(blocks, sizes, strict=True))
    ]
    return chain_trace(blocks, layers, input_nbytes=16 * KIB)


UNEVEN = uneven()
TRACES = {"chain": TRACE, "uneven": UNEVEN}
WITH_ATTENTION = {"selective", "distflashattn", "loongtrain"}
"""They are for models with attention, which these traces have none of."""

OTHERS = sorted(set(LITERATURE) - WITH_ATTENTION)
RERUN_ONLY = {"rotor", "rockmate", "checkmate", "joins", "moccasin"}
BY_SECONDS = {"tsplit"}
MOVE_ONLY = {"vdnn-all", "vdnn-conv", "vdnn-dyn", "te", "flashneuron", "autotm", "swapadvisor"}


def made(policy: str, device: int = ENOUGH, *, trace: Trace = TRACE, on: Machine = ON, disk: int = 0) -> Plan:
    return make_plan(asked(trace, on, device=device, disk=disk), policy)


def outcome(policy: str, device: int, trace: Trace) -> Plan | DoesNotFit:
    try:
        return made(policy, device, trace=trace, disk=ENOUGH)
    except DoesNotFit as refused:
        return refused


def moved(plan: Plan) -> int:
    return plan.streaming.host_activations + plan.streaming.disk_activations


def everything(trace: Trace = TRACE) -> int:
    return made("resident", trace=trace).device


def standing(trace: Trace = TRACE) -> int:
    """Bytes of what is on the device whatever becomes of activations: parameters, gradients, states."""
    bench = Bench(asked(trace, ON, device=ENOUGH))
    return bench.arenas(all_resident(trace.model, KEPT)).device


# All of them.


def test_they_are_selected_by_name() -> None:
    assert all(PLANNERS[name] is LITERATURE[name] for name in LITERATURE) and set(LITERATURE) > WITH_ATTENTION


@pytest.mark.thinned(3)
@pytest.mark.parametrize("policy", OTHERS)
@pytest.mark.parametrize("name", TRACES)
@pytest.mark.parametrize("share", [0.15, 0.5, 0.8])
def test_its_plan_is_right_and_within_its_budgets(policy: str, name: str, share: float) -> None:
    """``share`` of what activations take with everything kept, beside all parameters."""
    trace = TRACES[name]
    device = standing(trace) + round(share * (everything(trace) - standing(trace)))
    plan = outcome(policy, device, trace)
    if isinstance(plan, DoesNotFit):
        assert plan.needed > plan.allowed == device and plan.nearest[0].needed == plan.needed
        return
    assert plan.planner == policy and not plan.changes_numbers
    check(trace, ON, plan)
    peaks = simulate(trace, ON, plan).peaks
    assert peaks[Tier.DEVICE] <= plan.device == device_bound(trace, plan) <= device
    assert peaks.get(Tier.HOST, 0) <= plan.host and peaks.get(Tier.DISK, 0) <= plan.disk
    if policy in RERUN_ONLY:
        assert not moved(plan)
    if policy in MOVE_ONLY:
        assert not plan.recompute


@pytest.mark.parametrize("policy", OTHERS)
@pytest.mark.parametrize("name", TRACES)
def test_the_device_that_a_refusal_names_is_enough(policy: str, name: str) -> None:
    trace = TRACES[name]
    with pytest.raises(DoesNotFit) as refused:
        made(policy, 1, trace=trace)
    assert refused.value.tier == "device" and refused.value.allowed == 1
    needed = refused.value.needed
    assert made(policy, needed, trace=trace).device <= needed
    with pytest.raises(DoesNotFit):
        made(policy, needed - 1, trace=trace)


@pytest.mark.parametrize("policy", sorted(set(OTHERS) - {"vdnn-all", "vdnn-conv"}))
def test_where_everything_fits_nothing_is_given_up(policy: str) -> None:
    plan = made(policy)
    assert not plan.recompute and not plan.activations and all(p.resident for p in plan.placements)


@pytest.mark.parametrize("policy", OTHERS)
def test_where_parameters_do_not_fit_they_stream(policy: str) -> None:
    trace = chain(LAYERS, width=256)
    plan = made(policy, everything(trace) // 2, trace=trace)
    check(trace, ON, plan)
    assert any(not p.resident for p in plan.placements)


@pytest.mark.parametrize("policy", LITERATURE)
def test_without_a_batch_it_asks_for_one(policy: str) -> None:
    with pytest.raises(ConfigError, match=f"policy {policy} needs .* give one"):
        make_plan(problem([block("one", ((8, 8), "float32", True))], device=ENOUGH), policy)


@pytest.mark.parametrize("policy", sorted(WITH_ATTENTION))
def test_a_model_without_attention_is_refused_with_who_could(policy: str) -> None:
    with pytest.raises(CannotServe, match=f"policy {policy} .*attention") as refused:
        made(policy)
    assert any(name in refused.value.nearest[0].words for name in ("rockmate", "auto"))


@pytest.mark.parametrize("policy", OTHERS)
def test_a_model_without_blocks_that_run_once_is_refused_with_who_could(policy: str) -> None:
    """Layers that share all their parameters are one block that runs again and again."""
    shared = block("shared", ((32, 32), "float32", True))
    trace = chain_trace([shared], [Made("shared", (64 * KIB,), out=16 * KIB)] * 3, input_nbytes=16 * KIB)
    with pytest.raises(CannotServe, match=f"policy {policy} decides about blocks that .* run once") as refused:
        made(policy, trace=trace)
    assert refused.value.nearest[0].words == "policy auto or keep"


@pytest.mark.parametrize("policy", OTHERS)
def test_more_of_the_device_is_never_slower(policy: str) -> None:
    """By what is given up, which is what these decide about; or by the seconds, where they compare those."""
    held = everything() - standing()
    budgets = [standing() + round(share * held) for share in (0.4, 0.6, 0.8, 1.0)]
    plans = []
    for device in budgets:
        try:
            plans.append(made(policy, device))
        except DoesNotFit:
            assert not plans
    plans = [plan for plan in plans if all(p.resident for p in plan.placements)]
    given: list[object] = [(len(plan.recompute), moved(plan)) for plan in plans]
    if policy in BY_SECONDS:
        given = [plan.step_seconds for plan in plans]
    assert len(given) > 1 and all(more >= less for more, less in pairwise(given))


# Single ones.


def tight(share: float = 0.5, trace: Trace = TRACE) -> int:
    return standing(trace) + round(share * (everything(trace) - standing(trace)))


def test_te_offloads_the_fewest_first_layers() -> None:
    plan = made("te", tight())
    (selection,) = plan.activations
    count = len(selection.blocks)
    assert selection.blocks == NAMES[:count] and 0 < count < LAYERS
    assert plan.streaming.offload_window == moved(plan) // count
    (more,) = made("te", plan.device - 1).activations
    assert more.blocks == NAMES[: count + 1]


def test_vdnn_moves_all_or_what_products_read_and_dyn_takes_the_fastest() -> None:
    plans = {name: made(f"vdnn-{name}") for name in ("all", "conv", "dyn")}
    assert moved(plans["all"]) >= moved(plans["conv"]) > 0 == moved(plans["dyn"])
    assert plans["all"].streaming.offload_window == 64 * KIB
    slow = machine(compute=1e10, h2d=1e7, d2h=1e7)
    within = [made(f"vdnn-{name}", tight(0.7), on=slow).step_seconds or 0.0 for name in ("dyn", "all", "conv")]
    assert within[0] == min(within)


def test_superneurons_makes_what_is_cheap_again_before_it_moves_anything() -> None:
    trace = with_cheap_ops()
    held = everything(trace) - standing(trace)
    some, less = (made("superneurons", standing(trace) + round(share * held), trace=trace) for share in (0.85, 0.5))
    assert some.recompute and not moved(some)
    assert moved(less) and set(some.recompute) <= set(less.recompute)
    ops = {t.op for selection in less.activations for t in selection.treatments}
    assert "linear" in ops and "cheap" not in ops


def with_cheap_ops() -> Trace:
    """Layers whose second op does no arithmetic: the one that reads 48 KiB."""
    sizes = (48 * KIB, 64 * KIB, 32 * KIB)
    blocks = [block(f"layers.{i}", *[((32, 32), "float32", True)] * 3) for i in range(LAYERS)]
    made_of = chain_trace(blocks, [Made(b.name, sizes, out=64 * KIB) for b in blocks], input_nbytes=64 * KIB)
    works = tuple(
        replace(work, flops=0, op="cheap") if work.signature.startswith(f"linear({48 * KIB},") else work
        for work in made_of.works
    )
    assert any(work.op == "cheap" for work in works)
    return replace(made_of, works=works)


def test_flashneuron_writes_the_first_tensors_to_the_disk_or_to_the_host_without_one() -> None:
    disk, host = made("flashneuron", tight(), disk=ENOUGH), made("flashneuron", tight())
    for plan, fate in ((disk, Fate.DISK), (host, Fate.OFFLOAD)):
        assert {t.fate for s in plan.activations for t in s.treatments} == {fate}
        blocks = [name for s in plan.activations for name in s.blocks]
        assert sorted(blocks) == list(NAMES[: len(blocks)])
    assert disk.streaming.disk_activations and not disk.streaming.host_activations
    assert any("of the time of the forward" in reason for reason in disk.reasons)
    check(TRACE, ON, disk)


@pytest.mark.parametrize("policy", ["capuchin", "str", "tsplit"])
def test_swaps_that_hide_come_first_and_with_a_slow_link_nothing_is_swapped(policy: str) -> None:
    fast, slow = (made(policy, tight(0.6), on=machine(compute=1e9, h2d=rate, d2h=rate)) for rate in (1e12, 1e3))
    assert moved(fast) and not fast.recompute
    assert slow.recompute and not moved(slow)


def test_capuchin_is_no_slower_than_vdnn() -> None:
    """The shape of the paper's comparison: at every budget that both serve."""
    for share, rate in product((0.5, 0.7), (1e8, 1e9)):
        on = machine(compute=1e10, h2d=rate, d2h=rate)
        seconds = [made(policy, tight(share), on=on).step_seconds or 0.0 for policy in ("capuchin", "vdnn-all")]
        assert seconds[0] <= seconds[1] * 1.001


def test_pofo_is_no_slower_than_rotor_and_moves_where_the_link_is_fast() -> None:
    plans = {}
    for rate, share in product((1e6, 1e8, 1e9, 1e10), (0.4, 0.6)):
        on = machine(compute=1e9, h2d=rate, d2h=rate)
        plans[rate] = [made(policy, tight(share), on=on) for policy in ("pofo", "rotor")]
        assert (plans[rate][0].step_seconds or 0.0) <= (plans[rate][1].step_seconds or 0.0)
    assert not moved(plans[1e6][0]) and moved(plans[1e10][0]) and not plans[1e10][0].recompute


def test_rockmate_and_checkmate_run_no_more_again_than_rotor() -> None:
    """Blocks in parts are at least as good as blocks as a whole."""
    for trace, share in product(TRACES.values(), (0.4, 0.7)):
        device = standing(trace) + round(share * (everything(trace) - standing(trace)))
        seconds = {policy: made(policy, device, trace=trace).step_seconds or 0.0 for policy in RERUN_ONLY}
        assert seconds["checkmate"] <= seconds["rotor"] * 1.0001 and seconds["rockmate"] <= seconds["rotor"] * 1.0001
        assert seconds["moccasin"] <= seconds["rotor"] * 1.0001
        assert seconds["rockmate"] <= seconds["checkmate"] * 1.05


# Checkmate's programme.


@pytest.mark.parametrize("name", TRACES)
@pytest.mark.parametrize("share", [0.2, 0.35, 0.5, 0.7, 0.9, 1.0])
def test_the_integer_programme_is_as_good_as_trying_everything(name: str, share: float) -> None:
    layers = layers_of(Bench(asked(TRACES[name], ON, device=ENOUGH)))[:3]
    allowed = share * sum(layer.items.held for layer in layers)
    found, best = solved(layers, allowed, 500), tried(layers, allowed)
    if best is None:
        assert found is None
        return
    assert found is not None and found.value == pytest.approx(best) and found.gap < 1e-6
    programme = programme_of(layers, allowed)
    assert (programme.upper @ found.x <= programme.most + 1e-3).all()


def test_layers_are_those_that_a_plan_can_say_something_about() -> None:
    layers = layers_of(Bench(asked(UNEVEN, ON, device=ENOUGH)))
    assert [layer.name for layer in layers] == [b.name for b in UNEVEN.model.blocks]
    assert all(layer.seconds > 0 for layer in layers)
    links = links_of(Bench(asked(UNEVEN, ON, device=ENOUGH)), layers)
    assert all(link.forward > 0 and link.backward > 0 for link in links)
    for layer in layers:
        inputs = [item for item in layer.items.again or () if item.op == INPUT]
        assert len(inputs) <= 1
