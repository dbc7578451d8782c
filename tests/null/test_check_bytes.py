"""Closed forms of what the checker counts on the device, where two ways to count would differ."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forebay.checking import check
from forebay.errors import DoesNotFit, PlanInvalid
from forebay.lowering import lower
from forebay.memory import Kind, Tier
from forebay.model import Model
from forebay.plans import Placement, Plan, Streaming
from forebay.program import Program, Verb
from forebay.trace import Phase, Trace
from forebay.treatments import Fate, Selection, Treatment
from tests.null.programs import device_standing, plain_program
from tests.null.strategies import RESIDENT, plan_for, roomy, roomy_machine
from tests.null.synthetic import block
from tests.null.test_check_reruns import S, exact, gelus
from tests.null.test_check_transfers import one_way, unread
from tests.null.tracing import Layer, TraceBuilder, chain_trace
from tests.null.treating import treated_program

MACHINE = roomy_machine()
KIB64 = 64 * 1024
OUT = 256


def needed(trace: Trace, plan: Plan, program: Program | None = None) -> int:
    """The bytes at the peak, beside what stands."""
    stands = device_standing(trace, plan, gradients=True)
    small = replace(plan, device=stands, budget=replace(plan.budget, device=stands))
    with pytest.raises(DoesNotFit, match=r"device memory: .* needs") as caught:
        check(trace, MACHINE, small, program)
    return caught.value.needed - device_standing(trace, plan)


def resident(trace: Trace, *selections: Selection, recompute: tuple[str, ...] = ()) -> Plan:
    placements = tuple(Placement(b.name, *RESIDENT) for b in trace.model.blocks)
    return plan_for(trace, placements, Streaming(), recompute, selections, roomy=True)


def test_two_gradients_in_one_root_are_there_once() -> None:
    """Both are complete after the same op and lie in one root of 8 KiB; there are x's gradient and that at the end."""
    b = TraceBuilder(Model((block("a", *[((32, 32), "float32", True)] * 2),), 0), {"input_ids": OUT})
    x, own = b.ids["input_ids"], [b.ids["a.0"], b.ids["a.1"]]
    v = b.begin("a", Phase.FORWARD)
    v.given = (x,)
    out = v.make("linear", [x, *own], OUT)
    b.end(v)
    v = b.begin("a", Phase.BACKWARD)
    both = v.make("wgrad", [out, x], 8192, Kind.GRADIENT)
    v.drop(out)
    v.complete(own[0], both)
    v.complete(own[1], both)
    # One more op, which neither of the landings has to be done for.
    after = v.make("after", [x], OUT, Kind.TEMPORARY)
    v.drop(after)
    b.end(v)
    trace = b.trace()
    plan = roomy(trace, slots=1)
    program = plain_program(trace, plan, 1)
    last = max(i for i, a in enumerate(program.actions) if a.verb is Verb.COMPUTE)
    actions = list(program.actions)
    actions[last] = replace(actions[last], after=())
    assert needed(trace, plan, replace(program, actions=tuple(actions))) == 8192 + OUT


def test_an_update_on_the_device_widens_gradients_chunk_by_chunk() -> None:
    """4,096 elements of 16 bits: gradients of 8 KiB, and those of a chunk of 1,024 in 32 bits. A step has less."""
    trace = chain_trace([block("a", ((4096,), "bfloat16", True))], [Layer("a", (64,), 0, 64)])
    plan = resident(trace)
    plan = replace(plan, streaming=replace(plan.streaming, update_chunk=1024))
    assert needed(trace, plan, plain_program(trace, plan, 1)) == 2 * 4096 + 4 * 1024


@pytest.mark.parametrize("name", ["buffer", "a.buffer"])
def test_a_rerun_copies_the_buffers_of_its_module(name: str) -> None:
    """A copy of a's own is there while a runs again, beside what that makes and the gradient of a's result. Otherwise
    the first op of its backward takes the most: it makes the gradient of what a has saved."""
    trace = chain_trace([block("a", ((8,), "float32", True))], [Layer("a", (512,), 0, 64)])
    buffer = replace(trace.sources[1], name=name, kind=Kind.BUFFER, nbytes=5000)
    trace = replace(trace, sources=(*trace.sources[:1], buffer), model=replace(trace.model, buffer_nbytes=5000))
    backward = 512 + 64 + 512
    assert needed(trace, resident(trace)) == backward
    assert needed(trace, resident(trace, recompute=("a",))) == (512 + 64 + 5000 if name == "a.buffer" else backward)


def test_a_view_takes_nothing() -> None:
    """Between two ops, of what the first has made and saved. Backward has both of these, and their gradients."""
    blocks = [block("a", ((8,), "float32", True))]
    traces = (chain_trace(blocks, [Layer("a", (KIB64, KIB64), 512, 1024, view=view)]) for view in (False, True))
    plain, viewed = (needed(trace, resident(trace)) for trace in traces)
    assert plain == viewed == 4 * KIB64


def test_gradients_that_stay_are_there_in_the_passes_after_them() -> None:
    """At the last op of one layer: what it saved and the gradient of that, 2 KiB each, and its own gradient, 4 KiB. In
    the second pass that of the first as well."""
    trace = chain_trace([block("a", ((32, 32), "float32", True))], [Layer("a", (2048,), 0, 1024)])
    plan = resident(trace)
    one, two = (needed(trace, plan, plain_program(trace, plan, 1, n)) for n in (1, 2))
    assert (one, two) == (2 * 2048 + 4096, 2 * 2048 + 2 * 4096)


def test_gradients_that_stay_are_there_while_codes_are_made_and_read() -> None:
    """In the second pass: 4 KiB of gradients of the first. Codes of 8 bits take more to make than anything else."""
    trace = chain_trace([block("a", ((32, 32), "float32", True))], [Layer("a", (KIB64,), 0, 64)])
    plan = resident(trace, Selection(("a",), (Treatment("linear", 0, Fate.KEEP, 8),)))
    one, two = (needed(trace, plan, lower(trace, plan, steps=1, micro_batches=n)) for n in (1, 2))
    assert two - one == 4096


def test_gradients_that_stay_are_there_while_codes_are_made_that_nobody_reads() -> None:
    """The same where nothing is decoded, so that making them takes the most."""
    trace = unread(chain_trace([block("a", ((32, 32), "float32", True))], [Layer("a", (KIB64,), 0, 64)]))
    plan = resident(trace, Selection(("a",), (Treatment("linear", 0, Fate.KEEP, 8),)))
    most = []
    for micro_batches in (1, 2):
        program = one_way(lower(trace, plan, steps=1, micro_batches=micro_batches))
        assert not any(a.verb is Verb.DECODE for a in program.actions)
        claims = (replace(a, peak=1 << 24, changes=()) for a in program.actions)
        most.append(needed(trace, plan, replace(program, actions=tuple(claims))))
    assert most[1] - most[0] == 4096


def test_gradients_that_stay_are_there_while_compute_waits() -> None:
    """Backward of a waits for b's gradient to land (256 KiB) and for what a saved (64 KiB). In the second pass there
    are those of a and c of the first, 32 bytes and 4 KiB."""
    sizes = {"a": (8,), "b": (256, 256), "c": (32, 32)}
    blocks = [block(name, (shape, "float32", True)) for name, shape in sizes.items()]
    trace = chain_trace(blocks, [Layer("c", (64,), 0, 64), Layer("a", (KIB64,), 0, 512), Layer("b", (512,), 0, 512)])
    placements = tuple(Placement(n, *((Tier.DEVICE, Tier.HOST, Tier.HOST) if n == "b" else RESIDENT)) for n in sizes)
    moved = (Selection(("a",), (Treatment("linear", 0, Fate.OFFLOAD),)),)
    plan = plan_for(trace, placements, Streaming(host_activations=KIB64), (), moved, roomy=True)
    one, two = (needed(trace, plan, treated_program(trace, plan, 1, n)) for n in (1, 2))
    # And the gradient of a's result, what c has saved and made.
    assert (one, two - one) == (5 * KIB64 + 512 + 2 * 64, 32 + 4096)


def test_gradients_that_stay_are_there_while_named_ops_are_given_what_they_made() -> None:
    """Two of four results at a time, as in one pass; and the gradients of the first pass, 16 bytes of each block."""
    trace = gelus()
    plan = exact(trace, Fate.OFFLOAD)
    one, two = (needed(trace, plan, lower(trace, plan, steps=1, micro_batches=n)) for n in (1, 2))
    assert (one, two) == (2 * S + 2 * OUT, 2 * S + 2 * OUT + 2 * 16)


def test_what_is_saved_twice_is_there_until_both_are_done() -> None:
    """a saves its result, and so does b. b's backward lets go of it; a's reads it afterwards."""
    b = TraceBuilder(Model(tuple(block(n, ((4,), "float32", True)) for n in "ab"), 0), {"input_ids": OUT})
    x = b.ids["input_ids"]
    v = b.begin("a", Phase.FORWARD)
    v.given = (x,)
    y = v.make("relu", [x, b.ids["a.0"]], KIB64, saved=True)
    v.save()
    first = b.end(v)
    v = b.begin("b", Phase.FORWARD)
    v.given = (y,)
    z = v.make("linear", [y, b.ids["b.0"]], OUT)
    v.save()
    v.drop(y)
    second = b.end(v)
    v = b.begin("b", Phase.BACKWARD)
    g = v.make("dgrad", [z], KIB64, Kind.TEMPORARY)
    v.complete(b.ids["b.0"], v.make("wgrad", [z, y], 16, Kind.GRADIENT))
    v.drop(z)
    v.ops[-1]["released"].append(y)
    b.end(v)
    b.let_go(second)
    v = b.begin("a", Phase.BACKWARD)
    v.complete(b.ids["a.0"], v.make("wgrad", [g, y], 16, Kind.GRADIENT))
    v.drop(g)
    v.unsave(y, own=True)
    b.end(v)
    b.let_go(first)
    trace = b.trace()
    for recompute in ((), ("b",)):
        plan = resident(trace, recompute=recompute)
        check(trace, MACHINE, plan)
        check(trace, MACHINE, plan, plain_program(trace, plan))
    for recompute in (("a",), ("a", "b")):
        # a's result goes when b has read it for the last time, and is made again for a.
        plan = resident(trace, recompute=recompute)
        check(trace, MACHINE, plan)
        less = plain_program(trace, plan, 1)
        again = next(i for i, a in enumerate(less.actions) if a.recomputed and a.block == "a")
        actions = tuple(a for i, a in enumerate(less.actions) if i != again)
        actions = tuple(replace(a, after=tuple(x - (x > again) for x in a.after if x != again)) for a in actions)
        with pytest.raises(
            PlanInvalid, match=r"wgrad of block a\) reads tensor .* block a has to be recomputed before"
        ):
            check(trace, MACHINE, plan, replace(less, actions=actions))


def test_what_is_made_again_for_nobody_goes_with_the_rerun() -> None:
    """a makes two tensors: 64 KiB that b saves, and one that a saves itself. Of what its rerun makes of them, the first
    is gone in its backward, which makes 256 KiB for a moment beside the second and the two gradients."""
    b = TraceBuilder(Model(tuple(block(n, ((4,), "float32", True)) for n in "ab"), 0), {"input_ids": OUT})
    x = b.ids["input_ids"]
    v = b.begin("a", Phase.FORWARD)
    v.given = (x,)
    t = v.make("early", [x, b.ids["a.0"]], KIB64, saved=True)
    y = v.make("late", [t], OUT, saved=True)
    v.save()
    first = b.end(v)
    v = b.begin("b", Phase.FORWARD)
    v.given = (t, y)
    z = v.make("mix", [t, y, b.ids["b.0"]], OUT)
    v.save()
    v.drop(t, y)
    second = b.end(v)
    v = b.begin("b", Phase.BACKWARD)
    g = v.make("dgrad", [z], OUT, Kind.TEMPORARY)
    v.complete(b.ids["b.0"], v.make("wgrad", [z, t], 16, Kind.GRADIENT))
    v.drop(z)
    v.unsave(t)
    b.end(v)
    b.let_go(second)
    v = b.begin("a", Phase.BACKWARD)
    v.complete(b.ids["a.0"], v.make("wgrad", [g, y], 16, Kind.GRADIENT))
    v.drop(v.make("scratch", [g], 4 * KIB64, Kind.TEMPORARY), g)
    v.unsave(y, own=True)
    b.end(v)
    b.let_go(first)
    trace = b.trace()
    # Kept, it is the first copy that goes then.
    for kept in ((), (Selection(("a",), (Treatment("early", 0, Fate.KEEP),)),)):
        assert needed(trace, resident(trace, *kept, recompute=("a",))) == 4 * KIB64 + 2 * OUT + 2 * 16


def test_the_arena_that_is_too_small_names_its_own_largest() -> None:
    """8 KiB of a go to disk and 4 KiB of b to the host, where there is no room."""
    trace = chain_trace(
        [block(n, ((8,), "float32", True)) for n in "ab"], [Layer("a", (8192,), 0, 64), Layer("b", (4096,), 0, 64)]
    )
    chosen = [Selection((n,), (Treatment("linear", 0, f),)) for n, f in (("a", Fate.DISK), ("b", Fate.OFFLOAD))]
    streaming = Streaming(disk_activations=8192, disk_window=8192)
    plan = plan_for(trace, tuple(Placement(n, *RESIDENT) for n in "ab"), streaming, (), tuple(chosen), roomy=True)
    with pytest.raises(
        PlanInvalid, match=r"moves 4096 bytes of activations to the host .* linear of block b"
    ) as caught:
        check(trace, MACHINE, plan)
    assert caught.value.subject == "host_activations"
