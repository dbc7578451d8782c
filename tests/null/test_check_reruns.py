"""The checker on blocks that run again without their named ops: what those have made comes back one after the other."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forebay.checking import check
from forebay.errors import DoesNotFit, PlanInvalid
from forebay.lowering import Liveness, device_bound, lower
from forebay.memory import Kind
from forebay.model import Model
from forebay.plans import Placement, Plan, Streaming
from forebay.program import Program, Verb
from forebay.timeline import Lane
from forebay.trace import Phase, Trace
from forebay.treatments import Fate, Selection, Treatment
from tests.null.programs import device_standing
from tests.null.rearranging import behind
from tests.null.strategies import RESIDENT, plan_for, roomy_machine
from tests.null.synthetic import block
from tests.null.tracing import TraceBuilder
from tests.null.treating import treated_program

S, OUT = 8192, 256
MACHINE = roomy_machine()
TEMPORARIES = ("pow", "mul", "add", "tanh")
BLOCKS = ("a", "b")


def gelus(*, first: str = "pow", handed: int = OUT, saved: bool = True) -> Trace:
    """Two blocks: four ops in a row, each of which reads what the one before it has made, and nobody else does; then
    one that saves its result, and one that hands on another, of ``handed`` bytes, that is ``saved`` too."""
    b = TraceBuilder(Model(tuple(block(n, ((4,), "float32", True)) for n in BLOCKS), 0), {"input_ids": OUT})
    x, kept = b.ids["input_ids"], []
    for name in BLOCKS:
        v = b.begin(name, Phase.FORWARD)
        v.given, current = (x,), x
        for op in (first, *TEMPORARIES[1:]):
            current, before = v.make(op, [current], S), current
            if before != x:
                v.drop(before)
        made = v.make("linear", [current, b.ids[f"{name}.0"]], S, saved=True)
        v.drop(current)
        v.save()
        out = v.make("out", [made], handed, saved=saved or name == BLOCKS[-1])
        v.drop(made, x)
        kept.append((name, x, made, b.end(v)))
        x = out
    v = b.begin("", Phase.FORWARD)
    loss = v.make("nll_loss", [x], 4)
    v.drop(x)
    b.end(v)
    v = b.begin("", Phase.BACKWARD)
    gradient = v.make("loss_backward", [loss, x], OUT, Kind.TEMPORARY)
    v.drop(loss)
    v.unsave(x)
    b.end(v)
    for name, x, made, place in reversed(kept):
        v = b.begin(name, Phase.BACKWARD)
        g = v.make("out_backward", [gradient, made], OUT, Kind.TEMPORARY)
        v.drop(gradient)
        gradient = v.make("dgrad", [g], OUT, Kind.TEMPORARY) if x >= len(b.sources) else g
        v.complete(b.ids[f"{name}.0"], v.make("wgrad", [g, made], b.nbytes[b.ids[f"{name}.0"]], Kind.GRADIENT))
        v.drop(g)
        v.unsave(made, own=True)
        v.unsave(*((x,) if saved else ()))
        b.end(v)
        b.let_go(place)
    return b.trace()


def exact(trace: Trace, fate: Fate, bits: int = 0, window: int = 0, named: tuple[str, ...] = TEMPORARIES) -> Plan:
    """Both blocks run again but for ``named`` ops; the device has what is promised, and no byte more."""
    chosen = (Selection(BLOCKS, tuple(Treatment(op, 0, fate, bits) for op in named)),)
    room = 1 << 20
    streaming = Streaming(
        reload_window=window,
        host_activations=room if fate is Fate.OFFLOAD else 0,
        disk_activations=room if fate is Fate.DISK else 0,
        disk_window=room if fate is Fate.DISK else 0,
    )
    placements = tuple(Placement(name, *RESIDENT) for name in BLOCKS)
    return tight(plan_for(trace, placements, streaming, BLOCKS, chosen, roomy=True), trace)


def tight(plan: Plan, trace: Trace) -> Plan:
    most = device_bound(trace, plan)
    return replace(plan, device=most, budget=replace(plan.budget, device=most))


@pytest.mark.parametrize("first", ["pow", "unnamed"])
@pytest.mark.parametrize("window", [0, S, 3 * S])
@pytest.mark.parametrize(
    ("fate", "bits"), [(Fate.OFFLOAD, 0), (Fate.DISK, 0), (Fate.OFFLOAD, 8), (Fate.KEEP, 8), (Fate.KEEP, 0)]
)
def test_what_comes_back_takes_no_more_than_is_promised(fate: Fate, bits: int, window: int, first: str) -> None:
    trace = gelus(first=first)
    named = TEMPORARIES if first == "pow" else TEMPORARIES[1:]
    check(trace, MACHINE, exact(trace, fate, bits, window, named))


def needed(trace: Trace, plan: Plan, program: Program | None = None) -> int:
    """The bytes that the checker finds at the peak, beside what stands: by its own account, not the program's."""
    stands = device_standing(trace, plan, gradients=True)
    small = replace(plan, device=stands, budget=replace(plan.budget, device=stands))
    with pytest.raises(DoesNotFit, match="are tensors of the step") as caught:
        check(trace, MACHINE, small, program)
    return caught.value.needed - device_standing(trace, plan)


def test_each_is_gone_before_the_next_but_one_comes() -> None:
    """At b's rerun two of the four at once, what a hands on and the gradient of what b does. The promise counts the
    gradients of parameters as well, which come later."""
    trace = gelus()
    plan = exact(trace, Fate.OFFLOAD)
    assert needed(trace, plan) == 2 * S + 2 * OUT
    assert plan.device == device_standing(trace, plan, gradients=True) + 2 * S + 2 * OUT


def test_what_may_come_at_any_time_counts_all_at_once() -> None:
    """Reloads that do not say before which op they are issued, or that compute so far need not be over for."""
    trace = gelus()
    plan = exact(trace, Fate.OFFLOAD)
    program = lower(trace, plan, steps=1)
    actions = program.actions
    silent, early = list(actions), list(actions)
    for index, action in enumerate(actions):
        if action.verb is Verb.RELOAD:
            silent[index] = replace(action, ops=(0, 0))
            early[index] = replace(action, after=tuple(a for a in action.after if actions[a].lane is not Lane.COMPUTE))
    assert needed(trace, plan, replace(program, actions=tuple(silent))) == 4 * S + 2 * OUT
    # All eight while b's linear runs for the first time: with what that reads and makes, and what a hands on.
    assert needed(trace, plan, replace(program, actions=tuple(early))) == (8 + 2) * S + OUT


def test_what_comes_back_after_the_compute_behind_it_is_refused() -> None:
    """Though nobody reads but the last of the four: the others take memory that compute does not know of."""
    trace = gelus()
    plan = exact(trace, Fate.OFFLOAD)
    program = lower(trace, plan, steps=1)
    check(trace, MACHINE, plan, program)
    for index in [i for i, a in enumerate(program.actions) if a.verb is Verb.RELOAD]:
        reader = next(i for i, a in enumerate(program.actions) if i > index and a.recomputed)
        with pytest.raises(PlanInvalid, match=r"is given tensor .* may not be back by then"):
            check(trace, MACHINE, plan, behind(program, index, reader))


def test_what_compute_does_not_wait_for_is_refused() -> None:
    trace = gelus()
    plan = exact(trace, Fate.OFFLOAD)
    program = lower(trace, plan, steps=1)
    for index, action in enumerate(program.actions):
        if action.recomputed:
            less = tuple(a for a in action.after if program.actions[a].verb is not Verb.RELOAD)
            assert less != action.after
            wrong = replace(action, after=less)
            actions = (*program.actions[:index], wrong, *program.actions[index + 1 :])
            with pytest.raises(PlanInvalid, match=r"is given tensor .* may not be back by then"):
                check(trace, MACHINE, plan, replace(program, actions=actions))


def test_a_rerun_has_all_that_it_is_given_when_it_begins() -> None:
    """Of what a hands on, only b's first op makes something, and that is kept: nobody reads it again. But whoever runs
    b's forward again hands it in."""
    trace = gelus(handed=S)
    chosen = (
        Selection(("a",), (Treatment("out", 0, Fate.OFFLOAD),)),
        Selection(("b",), (Treatment("pow", 0, Fate.KEEP),)),
    )
    placements = tuple(Placement(name, *RESIDENT) for name in BLOCKS)
    plan = plan_for(trace, placements, Streaming(host_activations=S), ("b",), chosen, roomy=True)
    program = lower(trace, plan, steps=1)
    check(trace, MACHINE, plan, program)
    reload = next(i for i, a in enumerate(program.actions) if a.verb is Verb.RELOAD)
    reader = next(i for i, a in enumerate(program.actions) if a.recomputed)
    assert program.actions[reader].ops[0] not in trace_readers(trace, program.actions[reload].tensor)
    with pytest.raises(PlanInvalid, match=r"is given tensor .* may not be back by then") as caught:
        check(trace, MACHINE, plan, behind(program, reload, reader))
    assert caught.value.action == reader - 1  # the reload is behind it now


def trace_readers(trace: Trace, root: int) -> set[int]:
    return {number for number, visit, op in trace.ops() if root in map(visit.resolve, op.inputs)}


def test_what_goes_within_one_action_is_there_until_the_copies_after_it() -> None:
    """Forward of b in one action: the results of all four are there at its end, with those of the two ops after them
    and what a hands on."""
    trace = gelus()
    plan = exact(trace, Fate.OFFLOAD)
    assert needed(trace, plan, treated_program(trace, plan, 1)) == 5 * S + 2 * OUT


def with_a_tail() -> Trace:
    """A block that saves its first result, and then makes three large ones in a row that nobody saves."""
    b = TraceBuilder(Model((block("a", ((4,), "float32", True)),), 0), {"input_ids": OUT})
    v = b.begin("a", Phase.FORWARD)
    v.given = (b.ids["input_ids"],)
    saved = v.make("linear", [b.ids["input_ids"], b.ids["a.0"]], OUT, saved=True)
    v.save()
    current = saved
    for op in ("neg", "exp", "abs"):
        current, before = v.make(op, [current], S), current
        v.drop(*(() if before == saved else (before,)))
    out = v.make("out", [current], OUT)
    v.drop(current, saved)
    forward = b.end(v)
    v = b.begin("a", Phase.BACKWARD)
    v.complete(b.ids["a.0"], v.make("wgrad", [out, saved], 16, Kind.GRADIENT))
    v.drop(out)
    v.unsave(saved, own=True)
    b.end(v)
    b.let_go(forward)
    return b.trace()


def test_what_comes_after_the_last_save_is_held_until_forward_is_over() -> None:
    """A forward does not know that nothing more will be saved in it, so that named ops after that have what they made
    kept until its end. Of three in a row: two at a time, or at the last of them all three, or those with what the block
    makes; beside what is saved."""
    trace = with_a_tail()
    for names, most in (((), 2 * S + OUT), (("neg",), 3 * S + OUT), (("neg", "exp", "abs"), 3 * S + 2 * OUT)):
        chosen = (Selection(("a",), tuple(Treatment(op, 0, Fate.KEEP) for op in names)),) if names else ()
        plan = plan_for(trace, (Placement("a", *RESIDENT),), Streaming(), ("a",), chosen, roomy=True)
        assert needed(trace, plan) == most
        assert device_bound(trace, plan) == device_standing(trace, plan, gradients=True) + most
        check(trace, MACHINE, tight(plan, trace))


@pytest.mark.parametrize("op", ["neg", "abs"])
def test_codes_that_nobody_will_ask_for_go_with_forward(op: str) -> None:
    """The last compute of forward takes them away: a loss outside of the model comes without them, and so does
    backward. Between the two there is what the block has made."""
    trace = replace(with_a_tail(), unseen_nbytes=100_000)
    chosen = (Selection(("a",), (Treatment(op, 0, Fate.KEEP, 8),)),)
    plan = plan_for(trace, (Placement("a", *RESIDENT),), Streaming(), ("a",), chosen, roomy=True)
    program = lower(trace, plan, steps=1)
    last = next(i for i, a in enumerate(program.actions) if a.what == "backward a" or a.recomputed) - 1
    made = sum(change.nbytes for a in program.actions[: last + 1] for change in a.changes)
    profile = Liveness(trace).profile(plan.recompute, plan.activations)
    assert made == sum(level[profile.forward] for level in profile.levels.values()) == OUT
    assert needed(trace, plan) == OUT + 100_000
    check(trace, MACHINE, tight(plan, trace))


def test_what_is_made_again_goes_though_a_later_block_still_holds_the_first() -> None:
    """b reads what a has saved, and autograd lets go of b's own only at the end: until then b's rerun might ask for it.
    What a's rerun makes of it goes with a's backward all the same. The last op takes the most: beside it there are the
    first copy, what a hands on, and the gradients of both parameters."""
    b = TraceBuilder(Model(tuple(block(n, ((4,), "float32", True)) for n in BLOCKS), 0), {"input_ids": OUT})
    x = b.ids["input_ids"]
    v = b.begin("a", Phase.FORWARD)
    v.given = (x,)
    made = v.make("linear", [x, b.ids["a.0"]], S, saved=True)
    v.save()
    out = v.make("out", [made], OUT)
    first = b.end(v)
    v = b.begin("b", Phase.FORWARD)
    v.given = (made, out)
    own = v.make("linear", [made, out, b.ids["b.0"]], S, saved=True)
    v.save()
    loss = v.make("out", [own], 4)
    v.drop(made, out, own)
    second = b.end(v)
    v = b.begin("b", Phase.BACKWARD)
    g = v.make("out_backward", [loss, own], OUT, Kind.TEMPORARY)
    v.drop(loss)
    gradient = v.make("dgrad", [g, made], OUT, Kind.TEMPORARY)
    v.complete(b.ids["b.0"], v.make("wgrad", [g, own], 16, Kind.GRADIENT))
    v.drop(g)
    v.unsave(own, own=True)
    b.end(v)
    v = b.begin("a", Phase.BACKWARD)
    v.complete(b.ids["a.0"], v.make("wgrad", [gradient, made], 16, Kind.GRADIENT))
    v.drop(gradient)
    v.unsave(made, own=True)
    b.end(v)
    b.let_go(first)
    v = b.begin("", Phase.BACKWARD)
    v.drop(v.make("last", [x], 8 * S, Kind.TEMPORARY))
    b.end(v)
    b.let_go(second)
    trace = b.trace()
    placements = tuple(Placement(name, *RESIDENT) for name in BLOCKS)
    plan = plan_for(trace, placements, Streaming(), BLOCKS, roomy=True)
    assert needed(trace, plan) == (8 + 1) * S + OUT + 2 * 16
