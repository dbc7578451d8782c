"""What the checker asks of the single actions that move activations, make codes of them, or bring them back: each with
one program in which nothing else is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from forebay.checking import check
from forebay.errors import PlanInvalid
from forebay.lowering import Liveness, lower
from forebay.memory import Kind
from forebay.plans import Placement, Plan, Streaming
from forebay.program import Action, Change, Program, Verb
from forebay.timeline import Lane
from forebay.trace import NO_SAVES, Phase, Trace
from forebay.treatments import Fate, Selection, Treatment
from tests.null.strategies import RESIDENT, plan_for, roomy_machine
from tests.null.synthetic import block
from tests.null.test_check_reruns import BLOCKS, S, gelus
from tests.null.tracing import Layer, chain_trace

MACHINE = roomy_machine()
KIB64 = 64 * 1024


def chain(*names: str) -> Trace:
    """Layers that save 64 KiB each."""
    blocks = [block(name, ((8,), "float32", True)) for name in dict.fromkeys(names)]
    return chain_trace(blocks, [Layer(name, (KIB64,), 0, 512) for name in names])


def planned(trace: Trace, *selections: Selection, recompute: tuple[str, ...] = (), ring: int = 0) -> Plan:
    """Everything is resident; as much room as ``selections`` need, and a ring with ``ring`` bytes more."""
    liveness = Liveness(trace)
    streaming = Streaming(
        host_activations=liveness.host_activations(recompute, selections),
        disk_activations=liveness.disk_activations(recompute, selections),
        disk_window=liveness.disk_window(recompute, selections) + ring,
    )
    placements = tuple(Placement(b.name, *RESIDENT) for b in trace.model.blocks)
    return plan_for(trace, placements, streaming, recompute, selections, roomy=True)


def way(fate: Fate, bits: int = 0, *blocks: str, op: str = "linear") -> Selection:
    return Selection(blocks or ("a",), (Treatment(op, 0, fate, bits),))


def inserted(program: Program, place: int, action: Action) -> Program:
    """``program`` with ``action``, whose numbers are those of ``program``, before the action at ``place``."""
    shifted = [replace(a, after=tuple(x + (x >= place) for x in a.after)) for a in program.actions]
    return replace(program, actions=(*shifted[:place], action, *shifted[place:]))


def waiting(program: Program, index: int, *earlier: int) -> Program:
    """``program`` whose action ``index`` waits for ``earlier`` too."""
    actions = list(program.actions)
    actions[index] = replace(actions[index], after=tuple(sorted({*actions[index].after, *earlier})))
    return replace(program, actions=tuple(actions))


def changed(program: Program, index: int, **fields: object) -> Program:
    actions = list(program.actions)
    actions[index] = replace(actions[index], **fields)  # type: ignore[arg-type]
    return replace(program, actions=tuple(actions))


def place_of(program: Program, verb: Verb) -> int:
    return next(i for i, a in enumerate(program.actions) if a.verb is verb)


# Each of them once, in order, and as the plan says.


def test_what_nobody_brings_back_has_to_leave_all_the_same() -> None:
    """Nobody reads it in backward, so that no op would miss it; but the plan counts on its being away."""
    trace = unread(chain("a", "b"))
    for fate, bits, verb, words in (
        (Fate.KEEP, 8, Verb.ENCODE, "has to be codes and is not encoded"),
        (Fate.OFFLOAD, 0, Verb.OFFLOAD, "has to be on the host and is not moved there"),
        (Fate.DISK, 0, Verb.WRITE, "has to be on disk and is not written there"),
    ):
        plan = planned(trace, way(fate, bits, "b"), ring=KIB64)
        program = one_way(lower(trace, plan, steps=1, micro_batches=2))
        check(trace, MACHINE, plan, program)
        both = [i for i, a in enumerate(program.actions) if a.verb is verb]
        for number, index in enumerate(both):
            with pytest.raises(PlanInvalid, match=rf"of block b\) {words} in pass {number}"):
                check(trace, MACHINE, plan, without(program, index))


def one_way(program: Program) -> Program:
    """``program`` without all that comes back. What it says of itself is not the point then."""
    for index in [i for i, a in enumerate(program.actions) if a.verb in (Verb.READ, Verb.RELOAD, Verb.DECODE)][::-1]:
        program = without(program, index)
    claims = (replace(a, peak=1 << 20, changes=()) if a.lane is Lane.COMPUTE else a for a in program.actions)
    return replace(program, actions=tuple(claims))


def twice(program: Program, index: int) -> Program:
    return inserted(program, index + 1, program.actions[index])


def early(program: Program, index: int) -> Program:
    """Action ``index`` right after the first compute of its pass, for which it waits, and for nothing else."""
    action = program.actions[index]
    first = max(i for i, a in enumerate(program.actions[:index]) if a.what == "forward a" and not a.recomputed)
    return inserted(without(program, index), first + 1, replace(action, after=(first,)))


def with_fields(**fields: object) -> Callable[[Program, int], Program]:
    return lambda program, index: changed(program, index, **fields)


def more(**fields: int) -> Callable[[Program, int], Program]:
    """``fields`` have so much more."""
    return lambda program, index: changed(
        program, index, **{name: getattr(program.actions[index], name) + n for name, n in fields.items()}
    )


def freeing(nbytes: int) -> Callable[[Program, int], Program]:
    return with_fields(changes=(Change(Kind.ACTIVATION, -nbytes),))


def behind_own(verb: Verb) -> Callable[[Program, int], Program]:
    """Once more, behind the action of ``verb`` on the same tensor in its pass."""

    def spoiled(program: Program, index: int) -> Program:
        own = program.actions[index]
        at = next(i for i, a in enumerate(program.actions) if i > index and (a.verb, a.tensor) == (verb, own.tensor))
        return inserted(program, at + 1, replace(own, after=(at,)))

    return spoiled


HOST, DISK, CODES, KEPT = (Fate.OFFLOAD, 0), (Fate.DISK, 0), (Fate.OFFLOAD, 8), (Fate.KEEP, 8)


@pytest.mark.parametrize(
    ("how", "verb", "spoil", "words"),
    [
        (KEPT, Verb.ENCODE, twice, "is encoded already"),
        (KEPT, Verb.ENCODE, early, "is encoded before it is made"),
        (KEPT, Verb.ENCODE, with_fields(bits=4), "is kept as 8 bits an element, not as 4"),
        (KEPT, Verb.DECODE, with_fields(bits=1), "is kept as 8 bits an element, not as 1"),
        (KEPT, Verb.DECODE, twice, "may not be on the device as codes when it is decoded"),
        (HOST, Verb.OFFLOAD, twice, "is on the host already"),
        (HOST, Verb.OFFLOAD, early, "may not be complete when it starts"),
        (HOST, Verb.OFFLOAD, with_fields(after=()), "may not be complete when it starts"),
        (CODES, Verb.OFFLOAD, early, "may not be encoded when it starts"),
        (HOST, Verb.OFFLOAD, more(nbytes=1), "has other bytes than the 65537 that this moves"),
        (HOST, Verb.OFFLOAD, more(nbytes=-1), "has other bytes than the 65535 that this moves"),
        (HOST, Verb.OFFLOAD, freeing(KIB64 + 1), "has other bytes than the 65537 that this frees"),
        (HOST, Verb.OFFLOAD, freeing(-1), "has other bytes than the -1 that this frees"),
        (HOST, Verb.RELOAD, twice, "is on the device again already"),
        (HOST, Verb.RELOAD, early, "is not on the host in this pass"),
        (HOST, Verb.RELOAD, with_fields(after=()), "may not be on the host yet"),
        (HOST, Verb.RELOAD, more(nbytes=1), "has other bytes than the 65537 that this moves"),
        (HOST, Verb.OFFLOAD, lambda p, i: twice(changed(p, i, verb=Verb.ENCODE, lane=Lane.COMPUTE), i), "0 bits"),
        (HOST, Verb.RELOAD, with_fields(verb=Verb.DECODE, lane=Lane.COMPUTE, bits=8), "is kept as 0 bits an element"),
        (KEPT, Verb.ENCODE, with_fields(verb=Verb.OFFLOAD, lane=Lane.D2H), "stays on the device"),
        (DISK, Verb.WRITE, twice, "is on disk already"),
        (DISK, Verb.WRITE, more(nbytes=1), "has other bytes than the 65537 that this moves"),
        (DISK, Verb.WRITE, with_fields(after=()), "may not be in the ring yet"),
        (DISK, Verb.WRITE, more(ring=4096), "is at byte 0 of the ring, where action"),
        (DISK, Verb.READ, more(nbytes=4096), "has other bytes than the 69632 that this moves"),
        (DISK, Verb.READ, early, "may not be on disk yet when it is read"),
        (DISK, Verb.READ, behind_own(Verb.RELOAD), "is on the device again already"),
        (DISK, Verb.RELOAD, with_fields(after=()), "may not be read from disk yet"),
        (DISK, Verb.RELOAD, more(ring=4096), "of the ring, where action"),
        (HOST, Verb.OFFLOAD, with_fields(verb=Verb.WRITE, lane=Lane.DISK_WRITE), "has no place on disk"),
        (HOST, Verb.RELOAD, with_fields(verb=Verb.READ, lane=Lane.DISK_READ), "has no place on disk"),
        (HOST, Verb.OFFLOAD, with_fields(tensor=0), "the plan does not treat tensor 0"),
    ],
)
def test_each_is_done_once_in_order_and_as_planned(
    how: tuple[Fate, int], verb: Verb, spoil: Callable[[Program, int], Program], words: str
) -> None:
    """In the second pass as in the first: what was done in one says nothing of the other."""
    trace = chain("a", "b")
    plan = planned(trace, way(*how, "b"), ring=KIB64)
    program = lower(trace, plan, steps=1, micro_batches=2)
    check(trace, MACHINE, plan, program)
    both = [i for i, a in enumerate(program.actions) if a.verb is verb]
    assert len(both) == 2
    for index in both:
        with pytest.raises(PlanInvalid, match=words) as caught:
            check(trace, MACHINE, plan, spoil(program, index))
        assert "of block b)" in str(caught.value) or "tensor 0" in words


# Nobody holds it any more.


def unread(trace: Trace) -> Trace:
    """The trace whose backward ops read nothing that forward saved, though autograd saves it."""
    segments = list(trace.segments)
    for number in {v.segment for v in trace.visits if v.phase is Phase.BACKWARD and v.block}:
        ops = tuple(replace(op, inputs=op.inputs[:1]) for op in segments[number].ops)
        segments[number] = replace(segments[number], ops=ops)
    return replace(trace, segments=tuple(segments))


@pytest.mark.parametrize(
    ("fate", "words"), [(Fate.OFFLOAD, "is not read again"), (Fate.KEEP, "may not be on the device as codes")]
)
def test_what_nobody_asks_for_any_more_does_not_come_back(fate: Fate, words: str) -> None:
    """Autograd lets go of what b saved with b's backward, and nobody has read it. Until then it may come back, or be
    decoded; afterwards it would take memory for nobody."""
    trace = unread(chain("a", "b"))
    plan = planned(trace, way(fate, 8 if fate is Fate.KEEP else 0, "b"))
    program = lower(trace, plan, steps=1)
    made = place_of(program, Verb.OFFLOAD if fate is Fate.OFFLOAD else Verb.ENCODE)
    program = one_way(program)
    check(trace, MACHINE, plan, program)
    verb, lane = (Verb.RELOAD, Lane.H2D) if fate is Fate.OFFLOAD else (Verb.DECODE, Lane.COMPUTE)
    back = replace(
        program.actions[made], verb=verb, lane=lane, what="back", after=(made,), peak=1 << 20, changes=(), ops=(0, 0)
    )
    own, other = (next(i for i, a in enumerate(program.actions) if a.what == f"backward {name}") for name in "ba")
    early = inserted(program, own, back)
    check(trace, MACHINE, plan, waiting(early, own + 1, own) if lane is Lane.H2D else early)
    late = inserted(program, other, back)
    late = waiting(late, other + 1, other) if lane is Lane.H2D else late
    with pytest.raises(PlanInvalid, match=rf"action \d+ \(back\): tensor .* of block b\) {words}") as caught:
        check(trace, MACHINE, plan, late)
    assert caught.value.action == other


def without(program: Program, index: int) -> Program:
    """``program`` without action ``index``; who waited for it does not."""
    actions = [
        replace(a, after=tuple(x - (x > index) for x in a.after if x != index))
        for i, a in enumerate(program.actions)
        if i != index
    ]
    return replace(program, actions=tuple(actions))


def test_what_only_a_rerun_will_be_given_comes_back() -> None:
    """Nobody saves what a hands on, and both blocks run again: it is b's rerun alone that holds it."""
    trace = gelus(handed=S, saved=False)
    plan = planned(trace, way(Fate.OFFLOAD, 0, op="out"), recompute=BLOCKS)
    program = lower(trace, plan, steps=1)
    assert [a.block for a in program.actions if a.verb is Verb.RELOAD] == ["a"]
    check(trace, MACHINE, plan, program)


# One call in two parts.


@pytest.mark.parametrize("part", [0, 1])
def test_a_part_that_saves_nothing_may_be_of_the_same_call(part: int) -> None:
    """b runs between two visits of a. Of a visit that saves nothing nobody knows of which call it is."""
    trace = chain("a", "b", "a")
    plan = planned(trace, way(Fate.OFFLOAD))
    check(trace, MACHINE, plan)
    parts = [i for i, v in enumerate(trace.visits) if v.block == "a" and v.phase is Phase.FORWARD]
    visits = list(trace.visits)
    visits[parts[part]] = replace(visits[parts[part]], kept_until=NO_SAVES)
    with pytest.raises(PlanInvalid, match="block a, op linear#0: block b runs in the middle of its forward"):
        check(replace(trace, visits=tuple(visits)), MACHINE, plan)


def test_two_calls_in_a_row_are_two_calls() -> None:
    """Nothing runs between them."""
    trace = chain("a", "a")
    last = max(v.kept_until for v in trace.visits)
    visits = tuple(replace(v, kept_until=last) if v.phase is Phase.FORWARD and v.block else v for v in trace.visits)
    trace = replace(trace, visits=visits)
    check(trace, MACHINE, planned(trace, way(Fate.OFFLOAD)))


# What a plan may ask for at all.


def test_a_mask_is_not_what_another_block_runs_again_on() -> None:
    """What a hands on is a ReLU's, which its own backward alone reads. But b, if it runs again, computes with it."""
    blocks = [block(name, ((8,), "float32", True)) for name in BLOCKS]
    trace = chain_trace(blocks, [Layer(name, (512,), 0, KIB64) for name in BLOCKS])
    names = {"out": "aten.relu.default", "wgrad": "aten.threshold_backward.default"}
    trace = replace(trace, works=tuple(replace(w, op=names.get(w.op, w.op)) for w in trace.works))
    mask = way(Fate.KEEP, 1, op="aten.relu.default")
    check(trace, MACHINE, planned(trace, mask))
    with pytest.raises(PlanInvalid, match=r"block b runs again on the numbers of its tensor .* of block a"):
        check(trace, MACHINE, planned(trace, mask, recompute=("b",)))


@pytest.mark.parametrize("fate", [Fate.OFFLOAD, Fate.DISK])
def test_there_is_room_for_what_any_routes_move(fate: Fate) -> None:
    blocks = [block("a", ((8,), "float32", True))]
    small, large = (chain_trace(blocks, [Layer("a", (nbytes,), 0, 512)]) for nbytes in (KIB64, 2 * KIB64))
    routed = replace(small, extremes=(large,))
    check(routed, MACHINE, planned(routed, way(fate)))
    short = planned(small, way(fate))
    check(small, MACHINE, short)
    with pytest.raises(PlanInvalid, match=f"moves {2 * KIB64} bytes of activations .* room for {KIB64} there"):
        check(routed, MACHINE, short)
