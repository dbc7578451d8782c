"""Masks of an op that makes what is true or false beside numbers, as dropout does on cuda: the numbers stay."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forebay.checking import check
from forebay.errors import DoesNotFit, PlanInvalid
from forebay.lowering import Liveness, device_bound, lower
from forebay.memory import Kind, Tier
from forebay.model import Model
from forebay.plans import Placement, Plan, Streaming
from forebay.program import Verb
from forebay.simulation import Costs, play
from forebay.states import Masters
from forebay.trace import Phase, Trace
from forebay.treatments import Fate, Selection, Treatment
from tests.null.programs import device_standing
from tests.null.rearranging import behind
from tests.null.strategies import RESIDENT, plan_for, roomy_machine
from tests.null.synthetic import block
from tests.null.tracing import TraceBuilder

DROPOUT = "aten.native_dropout.default"
NUMEL = 8192  # of fp32 numbers, of a mask of 1 byte an element, and of one of 1 bit
OUT = 256
MACHINE = roomy_machine()


def dropouts(*, seen: bool) -> Trace:
    """A block that drops some of its input, whose result and mask are saved, and makes a product of the rest. Who calls
    it has the mask too until then (``seen``), or it is the op's own."""
    b = TraceBuilder(Model((block("a", ((4,), "float32", True)),), 0), {"input_ids": OUT})
    x, weight = b.ids["input_ids"], b.ids["a.0"]
    v = b.begin("a", Phase.FORWARD)
    v.given = (x,)
    kept = v.make(DROPOUT, [x], 4 * NUMEL, saved=True)
    mask = v.make_beside(NUMEL, dtype="bool", saved=True)
    v.drop(*(() if seen else (mask,)))
    v.save()
    out = v.make("linear", [kept, weight], OUT)
    v.save()
    v.drop(kept, *((mask,) if seen else ()))
    forward = b.end(v)
    v = b.begin("", Phase.FORWARD)
    loss = v.make("nll_loss", [out], 4)
    v.drop(out)
    b.end(v)
    v = b.begin("", Phase.BACKWARD)
    gradient = v.make("loss_backward", [loss], OUT, Kind.TEMPORARY)
    v.drop(loss)
    b.end(v)
    v = b.begin("a", Phase.BACKWARD)
    v.complete(weight, v.make("wgrad", [gradient, kept], 16, Kind.GRADIENT))
    v.unsave(kept, own=True)
    made = v.make("dropout_backward", [gradient, mask], OUT, Kind.TEMPORARY)
    v.drop(gradient, made)
    v.unsave(mask, own=True)
    b.end(v)
    b.let_go(forward)
    return b.trace()


def masked(trace: Trace, fate: Fate, recompute: tuple[str, ...]) -> Plan:
    chosen = (Selection(("a",), (Treatment(DROPOUT, 0, fate, 1),)),)
    liveness = Liveness(trace)
    streaming = Streaming(
        host_activations=liveness.host_activations(recompute, chosen),
        disk_activations=liveness.disk_activations(recompute, chosen),
        disk_window=liveness.disk_window(recompute, chosen),
    )
    return plan_for(trace, (Placement("a", *RESIDENT),), streaming, recompute, chosen, roomy=True)


@pytest.mark.parametrize("seen", [True, False], ids=["seen", "its own"])
@pytest.mark.parametrize("recompute", [(), ("a",)])
@pytest.mark.parametrize("fate", list(Fate))
def test_only_what_is_true_or_false_becomes_a_mask(fate: Fate, recompute: tuple[str, ...], seen: bool) -> None:
    trace = dropouts(seen=seen)
    plan = masked(trace, fate, recompute)
    plan = replace(plan, device=device_bound(trace, plan))
    check(trace, MACHINE, plan)
    assert plan.changes_numbers == ()
    program = lower(trace, plan)
    mask = len(trace.sources) + 1
    assert {(a.tensor, a.bits) for a in program.actions if a.verb is Verb.ENCODE} == {(mask, 1)}
    assert {a.tensor for a in program.actions if a.tensor >= 0} == {mask}
    assert plan.streaming.host_activations == (NUMEL // 8 if fate is Fate.OFFLOAD else 0)
    profile = Liveness(trace).profile(recompute, plan.activations)
    between = sum(level[profile.forward] for level in profile.levels.values())
    assert between == 4 * NUMEL + (NUMEL // 8 if fate is Fate.KEEP else 0) + 4
    usage = play(program, Costs(trace, MACHINE, Masters.WHOLE)).usage(Tier.DEVICE)
    assert usage.peak <= device_bound(trace, plan)


@pytest.mark.parametrize(("recompute", "beside"), [((), 0), (("a",), OUT)])
def test_the_promise_has_what_is_encoded_and_what_it_is_made_of(recompute: tuple[str, ...], beside: int) -> None:
    """A mask that nobody but its op has ever seen is there until its codes are: with the result of the op, the codes,
    and what it takes to make them. Decoding takes as much, of a block that runs again beside the gradient of its
    result. That is the most, and the checker finds no byte less."""
    trace = dropouts(seen=False)
    plan = masked(trace, Fate.KEEP, recompute)
    most = 4 * NUMEL + NUMEL + NUMEL // 8 + 24 * NUMEL + beside
    assert device_bound(trace, plan) == device_standing(trace, plan, gradients=True) + most
    short = device_standing(trace, plan) + most - 1
    plan = replace(plan, device=short, budget=replace(plan.budget, device=short))
    with pytest.raises(
        DoesNotFit, match=r"op \d+ .* in action \d+ \(decode a" if beside else r"op \d+ .* in action \d+ \(encode a"
    ) as caught:
        check(trace, MACHINE, plan)
    assert caught.value.needed == short + 1


def test_codes_of_what_is_gone_are_refused() -> None:
    """Another op has run since the one that made the mask, which nobody held."""
    trace = dropouts(seen=False)
    plan = masked(trace, Fate.KEEP, ())
    program = lower(trace, plan, steps=1)
    encode = next(i for i, a in enumerate(program.actions) if a.verb is Verb.ENCODE)
    late = behind(program, encode, encode + 1)
    with pytest.raises(PlanInvalid, match="is encoded when it is not in memory any more") as caught:
        check(trace, MACHINE, plan, late)
    assert caught.value.action == encode + 1
