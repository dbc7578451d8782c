"""Activations on disk and as codes, on paper: closed forms of the bytes, and programs that would lose them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forebay.checking import check
from forebay.compression import Codes
from forebay.errors import ConfigError, DoesNotFit, PlanInvalid
from forebay.lowering import Liveness, device_bound, lower
from forebay.memory import Kind, Tier
from forebay.plans import Placement, Plan, Streaming
from forebay.program import Action, Program, Verb
from forebay.simulation import Costs, play
from forebay.states import Masters
from forebay.timeline import Lane
from forebay.trace import Trace
from forebay.treatments import Fate, Selection, Treatment
from tests.null.programs import device_standing
from tests.null.strategies import RESIDENT, plan_for, roomy_machine
from tests.null.synthetic import block
from tests.null.tracing import Layer, chain_trace

FIRST, SECOND, OUT, N = 16384, 8192, 256, 3
PAGE = 4096
EVERY = tuple(f"layers.{i}" for i in range(N))
RELU, RELU_BACKWARD = "aten.relu.default", "aten.threshold_backward.default"
MACHINE = roomy_machine()


def chain(saved: tuple[int, ...] = (FIRST, SECOND), n: int = N, **more: str) -> Trace:
    blocks = [block(f"layers.{i}", ((4,), "float32", True), ((4,), "float32", True)) for i in range(n)]
    return chain_trace(blocks, [Layer(b.name, saved, 0, OUT, **more) for b in blocks])  # type: ignore[arg-type]


def planned(trace: Trace, *ways: Treatment, ring: int = 0, recompute: tuple[str, ...] = (), **windows: int) -> Plan:
    """Everything is resident; all layers are treated in the same ``ways``. The ring holds the largest and ``ring``
    bytes more."""
    names = tuple(b.name for b in trace.model.blocks)
    chosen = (Selection(names, ways),)
    liveness = Liveness(trace)
    streaming = Streaming(
        host_activations=liveness.host_activations(recompute, chosen),
        disk_activations=liveness.disk_activations(recompute, chosen),
        disk_window=liveness.disk_window(recompute, chosen) + ring,
        **windows,  # type: ignore[arg-type]
    )
    return plan_for(trace, tuple(Placement(n, *RESIDENT) for n in names), streaming, recompute, chosen, roomy=True)


def way(op: int, fate: Fate, bits: int = 0) -> Treatment:
    return Treatment("linear", op, fate, bits)


def coded(nbytes: int, bits: int) -> int:
    """Bytes of fp32 numbers as codes: two of them for each group of 256, and the bits."""
    return 2 * 4 * -(-nbytes // 1024) + nbytes // 4 * bits // 8


def workspace(nbytes: int) -> int:
    return 24 * (nbytes // 4)


def last_step(program: Program) -> list[tuple[int, Action]]:
    return [(i, a) for i, a in enumerate(program.actions) if a.step == program.steps - 1]


def on(program: Program, lane: Lane) -> list[str]:
    return [a.what for _, a in last_step(program) if a.lane is lane]


# Bytes.


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("fate", list(Fate))
def test_between_forward_and_backward_there_are_codes(fate: Fate, bits: int) -> None:
    trace = chain()
    profiles = [Liveness(trace).profile((), s) for s in ((), (Selection(EVERY, (way(0, fate, bits),)),))]
    plain, profile = (sum(level[p.forward] for level in p.levels.values()) for p in profiles)
    assert plain - profile == N * (FIRST - (coded(FIRST, bits) if fate is Fate.KEEP else 0))


@pytest.mark.parametrize("fate", list(Fate))
def test_the_peak_is_that_of_decoding(fate: Fate) -> None:
    """One layer: beside codes, tensor and workspace, the gradient of its result."""
    trace = chain((FIRST,), 1)
    plan = planned(trace, way(0, fate, 4))
    most = OUT + FIRST + coded(FIRST, 4) + workspace(FIRST)
    assert device_bound(trace, plan) - device_standing(trace, plan, gradients=True) == most
    usage = play(lower(trace, plan), Costs(trace, MACHINE, Masters.WHOLE)).usage(Tier.DEVICE)
    assert usage.peak - device_standing(trace, plan) == most
    short = replace(plan, device=device_standing(trace, plan) + most - 1)
    with pytest.raises(DoesNotFit, match=r"op \d+ .* in action \d+ \(decode layers\.0 linear#0") as caught:
        check(trace, MACHINE, replace(short, budget=replace(plan.budget, device=short.device)))
    assert caught.value.needed == device_standing(trace, plan) + most


def test_the_room_on_disk_and_in_the_ring() -> None:
    """Codes of 8,192 bytes in 8 bits take 2,112: a page. The host has the ring, a bounce buffer and nothing else."""
    trace = chain()
    plan = planned(trace, way(0, Fate.DISK), way(1, Fate.DISK, 8))
    assert (plan.streaming.disk_activations, plan.streaming.disk_window) == (N * (FIRST + PAGE), FIRST)
    check(trace, MACHINE, plan)
    assert lower(trace, plan).standing[Tier.DISK][Kind.ACTIVATION] == plan.disk == N * (FIRST + PAGE)
    assert lower(trace, plan).standing[Tier.HOST] == {Kind.STAGING: FIRST + 4 * 1024 * 1024}
    for name in ("disk_activations", "disk_window"):
        less = getattr(plan.streaming, name) - PAGE
        short = replace(plan, streaming=replace(plan.streaming, **{name: less}))
        with pytest.raises((PlanInvalid, ConfigError), match=name):
            check(trace, MACHINE, short)


# Order.


def test_everything_goes_the_same_way_back() -> None:
    trace = chain()
    program = lower(trace, planned(trace, way(0, Fate.DISK, 8), way(1, Fate.OFFLOAD, 2), ring=2 * PAGE))
    both = [f"{name} linear#{op}" for name in EVERY for op in (0, 1)]
    assert on(program, Lane.D2H) == [f"offload {what}" for what in both]
    assert on(program, Lane.DISK_WRITE) == [f"write {what}" for what in both[::2]]
    assert on(program, Lane.DISK_READ) == [f"read {what}" for what in both[::-1][1::2]]
    assert on(program, Lane.H2D) == [f"reload {what}" for what in both[::-1]]
    compute = on(program, Lane.COMPUTE)
    assert [w for w in compute if w.startswith("encode")] == [f"encode {what}" for what in both]
    assert [w for w in compute if w.startswith("decode")] == [f"decode {what}" for what in both[::-1]]


def test_reads_run_ahead_as_far_as_the_ring_goes() -> None:
    """Nothing is asked for before backward begins; with room for two, two are read then."""
    trace = chain((FIRST,))
    for room in (1, 2, 3):
        program = lower(trace, planned(trace, way(0, Fate.DISK), ring=(room - 1) * FIRST))
        places = [i for i, a in last_step(program) if a.verb is Verb.READ]
        first = next(i for i, a in last_step(program) if a.what == "backward")
        assert sum(i < first for i in places) == room


def without(program: Program, verb: Verb, earlier: Verb, *, other: bool = False) -> Program:
    """``program`` in which the first action of ``verb`` does not wait for one of ``earlier`` on the same tensor
    (``other``: on others)."""
    actions = list(program.actions)

    def lost(action: Action, index: int) -> bool:
        cause = actions[index]
        return cause.verb is earlier and cause.tensor >= 0 and (cause.tensor != action.tensor) is other

    index = next(i for i, a in enumerate(actions) if a.verb is verb and any(lost(a, e) for e in a.after))
    after = tuple(e for e in actions[index].after if not lost(actions[index], e))
    actions[index] = replace(actions[index], after=after)
    return replace(program, actions=tuple(actions))


@pytest.mark.parametrize(
    ("verb", "earlier", "other", "words"),
    [
        (Verb.WRITE, Verb.OFFLOAD, False, "may not be in the ring yet when it is written to disk"),
        (Verb.READ, Verb.WRITE, False, "may not be on disk yet when it is read"),
        (Verb.RELOAD, Verb.READ, False, "may not be read from disk yet"),
        (Verb.OFFLOAD, Verb.WRITE, True, r"of the ring, where action \d+ \(write .*\) may still need tensor"),
        (Verb.READ, Verb.RELOAD, True, r"of the ring, where action \d+ \(reload .*\) may still need tensor"),
        (Verb.OFFLOAD, Verb.ENCODE, False, "may not be encoded when it starts"),
        (Verb.DECODE, Verb.RELOAD, False, "may not be on the device as codes when it is decoded"),
    ],
)
def test_what_would_be_lost_is_refused(verb: Verb, earlier: Verb, other: bool, words: str) -> None:
    trace = chain((FIRST,))
    bits = 8 if Verb.ENCODE in (verb, earlier) or verb is Verb.DECODE else 0
    plan = planned(trace, way(0, Fate.DISK, bits), reload_window=FIRST, offload_window=1 << 20)
    program = lower(trace, plan, micro_batches=1)
    check(trace, MACHINE, plan, program)
    with pytest.raises(PlanInvalid, match=words) as caught:
        check(trace, MACHINE, plan, without(program, verb, earlier, other=other))
    assert "linear of block layers." in str(caught.value)


def test_a_place_that_the_ring_does_not_have() -> None:
    trace = chain((FIRST,))
    plan = planned(trace, way(0, Fate.DISK))
    program = lower(trace, plan)
    moved = tuple(replace(a, ring=a.ring + 1) if a.ring >= 0 else a for a in program.actions)
    with pytest.raises(PlanInvalid, match=r"at bytes 1 to 16385 of the ring, which has 16384; raise disk_window"):
        check(trace, MACHINE, plan, replace(program, actions=moved))
    one = next(i for i, a in enumerate(moved) if a.verb is Verb.WRITE)
    split = [replace(a, ring=a.ring + (i == one)) for i, a in enumerate(program.actions)]
    with pytest.raises(PlanInvalid, match=r"is at byte 0 of the ring, where action \d+ put it, not at 1"):
        check(trace, MACHINE, plan, replace(program, actions=tuple(split)))


# What may be made into codes.


def relu(saved: tuple[int, ...] = (FIRST,)) -> Trace:
    """Layers that are a ReLU each; with two of them, the first one's result is saved by the second as well."""
    trace, names = chain(saved), {"linear": RELU, "out_backward": RELU_BACKWARD}
    return replace(trace, works=tuple(replace(w, op=names.get(w.op, w.op)) for w in trace.works))


@pytest.mark.parametrize("fate", list(Fate))
def test_what_a_relu_makes_may_be_a_mask(fate: Fate) -> None:
    trace = relu()
    plan = planned(trace, Treatment(RELU, 0, fate, 1))
    check(trace, MACHINE, plan)
    assert plan.changes_numbers == ()
    assert {a.bits for a in lower(trace, plan).actions if a.verb is Verb.ENCODE} == {1}


@pytest.mark.parametrize(
    ("trace", "treatment", "recompute", "words"),
    [
        (chain(dtype="int64"), way(1, Fate.KEEP, 4), (), r"int64 numbers cannot be kept as 4 bits; float32"),
        (chain(), way(0, Fate.DISK, 1), (), r"1 bit holds what is true or false, or what a ReLU has made"),
        (relu((FIRST, SECOND)), Treatment(RELU, 0, Fate.KEEP, 1), (), r"op \d+ \(wgrad\) reads the numbers of its"),
        (relu(), Treatment(RELU, 0, Fate.KEEP, 1), EVERY, r"block layers\.0 runs again on the numbers of its"),
    ],
)
def test_what_cannot_be_codes(trace: Trace, treatment: Treatment, recompute: tuple[str, ...], words: str) -> None:
    placements = tuple(Placement(name, *RESIDENT) for name in EVERY)
    room = Streaming(disk_activations=1 << 20, disk_window=1 << 20)
    plan = plan_for(trace, placements, room, recompute, (Selection(EVERY, (treatment,)),), roomy=True)
    name = rf"block layers\.0, op {treatment.op}#{treatment.occurrence}: .*tensor \d+ \(activation of .*"
    with pytest.raises(PlanInvalid, match=name) as caught:
        check(trace, MACHINE, plan)
    assert caught.match(words) and caught.value.subject == "layers.0"


# Seconds.


def test_coding_takes_what_it_touches_or_what_its_kernels_cost() -> None:
    trace = chain((FIRST,), 1)
    codes = Codes.of(FIRST, "float32", 8)
    touched = FIRST // 4 * (96 + 4) + coded(FIRST, 8)
    seconds = Costs(trace, MACHINE, Masters.WHOLE).coding(codes, encode=True)
    assert seconds == pytest.approx(touched / MACHINE.device_bandwidth)
    slow = replace(MACHINE, launch_seconds=1.0)
    assert Costs(trace, slow, Masters.WHOLE).coding(codes, encode=True) == 23.0
    known = replace(slow, op_seconds={"forebay.encode(float32[4096], 8)": 0.5})
    plan = planned(trace, way(0, Fate.KEEP, 8))
    program = lower(trace, plan)
    events = play(program, Costs(trace, known, Masters.WHOLE)).events
    coded_for = [e.end - e.start for e in events if e.what == "encode layers.0 linear#0"]
    assert coded_for == pytest.approx([0.5] * program.steps)
