"""The checker on updates ahead of their step: two copies at home, and who reads or writes which of them when."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from forebay.budgets import DiskBudget
from forebay.checking import check
from forebay.checking.order import Order
from forebay.errors import DoesNotFit, PlanInvalid
from forebay.lowering import lower
from forebay.memory import Tier
from forebay.plans import Placement, Plan, Streaming, Update
from forebay.program import Action, Program, Verb
from forebay.timeline import Lane
from forebay.trace import Trace
from tests.null.ahead import ahead, ends_of_steps, issued_earlier
from tests.null.programs import drop, plain_program
from tests.null.strategies import HOMES, RESIDENT, plan_for, roomy, roomy_machine
from tests.null.synthetic import block
from tests.null.tracing import Layer, chain_trace

MACHINE = roomy_machine()
BLOCKS = [block(f"b{i}", ((32, 32), "float32", True)) for i in range(3)]  # 4096 bytes each
CHAIN = chain_trace(BLOCKS, [Layer(b.name, (2048,), 0, 1024) for b in BLOCKS])
HOSTED, DISK = (Tier.HOST, Tier.HOST, Tier.HOST), (Tier.DISK, Tier.HOST, Tier.DISK)
LOWERINGS = [pytest.param(plain_program, id="plain"), pytest.param(lower, id="lowered")]

Lowering = Callable[..., Program]


def place_of(program: Program, verb: Verb, block: str, step: int, chunk: int = 0) -> int:
    """The first such action of the step."""
    wanted = (verb, block, step, chunk)
    return next(i for i, a in enumerate(program.actions) if (a.verb, a.block, a.step, a.chunk) == wanted)


def with_after(program: Program, index: int, *after: int) -> Program:
    actions = list(program.actions)
    actions[index] = replace(actions[index], after=after)
    return replace(program, actions=tuple(actions))


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("home", [home for home in HOMES if home != RESIDENT])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_every_placement_is_accepted(home: tuple[Tier, Tier, Tier], micro_batches: int, lowering: Lowering) -> None:
    """All blocks, or some; the updates of the last blocks of forward are issued while backward still is."""
    for device, names in (("cuda", None), ("cpu", None), ("cuda", ("b1",)), ("cuda", ("b0", "b2"))):
        trace = replace(CHAIN, device=device)
        plan = ahead(trace, roomy(trace, home), names)
        program = lowering(trace, plan, steps=3, micro_batches=micro_batches)
        check(trace, roomy_machine(device), plan, program)
        for step, end in enumerate(ends_of_steps(program)):
            early = {a.block for a in program.actions[:end] if a.verb is Verb.UPDATE and a.step == step}
            assert early == {"b1", "b2"} & set(plan.updated(Update.AHEAD))
        check(trace, roomy_machine(device), plan, micro_batches=micro_batches)


# What stands.


def test_two_copies_on_the_host_have_a_closed_form() -> None:
    """Parameters and two states of 1,024 elements of fp32 twice, gradients once; one gradient of staging."""
    for names in (("b1",), ("b0", "b2")):
        plan = ahead(CHAIN, roomy(CHAIN), names)
        host = 3 * (4096 + 4096 + 2 * 4096) + len(names) * (4096 + 2 * 4096) + 4096
        fitting = replace(plan, host=host, budget=replace(plan.budget, host=host))
        check(CHAIN, MACHINE, fitting, plain_program(CHAIN, plan))
        with pytest.raises(PlanInvalid, match=f"host peak of {host - 1} bytes"):
            check(CHAIN, MACHINE, replace(plan, host=host - 1))
        with pytest.raises(DoesNotFit, match="host memory") as caught:
            check(CHAIN, replace(MACHINE, host_capacity=host - 1), fitting)
        assert (caught.value.tier, caught.value.needed, caught.value.allowed) == ("host", host, host - 1)


def test_two_copies_on_disk_have_a_closed_form() -> None:
    """Parameters in whole pages and two states in one chunk of each; two ranges of one block."""
    plan = ahead(CHAIN, roomy(CHAIN, DISK), ("b1",))
    disk = 3 * (4096 + 2 * 4096) + 4096 + 2 * 4096
    exact = replace(plan, disk=disk, budget=replace(plan.budget, disk=DiskBudget("folder", disk)))
    check(CHAIN, MACHINE, exact, plain_program(CHAIN, plan))
    with pytest.raises(PlanInvalid, match=f"disk peak of {disk - 1} bytes"):
        check(CHAIN, MACHINE, replace(exact, disk=disk - 1))
    short = replace(exact, budget=replace(exact.budget, disk=DiskBudget("folder", disk - 1)))
    with pytest.raises(DoesNotFit) as caught:
        check(CHAIN, MACHINE, short)
    assert (caught.value.tier, caught.value.needed, caught.value.allowed) == ("disk", disk, disk - 1)


def test_the_program_says_that_both_copies_stand() -> None:
    plan = ahead(CHAIN, roomy(CHAIN), ("b1",))
    program = plain_program(CHAIN, plan)
    stands = {**program.standing, Tier.HOST: plain_program(CHAIN, roomy(CHAIN)).standing[Tier.HOST]}
    with pytest.raises(PlanInvalid, match=r"the program says that \d+ bytes stand in host memory"):
        check(CHAIN, MACHINE, plan, replace(program, standing=stands))


# When.


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_a_block_that_the_plan_does_not_name_is_updated_when_the_step_is_asked_for(lowering: Lowering) -> None:
    """Before that nobody knows whether it will be, and with what."""
    plan = ahead(CHAIN, roomy(CHAIN), ("b2",))
    program = lowering(CHAIN, plan)
    other = ahead(CHAIN, roomy(CHAIN), ("b1",))
    with pytest.raises(
        PlanInvalid, match="block b2 is updated before backward of step 0 is over, and the plan"
    ) as caught:
        check(CHAIN, MACHINE, other, program)
    assert caught.value.action == place_of(program, Verb.UPDATE, "b2", 0)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_it_comes_after_all_that_lands_of_its_block(micro_batches: int) -> None:
    """Two parameters, a chunk each. The gradient of the second lands first: its chunk might be updated then. But the
    step would find that a gradient has landed since, and do it again."""
    trace = chain_trace([block("a", *[((32, 32), "float32", True)] * 2)], [Layer("a", (2048,), 0, 1024)])
    plan = roomy(trace)
    plan = replace(plan, streaming=replace(plan.streaming, update_chunk=1024))
    two = ahead(trace, plan)
    program = plain_program(trace, two, 1, micro_batches)
    check(trace, MACHINE, two, program)
    landed = [i for i, a in enumerate(program.actions) if a.lane is Lane.D2H][-2:]
    first, second = (program.actions[i].parameter for i in landed)
    chunk = int(first == "a.1")
    update = place_of(program, Verb.UPDATE, "a", 0, chunk)
    # Both chunks last, so that the lane says nothing of the one in front.
    early = with_after(
        issued_earlier(program, update, place_of(program, Verb.UPDATE, "a", 0, 0)), landed[1] + 1, landed[0]
    )
    check(trace, MACHINE, ahead(trace, plan, ()), early)
    with pytest.raises(PlanInvalid, match=f"the gradient of {second} lands in action {landed[1]}") as caught:
        check(trace, MACHINE, two, early)
    assert (caught.value.action, caught.value.subject) == (landed[1] + 1, second)


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_it_comes_after_the_last_micro_batch(lowering: Lowering) -> None:
    plan = ahead(CHAIN, roomy(CHAIN))
    program = lowering(CHAIN, plan, steps=1, micro_batches=2)
    update = place_of(program, Verb.UPDATE, "b2", 0)
    landing = next(i for i, a in enumerate(program.actions) if a.verb is Verb.LAND and a.block == "b2")
    with pytest.raises(PlanInvalid, match=r"the gradient of b2.0 lands in action \d+, which may not be done") as caught:
        check(CHAIN, MACHINE, plan, with_after(program, update, landing))
    assert (caught.value.action, caught.value.subject) == (update, "b2.0")


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("home", [HOSTED, DISK])
def test_it_is_done_once(home: tuple[Tier, Tier, Tier], lowering: Lowering) -> None:
    """And not again by the step."""
    plan = ahead(CHAIN, roomy(CHAIN, home))
    program = lowering(CHAIN, plan, steps=2)
    with pytest.raises(PlanInvalid, match=r"chunk 0 of block b2 \(b2.0\) has no update in step 1") as caught:
        check(CHAIN, MACHINE, plan, drop(program, place_of(program, Verb.UPDATE, "b2", 1)))
    assert caught.value.subject == "b2.0"
    update = place_of(program, Verb.UPDATE, "b2", 1)
    again = replace(program, actions=(*program.actions, replace(program.actions[update], after=(update,))))
    with pytest.raises(PlanInvalid, match="chunk 0 of block b2 has its update twice in step 1") as caught:
        check(CHAIN, MACHINE, plan, again)
    assert caught.value.action == len(program.actions)


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("states", [Tier.HOST, Tier.DISK])
def test_the_other_copy_is_whole(states: Tier, lowering: Lowering) -> None:
    """A parameter that nobody reads has no gradient. Its chunk is not updated, but has to be in the other copy too."""
    blocks = [block("a", *[((32, 32), "float32", True)] * 2)]
    trace = chain_trace(blocks, [Layer("a", (2048,), 0, 1024, reads=(0,))])
    plain = roomy(trace, (Tier.HOST, Tier.HOST, states))
    plain = replace(plain, streaming=replace(plain.streaming, update_chunk=1024))
    plan = ahead(trace, plain)
    program = lowering(trace, plan)
    check(trace, MACHINE, plan, program)
    assert sum(a.verb is Verb.UPDATE and a.chunk == 1 for a in program.actions) == program.steps
    assert not any(a.verb is Verb.UPDATE and a.chunk == 1 for a in lowering(trace, plain).actions)
    for verb in (Verb.UPDATE, Verb.READ, Verb.WRITE) if states is Tier.DISK else (Verb.UPDATE,):
        gone = place_of(program, verb, "a", 0, 1)
        with pytest.raises(PlanInvalid, match=rf"chunk 1 of block a \(a.0\) has no {verb.value} in step 0"):
            check(trace, MACHINE, plan, drop(program, gone))


# Which copy.


def read_again() -> tuple[Trace, Plan]:
    """Two layers, the second of which has the only trained parameter behind a frozen one, which its backward reads when
    the gradient has landed. Each has a slot of its own on the device."""
    blocks = [
        block("a", ((32, 32), "float32", False)),
        block("b", ((32, 32), "float32", False), ((32, 32), "float32", True)),
    ]
    trace = chain_trace(blocks, [Layer("a", (2048,), 0, 1024), Layer("b", (2048, 2048), 0, 1024)])
    placements = tuple(Placement(name, Tier.DEVICE, Tier.HOST, Tier.HOST) for name in "ab")
    return trace, plan_for(trace, placements, Streaming(gradient_window=1 << 20), roomy=True)


def test_the_same_step_reads_the_old_copy_while_the_other_is_written() -> None:
    """The fetch behind the update does not wait for it. Without a second copy it would have to come before."""
    trace, plan = read_again()
    program = plain_program(trace, ahead(trace, plan), 2)
    update, end = place_of(program, Verb.UPDATE, "b", 0), ends_of_steps(program)[0]
    again = next(
        i for i, a in enumerate(program.actions[:end]) if i > update and a.verb is Verb.FETCH and a.block == "b"
    )
    assert not Order(program).before(update, again)
    check(trace, MACHINE, ahead(trace, plan), program)
    # In the order in which both are issued it reads the old copy as well.
    check(trace, MACHINE, ahead(trace, plan), with_after(program, again, *program.actions[again].after, update))
    with pytest.raises(
        PlanInvalid, match=rf"as action {again} copied it, and action {update} \(update b, step 0\) may"
    ):
        check(trace, MACHINE, plan, program)


def test_the_next_step_reads_what_the_update_has_made() -> None:
    """It waits for it."""
    trace, plan = read_again()
    two = ahead(trace, plan)
    program = plain_program(trace, two, 2)
    end, update = ends_of_steps(program)[0], place_of(program, Verb.UPDATE, "b", 0)
    fetch = next(i for i, a in enumerate(program.actions) if i > end and a.verb is Verb.FETCH and a.block == "b")
    assert update in program.actions[fetch].after
    less = with_after(program, fetch, *(a for a in program.actions[fetch].after if a != update))
    with pytest.raises(
        PlanInvalid, match=rf"as action {fetch} copied it, without action {update} \(update b, step 0\)"
    ):
        check(trace, MACHINE, two, less)


def test_what_is_issued_before_the_step_is_over_is_the_old_copy() -> None:
    """In the slot is what backward has fetched last, after the update, of the copy with which the step began."""
    trace, plan = read_again()
    two = ahead(trace, plan)
    program = plain_program(trace, two, 2)
    end, update = ends_of_steps(program)[0], place_of(program, Verb.UPDATE, "b", 0)
    fetches = [i for i, a in enumerate(program.actions) if a.verb is Verb.FETCH and a.block == "b"]
    again, following = fetches[-1 - sum(i > end for i in fetches)], next(i for i in fetches if i > end)
    assert update < again < end
    program = with_after(program, again, *program.actions[again].after, update)
    check(trace, MACHINE, two, program)
    stale = drop(program, following)
    words = rf"it reads block b as action {again} copied it, out of the copy that step 0 began with, and not that of"
    with pytest.raises(PlanInvalid, match=words) as caught:
        check(trace, MACHINE, two, stale)
    assert caught.value.subject == "b"
    assert stale.actions[caught.value.action].step == 1


def test_what_is_on_disk_is_read_from_the_copy_that_the_step_before_has_made() -> None:
    """The write of the step before may be done while backward goes on; the step is not over then. States and
    parameters for the update, and parameters for the first fetch."""
    plan = ahead(CHAIN, roomy(CHAIN, DISK), ("b2",))
    program = plain_program(CHAIN, plan, 2)
    check(CHAIN, MACHINE, plan, program)
    end = ends_of_steps(program)[0]
    write = max(i for i, a in enumerate(program.actions[:end]) if a.verb is Verb.WRITE)

    def refused(read: int, words: str, write: int) -> None:
        early = issued_earlier(program, read, write + 1)
        actions = list(early.actions)
        actions[write + 1] = replace(actions[write + 1], after=(*actions[write + 1].after, write))
        with pytest.raises(PlanInvalid, match=words) as caught:
            check(CHAIN, MACHINE, plan, replace(early, actions=tuple(actions)))
        assert caught.value.subject == "b2"

    states = place_of(program, Verb.WRITE, "b2", 0)
    assert states < write < end and program.actions[write].chunk == -1
    words = "it reads states of chunk 0 of block b2 out of the copy that step 0 began with"
    refused(place_of(program, Verb.READ, "b2", 1), words, states)
    update = place_of(program, Verb.UPDATE, "b2", 1)
    reads = [i for i, a in enumerate(program.actions) if a.verb is Verb.READ and a.block == "b2" and a.chunk == -1]
    words = "the parameters of block b2 live on disk and are not read before this update"
    refused(max(i for i in reads if i < update), words, write)
    words = rf"it reads block b2 as action {write + 1} copied it, out of the copy that step 0 began with"
    refused(min(i for i in reads if i > end), words, write)


def test_a_read_that_serves_nobody_needs_a_buffer_too() -> None:
    """One host slot: between a read and the fetch that copies from it nothing else may be read."""
    plan = roomy(CHAIN, (Tier.DISK, Tier.HOST, Tier.HOST))
    plan = plan_for(CHAIN, plan.placements, replace(plan.streaming, host_slots=(4096,)), roomy=True)
    program = plain_program(CHAIN, plan, 1)
    check(CHAIN, MACHINE, plan, program)
    read = next(i for i, a in enumerate(program.actions) if a.verb is Verb.READ)
    stray = replace(program.actions[read], block="b2", after=())
    for place, after, good in ((read + 1, (), False), (read + 2, (read + 1,), True), (read + 2, (), False)):
        shifted = [replace(a, after=tuple(x + (x >= place) for x in a.after)) for a in program.actions]
        found = (*shifted[:place], replace(stray, after=after), *shifted[place:])
        # Who reads next waits for it on its lane.
        wrong = replace(program, actions=found)
        if good:
            check(CHAIN, MACHINE, plan, wrong)
        else:
            with pytest.raises(PlanInvalid, match="it needs one of 1 host slots of 4096 bytes, and action") as caught:
                check(CHAIN, MACHINE, plan, wrong)
            assert (caught.value.action, caught.value.subject) == (place, "b2")


def test_the_buffer_of_an_update_is_taken_until_it_is_written() -> None:
    """One host slot: what the update has changed is in it, and not yet on disk."""
    plan = roomy(CHAIN, (Tier.DISK, Tier.HOST, Tier.HOST))
    plan = plan_for(CHAIN, plan.placements, replace(plan.streaming, host_slots=(4096,)), roomy=True)
    program = plain_program(CHAIN, plan, 1)
    check(CHAIN, MACHINE, plan, program)
    write = next(i for i, a in enumerate(program.actions) if a.verb is Verb.WRITE and a.block != "b2")
    stray = next(a for a in program.actions if a.verb is Verb.READ and a.block == "b2")
    # Behind the update that is written, or behind the write.
    for place, after in ((write, max(program.actions[write].after)), (write + 1, write)):
        shifted = [replace(a, after=tuple(x + (x >= place) for x in a.after)) for a in program.actions]
        actions = (*shifted[:place], replace(stray, after=(after,)), *shifted[place:])
        if after == write:
            check(CHAIN, MACHINE, plan, replace(program, actions=actions))
        else:
            with pytest.raises(PlanInvalid, match=f"host slots of 4096 bytes, and action {write + 1} may") as caught:
                check(CHAIN, MACHINE, plan, replace(program, actions=actions))
            assert (caught.value.action, caught.value.subject) == (place, "b2")


def test_a_gradient_says_of_which_step_it_is() -> None:
    """The next one of the same step may not land before the update has read the last one: so a step is no mere word."""
    plan = roomy(CHAIN)
    program = plain_program(CHAIN, plan, 2)
    for index, action in enumerate(program.actions):
        if action.verb is Verb.LAND:
            actions: list[Action] = list(program.actions)
            actions[index] = replace(action, step=1 - action.step)
            text = f"the gradient of {action.parameter} in pass {action.step} is not one of step {1 - action.step}"
            with pytest.raises(PlanInvalid, match=text) as caught:
                check(CHAIN, MACHINE, plan, replace(program, actions=tuple(actions)))
            assert (caught.value.action, caught.value.subject) == (index, action.parameter)
