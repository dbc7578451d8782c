"""MoESys: what is dense stays on the device, experts come from the host and from disk, and a dense model is refused."""

from __future__ import annotations

from contextlib import suppress

import pytest

from forebay.budgets import Budget
from forebay.checking import check
from forebay.errors import CannotServe, DoesNotFit
from forebay.memory import Tier
from forebay.planners import make_plan
from forebay.planners.states.moesys import with_experts
from forebay.planning import assess, choose_plan
from forebay.plans import Plan
from forebay.trace import Trace
from tests.null.planning import ENOUGH, asked, chain, machine
from tests.null.synthetic import block, problem
from tests.null.tracing import Layer, chain_trace

ON = machine(disk=1e8)
LAYERS = 4


def mixture(width: int = 128) -> Trace:
    """Layers of attention (dense) and experts (four times as large), each a block."""
    blocks = []
    for i in range(LAYERS):
        blocks.append(block(f"layers.{i}.attention", ((width, width), "float32", True)))
        blocks.append(block(f"layers.{i}.mlp.experts", ((4, width, width), "float32", True)))
    return chain_trace(blocks, [Layer(b.name, saved=(8192,), out=8192) for b in blocks], input_nbytes=8192)


TRACE = mixture()
DENSE = {f"layers.{i}.attention" for i in range(LAYERS)}
EXPERT = TRACE.model.blocks[1].nbytes


def made(device: int = ENOUGH, *, trace: Trace = TRACE, host: int = ENOUGH, disk: int = 0) -> Plan:
    return make_plan(asked(trace, ON, device=device, host=host, disk=disk), "moesys")


def homes(plan: Plan, *, dense: bool) -> set[tuple[Tier, Tier, Tier]]:
    return {(p.parameters, p.gradients, p.states) for p in plan.placements if (p.block in DENSE) is dense}


def test_dense_blocks_stay_and_experts_stream() -> None:
    plan = made()
    assert homes(plan, dense=True) == {(Tier.DEVICE,) * 3}
    assert homes(plan, dense=False) == {(Tier.HOST,) * 3}
    assert set(plan.streaming.slots) == {EXPERT} and plan.streaming.prefetch_distance >= 1
    assert not plan.streaming.overlap_update and not plan.changes_numbers
    assert f"{LAYERS} blocks have experts, the parameters of {LAYERS} of them are on the host" in plan.reasons
    check(TRACE, ON, plan)


def test_with_less_room_dense_parameters_stay_alone_and_then_nothing() -> None:
    found, device = list[tuple[Tier, Tier, Tier]](), made().device
    with suppress(DoesNotFit):
        while True:
            plan = made(device)
            check(TRACE, ON, plan)
            assert plan.device <= device
            found += [home for home in homes(plan, dense=True) if home not in found]
            device = device * 7 // 8
    assert found == [(Tier.DEVICE,) * 3, (Tier.DEVICE, Tier.HOST, Tier.HOST), (Tier.HOST,) * 3]


def test_a_device_that_is_too_small_is_told_what_would_do() -> None:
    with pytest.raises(DoesNotFit, match="policy moesys streams the experts of a layer at once") as refused:
        made(1)
    assert made(refused.value.needed).device <= refused.value.needed


def test_experts_that_the_host_has_no_room_for_are_on_disk_and_dense_ones_are_not() -> None:
    trace = mixture(512)
    free = made(trace=trace)
    some = made(trace=trace, host=free.host * 3 // 4, disk=ENOUGH)
    few = made(trace=trace, host=free.host * 3 // 5, disk=ENOUGH)
    for plan in (some, few):
        check(trace, ON, plan)
        assert homes(plan, dense=True) == {(Tier.DEVICE,) * 3} and plan.disk > 0
    cold = sum(p.parameters is Tier.DISK for p in few.placements)
    assert cold and f"{LAYERS} blocks have experts, the parameters of {LAYERS - cold} of them are on the host" in (
        few.reasons
    )


def test_without_a_disk_it_asks_for_one_where_the_host_is_too_small() -> None:
    trace = mixture(512)
    with pytest.raises(DoesNotFit) as refused:
        made(trace=trace, host=made(trace=trace).host - 1)
    assert refused.value.tier == "host" and any(remedy.what == "disk" for remedy in refused.value.nearest)


def test_it_plans_without_a_batch() -> None:
    blocks = [block("embed", ((8, 8), "float32", True)), block("layers.0.experts", ((4, 8, 8), "float32", True))]
    plan = make_plan(problem(blocks, device=ENOUGH), "moesys")
    assert [p.resident for p in plan.placements] == [True, False]


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("model.layers.0.mlp.experts", True),
        ("model.layers.0.mlp.experts.3.down_proj", True),
        ("model.layers.0.mlp.shared_experts.down_proj", False),
        ("model.layers.0.self_attn", False),
    ],
)
def test_experts_are_known_by_their_names(name: str, found: bool) -> None:
    assert with_experts(block(name, ((8, 8), "float32", True))) is found


# A dense model.


def test_a_dense_model_is_refused_whatever_the_budget() -> None:
    with pytest.raises(CannotServe, match="experts of a mixture, and no parameter of this model") as refused:
        made(trace=chain(3))
    assert (refused.value.tier, refused.value.needed, refused.value.allowed) == ("", 0, 0)
    assert [remedy.words for remedy in refused.value.nearest] == ["policy zero-infinity or auto"]
    assert make_plan(asked(chain(3), ON, device=ENOUGH), "zero-infinity").planner == "zero-infinity"


def test_the_report_has_no_plan_and_says_what_would_do() -> None:
    """``forebay plan`` then exits with 1."""
    report = assess("dense", chain(3), ON, Budget(ENOUGH), "moesys")
    assert report.plan is None and "What would fit" not in report.reasons[0]
    assert [other.words for other in report.alternatives] == ["policy zero-infinity or auto"]


def test_no_other_loss_helps_a_dense_model() -> None:
    def refused() -> Plan:
        return made(trace=chain(3))

    def never(*_: object) -> Plan:
        raise AssertionError("nothing is to be cut")

    with pytest.raises(CannotServe):
        choose_plan(refused, never, never)  # type: ignore[arg-type]
