"""The checker, and the lowering that it judges, on updates in backward: whose gradients are in which slot when.
Those of blocks that stay on the device: ``test_check_in_backward``."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from forebay.arenas import arenas_of
from forebay.checking import check
from forebay.checking.order import Order
from forebay.errors import ConfigError, DoesNotFit, PlanInvalid
from forebay.layout import state_layout
from forebay.lowering import lower
from forebay.memory import Kind, Tier
from forebay.plans import Plan, Update, used_up
from forebay.program import Program, Verb
from forebay.states import Masters
from tests.null.ahead import ends_of_steps, issued_earlier
from tests.null.passing import passing, read_late
from tests.null.strategies import HOMES, RESIDENT, Case, cases, roomy, roomy_machine
from tests.null.synthetic import block
from tests.null.tracing import Layer, chain_trace
from tests.null.updating import at_home

MACHINE = roomy_machine()
N, WIDTH = 4, 4096
BLOCKS = [block(f"b{i}", ((32, 32), "float32", True)) for i in range(N)]  # 4096 bytes each
CHAIN = chain_trace(BLOCKS, [Layer(b.name, (2048,), 0, 1024) for b in BLOCKS])
HOSTED = [home for home in HOMES if home != RESIDENT]


@st.composite
def passing_cases(draw: st.DrawFn) -> Case:
    """A random trace and plan in which every block that may be is updated in backward."""
    case = draw(cases(activations=False))
    return replace(case, plan=passing(case.trace, case.plan, draw(st.integers(1, 3))))


def test_the_host_has_the_slots_in_the_place_of_gradients() -> None:
    """Parameters and two states of 1,024 elements for each block, gradients for two, one gradient of staging."""
    plan = passing(CHAIN, roomy(CHAIN), 2)
    host = N * (WIDTH + 2 * WIDTH) + 2 * WIDTH + WIDTH
    assert plan.host == host == roomy(CHAIN).host - (N - 2) * WIDTH
    assert lower(CHAIN, plan).standing[Tier.HOST][Kind.GRADIENT] == 2 * WIDTH
    check(CHAIN, MACHINE, plan)
    with pytest.raises(PlanInvalid, match=f"host peak of {host - 1} bytes"):
        check(CHAIN, MACHINE, replace(plan, host=host - 1))
    with pytest.raises(DoesNotFit, match="host memory"):
        check(CHAIN, replace(MACHINE, host_capacity=host - 1), replace(plan, budget=replace(plan.budget, host=host)))


def test_a_block_that_is_not_named_keeps_its_gradients() -> None:
    plan = passing(CHAIN, roomy(CHAIN), 1, ["b1", "b3"])
    assert arenas_of(CHAIN.model, plan, CHAIN.state_names).host_gradients == (N - 2) * WIDTH + WIDTH
    check(CHAIN, MACHINE, plan)


@pytest.mark.parametrize("home", HOSTED)
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_blocks_are_updated_under_backward(home: tuple[Tier, Tier, Tier], slots: int) -> None:
    """All but the one whose gradient lands last; on every device, and after any number of slots."""
    for device in ("cuda", "cpu"):
        trace = replace(CHAIN, device=device)
        plan = passing(trace, roomy(trace, home), slots)
        program = lower(trace, plan, steps=3)
        check(trace, roomy_machine(device), plan, program)
        for step, end in enumerate(ends_of_steps(program)):
            early = {a.block for a in program.actions[:end] if a.verb is Verb.UPDATE and a.step == step}
            assert early >= {"b1", "b2", "b3"}


@settings(max_examples=15)
@given(passing_cases())
def test_any_plan_is_lowered_right(case: Case) -> None:
    """And never more blocks than slots have gradients that an update may still read."""
    passing_through = used_up(case.plan.placements, resident=False)
    staying = used_up(case.plan.placements, resident=True)
    event(f"{len(passing_through)} and, on the device, {len(staying)} of {len(case.plan.placements)} in backward")
    program = lower(case.trace, case.plan, steps=3)
    check(case.trace, case.machine, case.plan, program)
    order, slots = Order(program), len(case.plan.streaming.gradient_slots)
    landed: dict[tuple[str, int], int] = {}
    done: dict[tuple[str, int], list[int]] = defaultdict(list)
    for index, action in enumerate(program.actions):
        if action.block in passing_through and action.verb is Verb.LAND:
            landed.setdefault((action.block, action.step), index)
        if action.block in passing_through and action.verb is Verb.UPDATE:
            done[action.block, action.step].append(index)
    for key, first in landed.items():
        there = [o for o, i in landed.items() if i <= first and not all(order.before(u, first) for u in done[o])]
        assert len(there) <= slots, key


@pytest.mark.parametrize("slots", [1, 2])
def test_a_slot_that_is_given_on_too_early(slots: int) -> None:
    plan = passing(CHAIN, roomy(CHAIN), slots)
    program = lower(CHAIN, plan)
    index = next(
        i for i, a in enumerate(program.actions) if a.verb is Verb.LAND and a.block == BLOCKS[N - 1 - slots].name
    )
    updates = {i for i, a in enumerate(program.actions) if a.verb is Verb.UPDATE}
    action = program.actions[index]
    assert updates & set(action.after)
    actions = list(program.actions)
    actions[index] = replace(action, after=tuple(i for i in action.after if i not in updates))
    with pytest.raises(
        PlanInvalid, match=f"lands in slot 0, where action .* may still read that of block b{N - 1}"
    ) as caught:
        check(CHAIN, MACHINE, plan, replace(program, actions=tuple(actions)))
    assert (caught.value.action, caught.value.subject) == (index, action.parameter)


def test_an_update_before_its_gradient() -> None:
    plan = passing(CHAIN, roomy(CHAIN), 2)
    program = lower(CHAIN, plan)
    landed, update = (
        next(i for i, a in enumerate(program.actions) if a.verb is verb and a.block == "b1")
        for verb in (Verb.LAND, Verb.UPDATE)
    )
    with pytest.raises(PlanInvalid, match=r"the gradient of b1\.0 lands in action"):
        check(CHAIN, MACHINE, plan, issued_earlier(program, update, landed))


def wrong_slot(program: Program, slot: int) -> Program:
    actions = list(program.actions)
    index = next(i for i, a in enumerate(actions) if a.verb is Verb.LAND)
    actions[index] = replace(actions[index], slot=slot)
    return replace(program, actions=tuple(actions))


def test_slots_that_are_not_there_or_too_small() -> None:
    plan = passing(CHAIN, roomy(CHAIN), 2)
    program = lower(CHAIN, plan)
    for slot in (-1, 2):
        with pytest.raises(PlanInvalid, match=f"lands in slot {slot}, which is not there"):
            check(CHAIN, MACHINE, plan, wrong_slot(program, slot))
    small = replace(plan, streaming=replace(plan.streaming, gradient_slots=(WIDTH, WIDTH // 2)))
    with pytest.raises(PlanInvalid, match=f"take {WIDTH} bytes and slot 1 for gradients has {WIDTH // 2}"):
        check(CHAIN, MACHINE, small, program)
    none = replace(plan, streaming=replace(plan.streaming, gradient_slots=(WIDTH // 2,)))
    with pytest.raises(PlanInvalid, match=f"gradients of block b0, .* take {WIDTH} bytes .* has {WIDTH // 2}; make it"):
        check(CHAIN, MACHINE, none)


def test_gradients_of_a_block_in_two_slots() -> None:
    pairs = [block(f"b{i}", ((32, 32), "float32", True), ((32,), "float32", True)) for i in range(3)]
    trace = chain_trace(pairs, [Layer(b.name, (2048, 64), 0, 1024) for b in pairs])
    plan = passing(trace, roomy(trace), 2)
    program = lower(trace, plan)
    check(trace, MACHINE, plan, program)
    with pytest.raises(PlanInvalid, match="gradients of block b2 land in slots 1 and 0 in one step"):
        check(trace, MACHINE, plan, wrong_slot(program, 1))


def test_a_step_is_one_backward() -> None:
    plan = passing(CHAIN, roomy(CHAIN), 2)
    with pytest.raises(ConfigError, match="one backward a step, got 2"):
        lower(CHAIN, plan, micro_batches=2)
    program = lower(CHAIN, at_home(plan, host=1 << 40), micro_batches=2)
    with pytest.raises(PlanInvalid, match="2 passes a step"):
        check(CHAIN, MACHINE, plan, program)


def test_a_block_that_backward_reads_again_after_its_update() -> None:
    """Its home has the values of the next step by then. Here by a plan that nobody made: ``Usable`` leaves it out."""
    trace = read_late()
    plan = roomy(trace, slots=1)
    assert passing(trace, plan).updated(Update.BACKWARD) == ("b",)
    named = passing(trace, plan, 2, ["a"])
    with pytest.raises(PlanInvalid, match=r"block a .*may change that meanwhile"):
        check(trace, MACHINE, named)


def test_blocks_whose_gradients_take_turns_keep_theirs() -> None:
    """Of a block around others one gradient is the first to land and one the last."""
    own = ((24,), "float32", True)
    parts = [block("root", own, own, held=True), *BLOCKS]
    layers = [Layer("root", (64,), 0, 64, (0,)), *(Layer(b.name) for b in BLOCKS), Layer("root", (64,), 0, 64, (1,))]
    trace = chain_trace(parts, layers)
    plan = passing(trace, roomy(trace))
    assert plan.updated(Update.BACKWARD) == tuple(b.name for b in BLOCKS)
    check(trace, MACHINE, plan)


def test_small_chunks_wait_for_their_own_gradients() -> None:
    """A block of several chunks: each is updated once, after what it reads."""
    plan = roomy(CHAIN)
    plan = passing(CHAIN, replace(plan, streaming=replace(plan.streaming, update_chunk=1024)))
    chunks = len(state_layout(BLOCKS[0], CHAIN.state_names, 1024, Masters.WHOLE).chunks)
    program = lower(CHAIN, plan)
    check(CHAIN, MACHINE, plan, program)
    assert sum(a.verb is Verb.UPDATE for a in program.actions) == N * chunks * program.steps


def test_slots_are_needed() -> None:
    plan = passing(CHAIN, roomy(CHAIN))
    with pytest.raises(ConfigError, match="has no gradient_slots"):
        replace(plan, streaming=roomy(CHAIN).streaming)


def test_slots_that_hold_no_block() -> None:
    plan = passing(CHAIN, roomy(CHAIN))
    small = replace(plan, streaming=replace(plan.streaming, gradient_slots=(64,)))
    with pytest.raises(ConfigError, match="take 4096 bytes and the largest of the gradient_slots has 64"):
        lower(CHAIN, small)


def test_through_json() -> None:
    plan = passing(CHAIN, roomy(CHAIN))
    assert Plan.from_json(plan.to_json()) == plan
