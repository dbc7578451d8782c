"""The checker on what moves to the host and what is kept of a recomputation: closed forms of the bytes, for any timing
that the dependencies allow."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forebay.budgets import Budget
from forebay.checking import check
from forebay.checking.order import Order
from forebay.checking.transit import Leaving
from forebay.errors import DoesNotFit, PlanInvalid
from forebay.memory import Tier
from forebay.plans import Placement, Plan, Streaming
from forebay.program import Action, Program, Verb
from forebay.timeline import Lane
from forebay.trace import Phase, Trace
from forebay.treatments import Fate, Selection, Treatment
from tests.null.programs import device_standing
from tests.null.strategies import plan_for, roomy_machine
from tests.null.synthetic import block
from tests.null.tracing import Layer, chain_trace
from tests.null.treated_bytes import moved_bytes
from tests.null.treating import treated_program

MACHINE = roomy_machine()
KIB64 = 64 * 1024
RESIDENT = (Tier.DEVICE, Tier.DEVICE, Tier.DEVICE)


def chain(*layers: Layer) -> Trace:
    return chain_trace([block(layer.block, ((8,), "float32", True)) for layer in layers], layers)


def plan_with(trace: Trace, *selections: Selection, recompute: tuple[str, ...] = ()) -> Plan:
    """Everything resident, ``selections`` with as much room on the host as they need."""
    placements = tuple(Placement(b.name, *RESIDENT) for b in trace.model.blocks)
    streaming = Streaming(host_activations=sum(moved_bytes(trace, selections)))
    return plan_for(trace, placements, streaming, recompute, selections, roomy=True)


def away(*blocks: str, op: str = "linear", occurrence: int = 0) -> Selection:
    return Selection(blocks, (Treatment(op, occurrence, Fate.OFFLOAD),))


def kept(*blocks: str, op: str = "linear", occurrence: int = 0) -> Selection:
    return Selection(blocks, (Treatment(op, occurrence, Fate.KEEP),))


def most(trace: Trace, plan: Plan, program: Program | None = None) -> int:
    """The bytes that the checker finds at the peak, beside what stands."""
    stands = device_standing(trace, plan, gradients=True)
    small = replace(plan, device=stands, budget=replace(plan.budget, device=stands))
    with pytest.raises(DoesNotFit, match="are tensors of the step") as caught:
        check(trace, MACHINE, small, program or treated_program(trace, plan, 1))
    assert caught.value.tier == "device"
    return caught.value.needed - device_standing(trace, plan)


def rewired(program: Program, verb: Verb, reader: bool = False, **less: Verb) -> Program:
    """``program`` in which the first action of ``verb`` (``reader``: whoever waits for it) does not wait for those of
    verb ``without``."""
    actions = list(program.actions)
    index = next(i for i, a in enumerate(actions) if a.verb is verb)
    if reader:
        index = next(i for i, a in enumerate(actions) if index in a.after and a.verb is Verb.COMPUTE)
    after = tuple(a for a in actions[index].after if actions[a].verb is not less["without"])
    assert after != actions[index].after
    actions[index] = replace(actions[index], after=after)
    return replace(program, actions=tuple(actions))


TWO = chain(Layer("a", (KIB64,), 0, 512), Layer("b", (KIB64,), 0, 512))
"""At the peak, backward of b: what a saved, what b saved, and the gradient of that."""


def test_what_moved_is_not_there_at_the_peak() -> None:
    """Backward of b without what a saved: 64 KiB less. What b saved is back there: nothing less."""
    plain, a_away, b_away = (most(TWO, plan_with(TWO, *s)) for s in ((), (away("a"),), (away("b"),)))
    assert plain - a_away == KIB64
    assert plain == b_away


def test_what_comes_back_counts_from_when_it_may_start() -> None:
    """A reload that waits for no compute of backward may be there at the peak."""
    plan = plan_with(TWO, away("a"))
    early = rewired(treated_program(TWO, plan, 1), Verb.RELOAD, without=Verb.COMPUTE)
    assert most(TWO, plan, early) == most(TWO, plan_with(TWO))


def test_what_leaves_counts_until_it_is_on_the_host() -> None:
    """Forward of b makes 256 KiB for a moment: what a saved is there too unless compute waits for its offload."""
    trace = chain(Layer("a", (KIB64,), 0, 512), Layer("b", (1024,), 4 * KIB64, 512))
    plan = plan_with(trace, away("a"))
    program = treated_program(trace, plan, 1)
    waits = most(trace, plan, program)
    assert waits == 4 * KIB64 + 1024 + 2 * 512  # mix, saved and both outputs of the layers
    assert most(trace, plan, rewired(program, Verb.OFFLOAD, reader=True, without=Verb.OFFLOAD)) == waits + KIB64


def test_codes_that_leave_count_until_they_are_on_the_host() -> None:
    """The same for codes of 8 bits, and two numbers for each 256 of them. Encoding takes less than forward of b."""
    trace = chain(Layer("a", (KIB64,), 0, 512), Layer("b", (1024,), 16 * KIB64, 512))
    plan = plan_with(trace, Selection(("a",), (Treatment("linear", 0, Fate.OFFLOAD, 8),)))
    program = treated_program(trace, plan, 1)
    waits = most(trace, plan, program)
    assert waits == 16 * KIB64 + 1024 + 2 * 512
    codes = KIB64 // 4 + 2 * 4 * (KIB64 // 4 // 256)
    assert most(trace, plan, rewired(program, Verb.OFFLOAD, reader=True, without=Verb.OFFLOAD)) == waits + codes


def test_what_is_kept_of_a_recomputation_stays() -> None:
    """Two ops save 64 KiB each in a; a is recomputed. At the peak, backward of b, there is what it kept of the two."""
    trace = chain(Layer("a", (KIB64, KIB64), 0, 512), Layer("b", (4 * KIB64,), 0, 512))
    again = most(trace, plan_with(trace, recompute=("a",)))
    assert most(trace, plan_with(trace, kept("a"), recompute=("a",))) == again + KIB64
    assert most(trace, plan_with(trace, away("a"), recompute=("a",))) == again
    assert most(trace, plan_with(trace)) == again + 2 * KIB64


def test_a_recomputation_of_nothing_is_none() -> None:
    """All ops before the last saved tensor are named: nothing runs again, and everything is where it was kept."""
    plan = plan_with(TWO, kept("a", "b"), recompute=("a", "b"))
    program = treated_program(TWO, plan)
    assert not any(a.recomputed for a in program.actions)
    check(TWO, MACHINE, plan, program)
    assert most(TWO, plan) == most(TWO, plan_with(TWO))


def test_the_input_of_a_recomputation_may_be_moved() -> None:
    """What a hands on is read in b alone, which runs again: both its reader and whoever holds it get it back."""
    trace = chain(Layer("a", (1024,), 0, KIB64), Layer("b", (4 * KIB64,), 0, 512), Layer("c", (8 * KIB64,), 0, 512))
    plain = plan_with(trace, recompute=("b",))
    moved = plan_with(trace, away("a", op="out"), recompute=("b",))
    program = treated_program(trace, moved, 2, 2)
    check(trace, MACHINE, moved, program)
    assert most(trace, plain) - most(trace, moved) == KIB64
    reader = next(i for i, a in enumerate(program.actions) if a.recomputed)
    late = rewired(program, Verb.RELOAD, reader=True, without=Verb.RELOAD)
    with pytest.raises(
        PlanInvalid, match=r"op 2 \(linear of block b\) reads tensor .* may not be back by then"
    ) as caught:
        check(trace, MACHINE, moved, late)
    assert caught.value.action == reader


def test_what_comes_back_while_compute_waits_counts() -> None:
    """Backward of a waits for b's gradient to land (256 KiB) and for what a saved (64 KiB): while it waits there may be
    both, unless one comes after the other."""
    blocks = [block("a", ((8,), "float32", True)), block("b", ((256, 256), "float32", True))]
    trace = chain_trace(blocks, [Layer("a", (KIB64,), 0, 512), Layer("b", (512,), 0, 512)])
    placements = (Placement("a", *RESIDENT), Placement("b", Tier.DEVICE, Tier.HOST, Tier.HOST))
    plan = plan_for(trace, placements, Streaming(host_activations=KIB64), (), (away("a"),), roomy=True)
    program = treated_program(trace, plan, 1)
    landing, back = (next(i for i, a in enumerate(program.actions) if a.verb is v) for v in (Verb.LAND, Verb.RELOAD))
    assert landing < back and landing not in program.actions[back].after
    # Beside them what backward of b leaves: the gradient of a's result, 512 bytes, of which b's has gone.
    assert most(trace, plan, program) == 4 * KIB64 + KIB64 + 512
    actions = list(program.actions)
    actions[back] = replace(actions[back], after=(*actions[back].after, landing))
    # At b's last op: its gradient, that of what it saved and of a's result, what it saved, a's result.
    assert most(trace, plan, replace(program, actions=tuple(actions))) == 4 * KIB64 + 4 * 512


@pytest.mark.parametrize(("ordered", "most_bytes"), [(True, 12), (False, 17)])
def test_both_directions_count_together_unless_they_are_ordered(ordered: bool, most_bytes: int) -> None:
    """5 and 7 bytes leave, then 10 come back, after the first of the two or after both: there are 5 + 7 at first, and
    later 7 + 10, or 10 alone."""
    forward = Action(Lane.COMPUTE, Verb.COMPUTE, "forward", 0)
    out = Action(Lane.D2H, Verb.OFFLOAD, "offload", 0, after=(0,))
    back = Action(Lane.H2D, Verb.RELOAD, "reload", 0, after=(2 if ordered else 1,))
    leaving = Leaving(Order(Program((forward, out, out, back), (), {}, 1, 1)))
    leaving.add(2, 7)
    leaving.add(1, 5)
    assert leaving.most([(3, 10)]) == most_bytes
    assert leaving.most([(3, 10)], at=3) == (10 if ordered else 17)
    assert leaving.most([]) == 12


def test_the_room_on_the_host_has_a_closed_form() -> None:
    """4,100 bytes take 4,160 on the host; two blocks of them and no byte less. The host has them beside all else."""
    trace = chain(Layer("a", (4100, 4095), 0, 512), Layer("b", (4100, 4095), 0, 512))
    both = (Treatment("linear", 0, Fate.OFFLOAD), Treatment("linear", 1, Fate.OFFLOAD))
    plan = plan_with(trace, Selection(("a", "b"), both))
    exact = replace(plan, streaming=replace(plan.streaming, host_activations=2 * 4160))
    exact = plan_for(trace, exact.placements, exact.streaming, (), exact.activations)
    check(trace, MACHINE, exact, treated_program(trace, exact))
    assert exact.host == 2 * 4160
    with pytest.raises(PlanInvalid, match=f"host peak of {2 * 4160 - 1} bytes"):
        check(trace, MACHINE, replace(exact, host=2 * 4160 - 1))
    with pytest.raises(DoesNotFit, match="host memory"):
        check(trace, replace(MACHINE, host_capacity=2 * 4160 - 1), exact)
    short = replace(exact, streaming=replace(exact.streaming, host_activations=2 * 4160 - 1))
    with pytest.raises(PlanInvalid, match=r"moves 8320 bytes .* room for 8319 .* op 0, linear of block a") as caught:
        check(trace, MACHINE, short)
    assert caught.value.subject == "host_activations"


def unread(trace: Trace) -> Trace:
    """The trace whose backward ops read nothing that forward saved, though autograd saves it."""
    segments = list(trace.segments)
    for number in {v.segment for v in trace.visits if v.phase is Phase.BACKWARD and v.block}:
        ops = tuple(replace(op, inputs=op.inputs[:1]) for op in segments[number].ops)
        segments[number] = replace(segments[number], ops=ops)
    return replace(trace, segments=tuple(segments))


def test_nothing_is_on_its_way_back_when_a_pass_is_over() -> None:
    """Its bytes on the host are the next pass's."""
    trace = unread(chain(Layer("a", (KIB64,), 0, 512)))
    plan = plan_with(trace, away("a"))
    program = treated_program(trace, plan, 1, 2)
    check(trace, MACHINE, plan, program)
    out = next(i for i, a in enumerate(program.actions) if a.verb is Verb.OFFLOAD)
    backward = next(i for i, a in enumerate(program.actions) if a.what == "backward a")
    back = replace(program.actions[out], verb=Verb.RELOAD, lane=Lane.H2D, what="reload", after=(out,), peak=KIB64)
    shifted = [replace(a, after=tuple(x + (x >= backward) for x in a.after)) for a in program.actions]
    wrong = replace(program, actions=(*shifted[:backward], back, *shifted[backward:]))
    with pytest.raises(PlanInvalid, match=r"tensor .* op 0, linear of block a\) may not be back when pass 0 is over"):
        check(trace, MACHINE, plan, wrong)
    waited = list(wrong.actions)
    waited[backward + 1] = replace(waited[backward + 1], after=(*waited[backward + 1].after, backward))
    check(trace, MACHINE, plan, replace(wrong, actions=tuple(waited)))


def test_a_budget_names_what_is_under_way() -> None:
    plan = plan_with(TWO, away("a"))
    program = rewired(treated_program(TWO, plan, 1), Verb.RELOAD, without=Verb.COMPUTE)
    stands = device_standing(TWO, plan, gradients=True)
    small = replace(plan, device=stands, budget=Budget(stands))
    with pytest.raises(DoesNotFit, match=r"64\.0 KiB of gradients and activations may be under way"):
        check(TWO, MACHINE, small, program)
