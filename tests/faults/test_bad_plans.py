"""Plans that cannot be used: cut short, from another version, for another model, without a budget."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from forebay.budgets import Budget, DiskBudget
from forebay.checking import check
from forebay.errors import ConfigError, DoesNotFit, PlanInvalid
from forebay.memory import Tier
from forebay.model import Block
from forebay.plans import PLAN_SCHEMA, Placement, Plan, Streaming
from forebay.trace import Trace
from forebay.treatments import Fate, Selection, Treatment
from tests.null.strategies import plan_for, roomy, roomy_machine
from tests.null.synthetic import block
from tests.null.tracing import Layer, chain_trace
from tests.null.treating import treated_program

MACHINE = roomy_machine()
TRACE = chain_trace([block(f"b{i}", ((32, 32), "float32", True)) for i in range(3)])
PLAN = roomy(TRACE)


def changed(**fields: object) -> str:
    return json.dumps({**json.loads(PLAN.to_json()), **fields})


def test_a_truncated_plan_is_a_usage_error() -> None:
    text = PLAN.to_json()
    for length in range(0, len(text), 97):
        with pytest.raises(ConfigError, match="cannot read a Plan"):
            Plan.from_json(text[:length])


def test_a_newer_schema_says_which_and_what_to_do() -> None:
    with pytest.raises(
        ConfigError, match=f"schema {PLAN_SCHEMA + 1}, .* reads schema {PLAN_SCHEMA}; make the plan again"
    ):
        Plan.from_json(changed(schema=PLAN_SCHEMA + 1))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("placements", [{"block": "b0", "parameters": "attic", "gradients": "host", "states": "host"}]),
        ("placements", None),
        ("device", "much"),
        ("streaming", {"slots": [-1]}),
    ],
)
def test_a_field_that_cannot_be_is_named(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=field):
        Plan.from_json(changed(**{field: value}))


@pytest.mark.parametrize("tier", ["device", "host", "pinned"])
@pytest.mark.parametrize("nbytes", [0, -1])
def test_a_budget_of_nothing_is_refused(tier: str, nbytes: int) -> None:
    with pytest.raises(ConfigError, match=f"the {tier} budget must be more than 0 bytes, got {nbytes}"):
        Budget(**{"device": 1, tier: nbytes})
    budget = {"device": 1, "host": None, "pinned": None, "disk": None, tier: nbytes}
    with pytest.raises(ConfigError, match=f"the {tier} budget"):
        Plan.from_json(changed(budget=budget))


@pytest.mark.parametrize("nbytes", [0, -1])
def test_a_disk_of_nothing_holds_nothing(nbytes: int) -> None:
    plan = roomy(TRACE, (Tier.HOST, Tier.HOST, Tier.DISK))
    with pytest.raises((ConfigError, DoesNotFit), match="disk"):
        check(TRACE, MACHINE, replace(plan, budget=replace(plan.budget, disk=DiskBudget("folder", nbytes))))


def test_a_plan_for_another_model_says_so() -> None:
    wider = chain_trace([block(f"b{i}", ((64, 32), "float32", True)) for i in range(3)])
    with pytest.raises(PlanInvalid, match="made for another model, batch shape or optimizer") as caught:
        check(wider, MACHINE, PLAN)
    assert PLAN.fingerprint in str(caught.value) and wider.fingerprint in str(caught.value)
    assert caught.value.subject == "plan"


def test_a_plan_for_another_batch_says_so() -> None:
    longer = chain_trace(TRACE.model.blocks, input_nbytes=512)
    with pytest.raises(PlanInvalid, match="batch shape"):
        check(longer, MACHINE, PLAN)


PLACED = [Placement(f"b{i}", Tier.HOST, Tier.HOST, Tier.HOST) for i in range(4)]


@pytest.mark.parametrize(
    ("placements", "subject", "words"),
    [
        (PLACED[:2], "b2", "does not place block b2"),
        (PLACED, "b3", "has no block b3"),
        ([*PLACED[:3], PLACED[1]], "b1", "places block b1 more than once"),
    ],
)
def test_every_block_has_one_place(placements: list[Placement], subject: str, words: str) -> None:
    with pytest.raises(PlanInvalid, match=words) as caught:
        check(TRACE, MACHINE, replace(PLAN, placements=tuple(placements), fingerprint=""))
    assert caught.value.subject == subject


def test_recomputation_names_blocks_that_there_are() -> None:
    for recompute, words in ((("b9",), "b9, which the model does not have"), (("b1", "b1"), "names block b1 twice")):
        with pytest.raises(PlanInvalid, match=words):
            check(TRACE, MACHINE, replace(PLAN, recompute=recompute))


@pytest.mark.parametrize("changes", [{"modules": ("b1", "head")}, {"held": True}])
def test_what_runs_again_is_one_module(changes: dict[str, object]) -> None:
    trace = odd("b1", **changes)
    plan = replace(roomy(trace), recompute=("b1",))
    with pytest.raises(PlanInvalid, match=r"recomputes block b1, which is not one module .* of recompute") as caught:
        check(trace, MACHINE, plan)
    assert caught.value.subject == "b1"


def test_a_slot_that_is_too_small_is_said() -> None:
    """A block has 32 * 32 * 4 bytes."""
    streaming = replace(PLAN.streaming, slots=(4032,))
    with pytest.raises(PlanInvalid, match="slot of 4096 bytes and the largest has 4032") as caught:
        check(TRACE, MACHINE, replace(PLAN, streaming=streaming))
    assert caught.value.subject == "b0"
    on_disk = roomy(TRACE, (Tier.DISK, Tier.HOST, Tier.HOST))
    with pytest.raises(PlanInvalid, match="host slot"):
        check(TRACE, MACHINE, replace(on_disk, streaming=replace(on_disk.streaming, host_slots=())))


def test_a_plan_that_promises_too_little_is_refused() -> None:
    for tier in ("device", "host"):
        with pytest.raises(PlanInvalid, match=f"predicts a {tier} peak of 1 bytes"):
            check(TRACE, MACHINE, replace(PLAN, **{tier: 1}))


def test_a_plan_without_a_fingerprint_is_taken_at_its_word() -> None:
    check(TRACE, MACHINE, replace(PLAN, fingerprint=""))
    other = chain_trace(TRACE.model.blocks, input_nbytes=512)
    check(other, MACHINE, replace(plan_for(TRACE, PLAN.placements, PLAN.streaming, roomy=True), fingerprint=""))


# Single ops.

LAYERS = [Layer(f"b{i}", (8192, 8192), 4096, 8192, view=True) for i in range(3)]
OPS = chain_trace([block(f"b{i}", ((32, 32), "float32", True)) for i in range(3)], LAYERS)
"""Forward of a block: linear, view, linear, view, mix (saved by nobody), out (saved by who comes next)."""


def treating(trace: Trace, *treatments: Treatment, blocks: tuple[str, ...] = ("b1",), again: bool = True) -> Plan:
    """``trace``, streamed, with ``treatments`` in ``blocks``, which recompute or not, and more room than they need."""
    plan = roomy(trace)
    streaming = replace(plan.streaming, host_activations=1 << 20)
    recompute = blocks if again else ()
    plan = plan_for(trace, plan.placements, streaming, recompute, roomy=True)
    return replace(plan, activations=(Selection(blocks, treatments),))


def test_treatments_of_ops_that_there_are_are_accepted() -> None:
    keep, away = Treatment("linear", 0, Fate.KEEP), Treatment("linear", 1, Fate.OFFLOAD)
    for plan in (treating(OPS, keep, away), treating(OPS, away, blocks=("b0", "b2"), again=False)):
        check(OPS, MACHINE, plan, treated_program(OPS, plan))


@pytest.mark.parametrize(
    ("op", "occurrence", "words"),
    [
        ("conv", 0, "op conv#0: conv does not run in a forward of the block"),
        ("linear", 2, "op linear#2: linear runs 2 times in a forward of the block"),
        ("wgrad", 0, "op wgrad#0: wgrad does not run in a forward"),
        ("view", 0, r"op view#0: op \d+ is a view"),
    ],
)
@pytest.mark.parametrize("fate", [*Fate])
def test_an_op_that_cannot_be_named_is_said(op: str, occurrence: int, words: str, fate: Fate) -> None:
    with pytest.raises(PlanInvalid, match=f"block b1, {words}") as caught:
        check(OPS, MACHINE, treating(OPS, Treatment(op, occurrence, fate)))
    assert (caught.value.action, caught.value.subject) == (-1, "b1")


def test_a_name_holds_in_every_forward_of_the_block() -> None:
    """b1 runs twice: the second time there is one linear less."""
    trace = chain_trace(OPS.model.blocks, [*LAYERS, Layer("b1", (8192,), 0, 8192)])
    with pytest.raises(PlanInvalid, match="block b1, op linear#1: linear runs 1 times"):
        check(trace, MACHINE, treating(trace, Treatment("linear", 1, Fate.KEEP)))
    plan = treating(trace, Treatment("linear", 0, Fate.OFFLOAD))
    check(trace, MACHINE, plan, treated_program(trace, plan))


def test_what_nobody_saves_is_not_moved() -> None:
    """But it may be where its block recomputes; and where it is too small to be moved."""
    mix = Treatment("mix", 0, Fate.OFFLOAD)
    with pytest.raises(PlanInvalid, match=r"block b1, op mix#0: nobody saves its tensor .* for backward") as caught:
        check(OPS, MACHINE, treating(OPS, mix, again=False))
    assert caught.value.subject == "b1"
    again = treating(OPS, mix)
    check(OPS, MACHINE, again, treated_program(OPS, again))
    small = chain_trace(OPS.model.blocks, [replace(layer, temporary=4095) for layer in LAYERS])
    kept = treating(small, mix, again=False)
    check(small, MACHINE, kept, treated_program(small, kept))


def odd(name: str, **changes: object) -> Trace:
    """The chain, in which block ``name`` is changed."""
    blocks: list[Block] = [replace(b, **changes) if b.name == name else b for b in OPS.model.blocks]  # type: ignore[arg-type]
    return chain_trace(blocks, LAYERS)


def test_a_block_that_there_is_not_or_that_is_no_module_is_said() -> None:
    away = Treatment("linear", 0, Fate.OFFLOAD)
    with pytest.raises(PlanInvalid, match="block b9, op linear#0: the model does not have this block"):
        check(OPS, MACHINE, treating(OPS, away, blocks=("b9",), again=False))
    for changes in ({"modules": ("b1", "head")}, {"held": True}):
        trace = odd("b1", **changes)
        with pytest.raises(PlanInvalid, match="block b1, op linear#0: the block is not one module") as caught:
            check(trace, MACHINE, treating(trace, away, again=False))
        assert caught.value.subject == "b1"
    idle = chain_trace(OPS.model.blocks, LAYERS[:2])
    with pytest.raises(PlanInvalid, match="block b2, op linear#0: the block never runs"):
        check(idle, MACHINE, treating(idle, away, blocks=("b2",), again=False))


def test_a_forward_that_another_block_interrupts_is_said() -> None:
    """Two visits of b1 whose saved tensors go with the same op are one call of its module; b2 runs in its middle."""
    trace = chain_trace(OPS.model.blocks, [*LAYERS, LAYERS[1]])
    last = max(v.kept_until for v in trace.visits if v.block == "b1")
    visits = tuple(replace(v, kept_until=last) if v.block == "b1" and v.kept_until >= 0 else v for v in trace.visits)
    keep = Treatment("linear", 0, Fate.KEEP)
    with pytest.raises(PlanInvalid, match="block b1, op linear#0: block b2 runs in the middle") as caught:
        check(replace(trace, visits=visits), MACHINE, treating(trace, keep))
    assert caught.value.subject == "b1"
    plan = treating(trace, keep)
    check(trace, MACHINE, plan, treated_program(trace, plan))


def test_what_is_changed_in_place_is_not_named() -> None:
    """``mix`` of b1 writes to what its last ``linear`` made, beside what it makes itself."""
    place = next(v.segment for v in OPS.visits if v.block == "b1")
    segment = OPS.segments[place]
    names = [OPS.works[op.work].op for op in segment.ops]
    mix, (written,) = names.index("mix"), segment.ops[2].outputs
    changed = replace(segment.ops[mix], outputs=(*segment.ops[mix].outputs, written))
    ops = (*segment.ops[:mix], changed, *segment.ops[mix + 1 :])
    trace = replace(OPS, segments=tuple(replace(s, ops=ops) if i == place else s for i, s in enumerate(OPS.segments)))
    for op, occurrence, words in (
        ("linear", 1, r"op \d+ \(mix\) changes its tensor .* in place afterwards"),
        ("mix", 0, r"op \d+ changes what others have made in place"),
    ):
        with pytest.raises(PlanInvalid, match=f"block b1, op {op}#{occurrence}: {words}") as caught:
            check(trace, MACHINE, treating(trace, Treatment(op, occurrence, Fate.KEEP)))
        assert caught.value.subject == "b1"
    plan = treating(trace, Treatment("linear", 0, Fate.KEEP))
    check(trace, MACHINE, plan, treated_program(trace, plan))


def test_too_little_room_on_the_host_is_said() -> None:
    """Two blocks move two tensors of 8,192 bytes each."""
    both = (Treatment("linear", 0, Fate.OFFLOAD), Treatment("linear", 1, Fate.OFFLOAD))
    plan = treating(OPS, *both, blocks=("b0", "b1"), again=False)
    short = replace(plan, streaming=replace(plan.streaming, host_activations=4 * 8192 - 1))
    with pytest.raises(PlanInvalid, match=r"moves 32768 bytes .* room for 32767 there \(host_activations\)"):
        check(OPS, MACHINE, short)
    exact = replace(plan, streaming=replace(plan.streaming, host_activations=4 * 8192))
    check(OPS, MACHINE, exact, treated_program(OPS, exact))


def test_a_treatment_names_something() -> None:
    for wrong in (("", 0), ("linear", -1)):
        with pytest.raises(ConfigError, match="names an op and its occurrence"):
            Treatment(*wrong, Fate.KEEP)
    with pytest.raises(ConfigError, match="offload_window must be 0 bytes or more"):
        Streaming(offload_window=-1)
