"""Refusals under a trace: the figures are those that would do, and so are the remedies."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forebay.errors import CannotServe, DoesNotFit
from forebay.model import Block
from forebay.planners import Problem, make_plan
from forebay.planners.nearest import LEAN_OPTIMIZERS
from forebay.remedies import Remedy
from forebay.states import DRAWN, OF_FOREBAY
from forebay.trace import Trace
from forebay.units import format_enough
from tests.null.planning import ENOUGH, asked, chain, machine
from tests.null.synthetic import ADAM, block
from tests.null.tracing import Layer, chain_trace

TRACE = chain(6, batch=64)
ON = machine(disk=1e8)


def refused(wanted: Problem, policy: str = "auto") -> DoesNotFit:
    with pytest.raises(DoesNotFit) as caught:
        make_plan(wanted, policy)
    return caught.value


def remedy(error: DoesNotFit, what: str) -> Remedy:
    found = [r for r in error.nearest if r.what == what]
    assert found, error
    return found[0]


def with_states(states: tuple[str, ...]) -> Trace:
    layers = [Layer(b.name, saved=(8192 * 64,) * 3, out=8192 * 64) for b in TRACE.model.blocks]
    return chain_trace(TRACE.model.blocks, layers, input_nbytes=8192 * 64, state_names=states)


@pytest.mark.parametrize("policy", ["auto", "resident", "recompute", "stream", "stream-recompute"])
def test_a_device_refusal_names_the_least_that_is_enough(policy: str) -> None:
    error = refused(asked(TRACE, ON, device=1), policy)
    assert (error.tier, error.allowed) == ("device", 1)
    assert make_plan(asked(TRACE, ON, device=error.needed), policy).device == error.needed
    again = refused(asked(TRACE, ON, device=error.needed - 1), policy)
    assert again.needed == error.needed
    assert remedy(error, "device").needed == error.needed
    assert f"device_memory {format_enough(error.needed)}" in str(error)


@pytest.mark.parametrize("layers", [2, 3])
def test_the_least_is_enough_where_activations_come_back_behind_a_large_gradient(layers: int) -> None:
    """A head whose gradient leaves before the first activation comes back: what waits for its landing is never there
    beside it, nor is what comes behind that on the same lane."""
    blocks = [block(f"l{i}", *[((32, 32), "float32", True)] * 2) for i in range(layers)]
    head = block("head", ((256, 256), "float32", True))
    small = [Layer(b.name, saved=(32768,) * 2, out=8192) for b in blocks]
    trace = chain_trace([*blocks, head], [*small, Layer("head", saved=(8192,), out=8192)], input_nbytes=8192)
    error = refused(asked(trace, machine(), device=1))
    assert make_plan(asked(trace, machine(), device=error.needed), "auto").device == error.needed


def test_a_smaller_batch_is_an_estimate_that_holds() -> None:
    """Activations here are exactly in proportion to the batch, so the share that is named must fit."""
    least = refused(asked(TRACE, ON, device=1)).needed
    budget = least * 2 // 3
    error = refused(asked(TRACE, ON, device=budget))
    smaller = remedy(error, "batch")
    assert smaller.estimate and 0 < smaller.share < 1 and "an estimate" in smaller.words
    batch = int(64 * smaller.share)
    assert make_plan(asked(chain(6, batch=batch), ON, device=budget), "auto").device <= budget
    # ... and is not far below what would.
    with pytest.raises(DoesNotFit):
        make_plan(asked(chain(6, batch=int(batch * 1.25) + 1), ON, device=budget), "auto")


def test_no_batch_is_small_enough_for_a_device_without_room_for_a_slot() -> None:
    error = refused(asked(TRACE, ON, device=1000))
    assert not [r for r in error.nearest if r.what == "batch"]


def test_a_device_refusal_does_not_promise_what_the_host_breaks() -> None:
    error = refused(asked(TRACE, ON, device=1, host=1000))
    (host,) = remedy(error, "device").at_once
    assert (host.allowed, error.tier) == (1000, "device")
    assert make_plan(asked(TRACE, ON, device=error.needed, host=host.needed), "auto").host <= host.needed


def test_what_is_asked_for_at_once_is_no_alternative() -> None:
    """It does not do alone, and goes with each of the others, however few of them a report shows."""
    error = refused(asked(TRACE, ON, device=1, host=1000))
    assert not [remedy for remedy in error.nearest if remedy.what == "host"]
    device = remedy(error, "device")
    (host,) = device.at_once
    assert device.words == f"device_memory {format_enough(device.needed)} and at once {host.words}"
    assert host.words == f"host_memory {format_enough(host.needed)}"
    least = device.needed
    error = refused(asked(TRACE, ON, device=least * 2 // 3, host=1000))
    assert remedy(error, "batch").at_once == remedy(error, "device").at_once == (host,)
    assert all(other.words.endswith(host.words) for other in error.nearest if other.at_once)


@pytest.mark.parametrize(
    ("there", "words"),
    [({"device_capacity": 1_000_000}, "device memory"), ({"host_capacity": 100_000}, "host memory")],
)
def test_no_budget_is_named_that_the_machine_does_not_have(there: dict[str, int], words: str) -> None:
    """With it the refusal would be the same again."""
    small = replace(ON, **there)  # type: ignore[arg-type]
    device = 1_000_000 if "device_capacity" in there else refused(asked(TRACE, ON, device=1), "stream").needed
    error = refused(asked(TRACE, small, device=device, host=ENOUGH), "stream")
    first = error.nearest[0]
    (capacity,) = there.values()
    assert (first.what, first.needed, first.allowed) == ("machine", error.needed, capacity)
    assert first.words.startswith(f"a machine with {format_enough(error.needed)} of {words} (this one has ")


def test_a_disk_is_named_for_a_machine_whose_disk_was_not_measured() -> None:
    """Whoever allows a disk has it measured."""
    trace = chain(6, batch=64, width=768)
    device = refused(asked(trace, ON, device=1)).needed
    host = make_plan(asked(trace, ON, device=device), "auto").host * 3 // 4
    disk = remedy(refused(asked(trace, machine(), device=device, host=host)), "disk")
    assert make_plan(asked(trace, ON, device=device, host=host, disk=disk.needed), "auto").disk <= disk.needed


@pytest.mark.parametrize("policy", ["stream", "stream-recompute", "stronghold", "zero-offload"])
def test_who_never_keeps_everything_names_the_policy_that_does(policy: str) -> None:
    device = refused(asked(TRACE, ON, device=1), policy).needed
    error = refused(asked(TRACE, ON, device=device, host=1000), policy)
    assert error.tier == "host" and not [other for other in error.nearest if other.what == "device"]
    other = remedy(error, "policy")
    (larger,) = other.at_once
    assert other.policy == "auto" and other.words.startswith("policy auto with device_memory ")
    assert make_plan(asked(TRACE, ON, device=larger.needed, host=1000), "auto").host == 0


def test_updates_in_turns_name_another_policy_where_nothing_would_be_left_to_take_turns() -> None:
    """What is frozen takes no more room at home on the device than in a slot."""
    frozen = block("frozen", ((16, 16), "float32", False))
    trace = chain_trace([frozen], [Layer("frozen", saved=(8192,), out=8192)], input_nbytes=64)
    error = refused(asked(trace, ON, device=1), "angel-ptm-lock-free")
    with pytest.raises(CannotServe):
        make_plan(asked(trace, ON, device=error.needed), "angel-ptm-lock-free")
    first = error.nearest[0]
    assert (first.what, first.policy, first.needed) == ("policy", "angel-ptm", error.needed)
    assert first.words in str(error)
    assert make_plan(asked(trace, ON, device=error.needed), "angel-ptm").device <= error.needed


def streamed_device() -> int:
    return refused(asked(TRACE, ON, device=1)).needed


def test_a_host_refusal_names_the_least_that_is_enough_and_the_disk_that_would_do() -> None:
    device = streamed_device()
    error = refused(asked(TRACE, ON, device=device, host=100_000))
    assert (error.tier, error.allowed) == ("host", 100_000)
    assert make_plan(asked(TRACE, ON, device=device, host=error.needed), "auto").host <= error.needed
    assert refused(asked(TRACE, ON, device=device, host=error.needed - 1)).tier == "host"


def test_a_host_refusal_names_the_disk_that_would_do() -> None:
    device = streamed_device()
    host = make_plan(asked(TRACE, ON, device=device), "auto").host - 1
    big = chain(6, batch=64, width=768)
    device = refused(asked(big, ON, device=1)).needed
    host = make_plan(asked(big, ON, device=device), "auto").host * 3 // 4
    error = refused(asked(big, ON, device=device, host=host))
    disk = remedy(error, "disk")
    plan = make_plan(asked(big, ON, device=device, host=host, disk=disk.needed), "auto")
    assert 0 < plan.disk <= disk.needed and plan.host <= host


def test_a_host_refusal_names_the_device_that_needs_no_host() -> None:
    device = streamed_device()
    error = refused(asked(TRACE, ON, device=device, host=1000))
    larger = remedy(error, "device")
    plan = make_plan(asked(TRACE, ON, device=larger.needed, host=1000), "auto")
    assert plan.host == 0 and plan.device == larger.needed


def test_a_smaller_optimizer_is_named_where_it_is_enough() -> None:
    device = streamed_device()
    enough = {}
    momentum = ("momentum_buffer",)
    for name, states in (("adam", ADAM), ("momentum", momentum), ("sgd", ()), *(lean[:2] for lean in LEAN_OPTIMIZERS)):
        trace = with_states(states)
        enough[name] = make_plan(asked(trace, ON, device=device, states=states), "auto").host
    error = refused(asked(TRACE, ON, device=device, host=enough["adam"] - 1))
    named = {r.optimizer: r.needed for r in error.nearest if r.what == "optimizer"}
    assert named == {
        "adamw-8bit": enough["adamw-8bit"],
        "sgd with momentum": enough["momentum"],
        "sgd": enough["sgd"],
    }
    # Of those that adapt as Adam does the first that is enough.
    error = refused(asked(TRACE, ON, device=device, host=enough["adafactor"]))
    assert [r.optimizer for r in error.nearest if r.what == "optimizer"] == ["adafactor", "sgd"]
    error = refused(asked(TRACE, ON, device=device, host=enough["sgd"]))
    assert [r.optimizer for r in error.nearest if r.what == "optimizer"] == ["sgd"]
    error = refused(asked(TRACE, ON, device=device, host=enough["sgd"] - 1))
    assert not [r for r in error.nearest if r.what == "optimizer"]


def test_what_goes_to_disk_from_the_start_may_be_too_much_for_it() -> None:
    """FlashNeuron writes activations to disk, whatever the host has room for: with too little of both, the one is
    asked for after the other, and that is enough."""
    device = refused(asked(TRACE, ON, device=1, disk=1), "flashneuron").needed
    host = refused(asked(TRACE, ON, device=device, host=1, disk=1), "flashneuron")
    assert host.tier == "host"
    disk = refused(asked(TRACE, ON, device=device, host=host.needed, disk=1), "flashneuron")
    assert disk.tier == "disk"
    plan = make_plan(asked(TRACE, ON, device=device, host=host.needed, disk=disk.needed), "flashneuron")
    assert plan.host <= host.needed and 0 < plan.disk <= disk.needed


def test_a_disk_refusal_names_the_least_that_is_enough() -> None:
    big = chain(6, batch=64, width=768)
    device = refused(asked(big, ON, device=1)).needed
    host = make_plan(asked(big, ON, device=device), "auto").host * 3 // 4
    error = refused(asked(big, ON, device=device, host=host, disk=1000))
    assert (error.tier, error.allowed) == ("disk", 1000)
    assert make_plan(asked(big, ON, device=device, host=host, disk=error.needed), "auto").disk <= error.needed
    assert refused(asked(big, ON, device=device, host=host, disk=error.needed - 1)).tier == "disk"
    assert error.needed < ENOUGH


def test_blocks_of_single_modules_where_the_largest_is_what_is_too_large() -> None:
    """Layers of six matrices, each a module: one of them has to fit, beside the same activations."""
    width, size = 64, 8192
    parts = [
        [
            replace(
                block("", ((width, width), "float32", True)).parameters[0],
                name=f"l{i}.m{j}.weight",
                offset=j * 4 * width**2,
            )
            for j in range(6)
        ]
        for i in range(4)
    ]
    layers = [Block(f"l{i}", tuple(own), (f"l{i}",), 6 * 4 * width**2) for i, own in enumerate(parts)]
    trace = chain_trace(layers, [Layer(b.name, saved=(size,) * 6, out=size) for b in layers], input_nbytes=size)
    least = refused(asked(trace, ON, device=1), "stream").needed
    error = refused(asked(trace, ON, device=least - 1), "stream")
    smaller = remedy(error, "blocks")
    assert smaller.needed == least - 5 * 4 * width**2 and smaller.estimate
    assert "named in blocks= of forebay.prepare: the largest, l0.m0, takes 16.0 KiB" in smaller.words
    tight = refused(asked(trace, ON, device=smaller.needed - 1), "stream")
    assert all(r.what != "blocks" for r in tight.nearest)


def test_without_masters_where_nothing_else_is_enough() -> None:
    """Of the optimizers that adapt as Adam does, in bf16, each is named where the one before it is too much."""
    blocks = [block(f"layers.{i}", *[((256, 256), "bfloat16", True)] * 2) for i in range(48)]
    trace = chain_trace(blocks, [Layer(b.name, (8192, 8192), 0, 8192) for b in blocks], input_nbytes=8192)
    lean = {name: (states, masters) for name, states, masters in LEAN_OPTIMIZERS}
    host, named = make_plan(asked(trace, ON, device=ENOUGH), "stream").host // 2, []
    while found := [
        r for r in refused(asked(trace, ON, device=ENOUGH, host=host), "stream").nearest if r.optimizer in lean
    ]:
        (one,) = found
        states, masters = lean[one.optimizer]
        own = replace(trace, state_names=states, model=trace.model if masters else trace.model.without_masters())
        plan = make_plan(asked(own, ON, device=ENOUGH, host=one.needed, states=states), "stream")
        assert plan.host == one.needed and bool(plan.changes_numbers) is (one.optimizer != "adafactor")
        named.append(one.optimizer)
        host = one.needed - 1
    assert named == list(lean)


@pytest.mark.parametrize(
    ("name", "following"),
    [("adamw-8bit", "adafactor"), ("adafactor", "adamw-8bit-sr"), ("adamw-8bit-sr", "adafactor-sr")],
)
def test_who_has_few_moments_already_is_told_of_fewer(name: str, following: str) -> None:
    """Masters are counted with them."""
    blocks = [block(f"layers.{i}", *[((256, 256), "bfloat16", True)] * 2) for i in range(48)]
    trace = chain_trace(blocks, [Layer(b.name, (8192, 8192), 0, 8192) for b in blocks], input_nbytes=8192)
    states = OF_FOREBAY[name.removesuffix(DRAWN)]
    model = trace.model.without_masters() if name.endswith(DRAWN) else trace.model
    own = replace(trace, model=model, state_names=states)
    least = refused(asked(own, ON, device=ENOUGH, host=1 << 20, states=states), "stream").needed
    nearest = refused(asked(own, ON, device=ENOUGH, host=least - 1, states=states), "stream").nearest
    assert following in [remedy.optimizer for remedy in nearest]
