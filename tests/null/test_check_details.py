"""Small things that the checker has to see, each with one program or plan in which nothing else is wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forebay.arenas import UPDATE_RING
from forebay.checking import check
from forebay.errors import PlanInvalid
from forebay.lowering import lower
from forebay.memory import Kind, Tier
from forebay.model import Model
from forebay.plans import Placement, Plan, Streaming
from forebay.program import Action, Program, Verb
from forebay.trace import Phase, Trace
from forebay.treatments import Fate, Selection, Treatment
from tests.null.ahead import ahead, issued_earlier
from tests.null.programs import drop, plain_program
from tests.null.rearranging import behind
from tests.null.strategies import RESIDENT, plan_for, roomy
from tests.null.synthetic import block
from tests.null.test_check_ahead import read_again
from tests.null.test_check_rerun_order import generous
from tests.null.test_check_reruns import BLOCKS, MACHINE, S, gelus
from tests.null.test_check_transfers import changed, planned, unread, way
from tests.null.tracing import Layer, TraceBuilder, chain_trace, unread_trace

# Reruns.


def test_what_backward_does_not_read_runs_again_in_the_lowering_too() -> None:
    """Autograd asks for it when backward of the block begins, whatever its ops read."""
    trace = unread(gelus())
    plan, _ = generous(trace, Fate.KEEP, "mul")
    program = lower(trace, plan, steps=1)
    assert [a.block for a in program.actions if a.recomputed] == ["b", "b", "a", "a"]
    check(trace, MACHINE, plan, program)


def test_what_has_no_backward_never_runs_again() -> None:
    trace = gelus()
    last = trace.visits[-1]
    assert (last.block, last.phase) == ("a", Phase.BACKWARD)
    visits = tuple(replace(v, kept_until=min(v.kept_until, last.first_op - 1)) for v in trace.visits[:-1])
    trace = replace(trace, visits=visits)
    plan, _ = generous(trace, Fate.KEEP, "mul")
    program = lower(trace, plan, steps=1)
    assert {a.block for a in program.actions if a.recomputed} == {"b"}
    check(trace, MACHINE, plan, program)


def late_reader() -> Trace:
    """``gelus`` whose second block reads what it is given in its third op, and not in its first."""
    trace = gelus(handed=S, saved=False)
    number = next(v.segment for v in trace.visits if v.block == "b" and v.phase is Phase.FORWARD)
    ops = list(trace.segments[number].ops)
    given, own = ops[0].inputs[0], next(t for op in ops for t in op.inputs if t < 0 and t != ops[0].inputs[0])
    ops[0] = replace(ops[0], inputs=(own,))
    ops[2] = replace(ops[2], inputs=(*ops[2].inputs, given))
    segments = tuple(replace(s, ops=tuple(ops)) if i == number else s for i, s in enumerate(trace.segments))
    return replace(trace, segments=segments)


def test_a_rerun_has_what_it_is_given_though_it_is_read_later() -> None:
    """b runs again in pieces, around a named op; what a handed on is read in the second, but handed in at once."""
    trace = late_reader()
    chosen = (
        Selection(("a",), (Treatment("out", 0, Fate.OFFLOAD),)),
        Selection(("b",), (Treatment("mul", 0, Fate.KEEP),)),
    )
    plan = planned(trace, *chosen, recompute=BLOCKS)
    program = lower(trace, plan, steps=1)
    check(trace, MACHINE, plan, program)
    first, second = [i for i, a in enumerate(program.actions) if a.recomputed and a.block == "b"][:2]
    reload = next(i for i, a in enumerate(program.actions) if a.verb is Verb.RELOAD)
    assert reload in program.actions[first].after
    late = changed(program, first, after=tuple(a for a in program.actions[first].after if a != reload))
    late = changed(late, second, after=(*program.actions[second].after, reload))
    with pytest.raises(PlanInvalid, match=r"op 6 \(pow of block b\) reads tensor .* may not be back by then") as caught:
        check(trace, MACHINE, plan, late)
    assert caught.value.action == first


def test_a_reload_is_not_believed_beyond_ops_that_have_to_run() -> None:
    """It says that it is issued before b's tanh, and b's add has yet to run: then it says nothing."""
    trace = gelus()
    plan, program = generous(trace, Fate.OFFLOAD, "tanh")
    reload = next(i for i, a in enumerate(program.actions) if a.verb is Verb.RELOAD)
    first = next(i for i, a in enumerate(program.actions) if a.recomputed)
    # Before anything of b has run again.
    order = [*range(first), reload, *range(first, reload), *range(reload + 1, len(program.actions))]
    where = {old: new for new, old in enumerate(order)}
    actions = []
    for old in order:
        action: Action = program.actions[old]
        waits = (a for a in action.after if old != reload or a < first)
        actions.append(replace(action, after=tuple(sorted(where[a] for a in waits))))
    early = replace(program, actions=tuple(actions))
    early = changed(early, first, after=(first - 1,), ops=(9, 9))
    check(trace, MACHINE, plan, early)


# Treatments.


def test_what_makes_no_bytes_cannot_be_treated() -> None:
    b = TraceBuilder(Model((block("a", ((4,), "float32", True)),), 0), {"input_ids": 256})
    v = b.begin("a", Phase.FORWARD)
    v.given = (b.ids["input_ids"],)
    empty = v.make("aten.empty.memory_format", [b.ids["a.0"]], 0)
    saved = v.make("linear", [b.ids["input_ids"], b.ids["a.0"], empty], 4096, saved=True)
    v.save()
    v.drop(empty, saved)
    forward = b.end(v)
    v = b.begin("a", Phase.BACKWARD)
    v.complete(b.ids["a.0"], v.make("wgrad", [saved], 16, Kind.GRADIENT))
    v.unsave(saved, own=True)
    b.end(v)
    b.let_go(forward)
    trace = b.trace()
    for op, bad in (("linear", False), ("aten.empty.memory_format", True)):
        chosen = (way(Fate.KEEP, op=op),)
        plan = plan_for(trace, (Placement("a", *RESIDENT),), Streaming(), ("a",), chosen, roomy=True)
        if not bad:
            check(trace, MACHINE, plan)
            continue
        with pytest.raises(PlanInvalid, match=rf"op {op}#0: op 0 makes no tensor with bytes of its own") as caught:
            check(trace, MACHINE, plan, Program((), (), {}, 1, 1))
        assert caught.value.subject == "a"


def test_a_mask_may_be_what_a_block_that_runs_again_does_not_read() -> None:
    """c runs again, and only b reads what a hands on."""
    names = "abc"
    blocks = [block(name, ((8,), "float32", True)) for name in names]
    trace = chain_trace(blocks, [Layer(name, (512,), 0, S) for name in names])
    ops = {"out": "aten.relu.default", "wgrad": "aten.threshold_backward.default"}
    trace = replace(trace, works=tuple(replace(w, op=ops.get(w.op, w.op)) for w in trace.works))
    mask = way(Fate.KEEP, 1, op="aten.relu.default")
    check(trace, MACHINE, planned(trace, mask, recompute=("c",)))
    with pytest.raises(PlanInvalid, match="block b runs again on the numbers of its"):
        check(trace, MACHINE, planned(trace, mask, recompute=("b", "c")))


# Programs that are not whole.

CHAIN = chain_trace([block(f"b{i}", ((32, 32), "float32", True)) for i in range(2)])


@pytest.mark.parametrize("ops", [(0, 10_000), (3, 2), (-1, 2)])
def test_ops_that_there_are_not(ops: tuple[int, int]) -> None:
    plan = roomy(CHAIN)
    program = plain_program(CHAIN, plan, 1)
    first = next(i for i, a in enumerate(program.actions) if a.verb is Verb.COMPUTE)
    with pytest.raises(PlanInvalid, match=f"the trace has no ops {ops[0]} to {ops[1]}") as caught:
        check(CHAIN, MACHINE, plan, changed(program, first, ops=ops))
    assert caught.value.action == first


def test_a_program_without_its_last_pass() -> None:
    plan = roomy(CHAIN)
    with pytest.raises(PlanInvalid, match=r"the end of the program.*op 0 \(linear of block b0\) is not run in pass 1"):
        check(CHAIN, MACHINE, plan, replace(plain_program(CHAIN, plan, 1), steps=2))


@pytest.mark.parametrize(
    ("fields", "words"),
    [({"step": 1}, "there is no step 1"), ({"block": "b7"}, "the model has no block 'b7'")],
)
def test_nothing_is_updated_that_there_is_not(fields: dict[str, object], words: str) -> None:
    """Once more, for another step or another block."""
    plan = roomy(CHAIN)
    program = plain_program(CHAIN, plan, 1)
    last = len(program.actions) - 1
    assert program.actions[last].verb is Verb.UPDATE
    more = replace(program, actions=(*program.actions, program.actions[last]))
    with pytest.raises(PlanInvalid, match=words) as caught:
        check(CHAIN, MACHINE, plan, changed(more, last + 1, **fields))
    assert caught.value.action == last + 1


def test_a_resident_block_is_updated_between_its_steps() -> None:
    plan = roomy(CHAIN, RESIDENT)
    program = plain_program(CHAIN, plan, 2)
    check(CHAIN, MACHINE, plan, program)
    updates = [i for i, a in enumerate(program.actions) if a.verb is Verb.UPDATE and a.block == "b0"]
    early = issued_earlier(program, updates[0], updates[0] - 1)
    with pytest.raises(
        PlanInvalid, match="its update belongs on the compute lane, after the step's last backward"
    ) as it:
        check(CHAIN, MACHINE, plan, early)
    assert it.value.subject == "b0"
    following = next(i for i, a in enumerate(program.actions) if i > updates[0] and a.verb is Verb.COMPUTE)
    with pytest.raises(
        PlanInvalid, match="block b0 is updated for step 0 after the forward of the next step has begun"
    ):
        check(CHAIN, MACHINE, plan, behind(program, updates[0], following))


# What is on disk.


def on_disk(trace: Trace, chunk: int = 4_194_304) -> Plan:
    plan = roomy(trace, (Tier.DISK, Tier.HOST, Tier.DISK))
    return replace(plan, streaming=replace(plan.streaming, update_chunk=chunk))


def test_host_slots_that_nobody_needs_are_not_made() -> None:
    plan = roomy(CHAIN)
    spare = plan_for(CHAIN, plan.placements, replace(plan.streaming, host_slots=(1 << 20,)))
    assert spare.host == plan.host
    check(CHAIN, MACHINE, spare, plain_program(CHAIN, spare))


def test_what_is_read_once_is_copied_once() -> None:
    """Backward's fetch cannot have what forward's has had: its buffer has gone to another since."""
    plan = on_disk(CHAIN)
    program = plain_program(CHAIN, plan, 1)
    reads = [i for i, a in enumerate(program.actions) if a.verb is Verb.READ and a.block == "b1"]
    with pytest.raises(PlanInvalid, match="block b1 lives on disk and is not read from there before this fetch"):
        check(CHAIN, MACHINE, plan, drop(program, reads[1]))


def test_states_are_no_parameters() -> None:
    """A frozen parameter is read again behind the update ahead of its block's step, whose states have been read."""
    trace, _ = read_again()
    plan = ahead(trace, on_disk(trace))
    program = plain_program(trace, plan, 1)
    check(trace, MACHINE, plan, program)
    read = max(i for i, a in enumerate(program.actions) if a.verb is Verb.READ and a.chunk < 0)
    assert any(a.verb is Verb.READ and a.chunk == 0 for a in program.actions[:read])
    with pytest.raises(PlanInvalid, match="the parameters of block b live on disk and are not read before this update"):
        check(trace, MACHINE, plan, drop(program, read))


def test_parameters_are_written_after_the_last_chunk() -> None:
    plan = on_disk(trace := chain_trace([block("a", ((64, 64), "float32", True))]), 1024)
    program = plain_program(trace, plan, 1)
    check(trace, MACHINE, plan, program)
    updates = [i for i, a in enumerate(program.actions) if a.verb is Verb.UPDATE]
    write = max(i for i, a in enumerate(program.actions) if a.verb is Verb.WRITE)
    assert len(updates) == 4 and program.actions[write].chunk == -1
    with pytest.raises(PlanInvalid, match=r"block a \(a\) has no write in step 0") as caught:
        check(trace, MACHINE, plan, drop(program, write))
    assert "chunk" not in str(caught.value)
    # The writes of states, which it comes behind, do not say either that the last chunk is done.
    states = max(i for i, a in enumerate(program.actions[:write]) if a.verb is Verb.WRITE)
    early = issued_earlier(program, write, states)
    with pytest.raises(PlanInvalid, match=rf"writes the parameters of block a, which action {updates[-1]} may still"):
        check(trace, MACHINE, plan, changed(early, states, after=(updates[0],)))


def test_states_pass_through_a_ring_of_three() -> None:
    """Four chunks: the fourth is read when the first is written, and no earlier."""
    plan = on_disk(trace := chain_trace([block("a", ((64, 64), "float32", True))]), 1024)
    program = plain_program(trace, plan, 1)
    reads = [i for i, a in enumerate(program.actions) if a.verb is Verb.READ and a.chunk >= 0]
    assert len(reads) == UPDATE_RING + 1
    (written,) = (a for a in program.actions[reads[-1]].after if program.actions[a].chunk == 0)
    less = tuple(a for a in program.actions[reads[-1]].after if a != written)
    with pytest.raises(PlanInvalid, match=f"it needs one of 3 buffers for states, and action {written} may") as caught:
        check(trace, MACHINE, plan, changed(program, reads[-1], after=less))
    assert (caught.value.action, caught.value.subject) == (reads[-1], "a")


def less(program: Program, index: int, *gone: int) -> Program:
    """``program`` whose action ``index`` does not wait for ``gone``."""
    assert set(gone) <= set(program.actions[index].after)
    return changed(program, index, after=tuple(a for a in program.actions[index].after if a not in gone))


@pytest.mark.parametrize(
    ("home", "verb", "chunk", "words"),
    [
        ((Tier.HOST, Tier.HOST, Tier.DISK), Verb.READ, 0, "it reads states of chunk 0 of block a that action {} may"),
        ((Tier.DISK, Tier.HOST, Tier.HOST), Verb.UPDATE, 0, "the parameters of block a live on disk and are not read"),
    ],
)
def test_the_second_step_waits_for_what_the_disk_has(
    home: tuple[Tier, Tier, Tier], verb: Verb, chunk: int, words: str
) -> None:
    """States that the first has written; parameters that have been read for this one."""
    trace = chain_trace([block("a", ((32, 32), "float32", True))])
    plan = roomy(trace, home)
    program = plain_program(trace, plan, 2)
    index = max(i for i, a in enumerate(program.actions) if (a.verb, a.chunk) == (verb, chunk))
    other = Verb.WRITE if verb is Verb.READ else Verb.READ
    (gone,) = (a for a in program.actions[index].after if program.actions[a].verb is other)
    with pytest.raises(PlanInvalid, match=words.format(gone)) as caught:
        check(trace, MACHINE, plan, less(program, index, gone))
    assert caught.value.action == index


def test_parameters_that_were_read_before_they_were_written_are_old() -> None:
    """The second step cannot work on what was read for the first."""
    trace = chain_trace([block("a", ((32, 32), "float32", True))])
    plan = roomy(trace, (Tier.DISK, Tier.HOST, Tier.HOST))
    program = plain_program(trace, plan, 2)
    read = max(i for i, a in enumerate(program.actions) if a.verb is Verb.READ)
    with pytest.raises(PlanInvalid, match="the parameters of block a live on disk and are not read before this update"):
        check(trace, MACHINE, plan, drop(program, read))


def test_a_gradient_waits_for_the_update_though_nobody_reads_its_parameter() -> None:
    """A block that is never fetched: nothing else puts the next gradient behind the update that reads the last."""
    trace = unread_trace()
    plan = roomy(trace)
    program = plain_program(trace, plan, 2)
    check(trace, MACHINE, plan, program)
    landing = max(i for i, a in enumerate(program.actions) if a.verb is Verb.LAND)
    update = next(i for i, a in enumerate(program.actions) if a.verb is Verb.UPDATE)
    with pytest.raises(
        PlanInvalid, match=f"gradient of a.0 may overwrite the one that action {update} reads"
    ) as caught:
        check(trace, MACHINE, plan, less(program, landing, update))
    assert caught.value.action == landing


def test_an_update_that_the_step_may_have_asked_for_works_in_place() -> None:
    """Issued when backward is over it need not be one ahead, though the block has two copies."""
    trace, plan = read_again()
    program = plain_program(trace, plan, 1)
    two = ahead(trace, plan)
    program = replace(program, standing=plain_program(trace, two, 1).standing)
    check(trace, MACHINE, two, program)
    update = next(i for i, a in enumerate(program.actions) if a.verb is Verb.UPDATE)
    fetch = max(i for i, a in enumerate(program.actions) if a.verb is Verb.FETCH and a.block == "b")
    with pytest.raises(PlanInvalid, match=rf"as action {fetch} copied it, and action {update} .* may change that"):
        check(trace, MACHINE, two, less(program, update, fetch))
