"""The checker on programs made by hand: closed forms of what is needed, and who is named when it is not there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forebay.arenas import DISK_BLOCK, UPDATE_RING
from forebay.budgets import Budget, DiskBudget
from forebay.checking import check
from forebay.errors import DoesNotFit, PlanInvalid
from forebay.machine import Machine
from forebay.memory import Kind, Tier
from forebay.plans import Placement, Plan, Streaming
from forebay.program import Action, Program, Use, Verb
from forebay.timeline import Lane
from forebay.trace import Trace
from tests.null.programs import device_standing, plain_program
from tests.null.strategies import HOMES, plan_for, roomy, roomy_machine
from tests.null.synthetic import block
from tests.null.tracing import Layer, chain_trace

MACHINE = roomy_machine()
BLOCKS = [block(f"b{i}", ((32, 32), "float32", True)) for i in range(3)]  # 4096 bytes each
CHAIN = chain_trace(BLOCKS, [Layer(b.name, (2048,), 0, 1024) for b in BLOCKS])
HOSTED = (Tier.HOST, Tier.HOST, Tier.HOST)
RESIDENT = (Tier.DEVICE, Tier.DEVICE, Tier.DEVICE)


def one_layer(dtype: str = "float32") -> Trace:
    """One layer of 1,024 elements that saves 2,048 bytes and makes 1,024; input 256 bytes."""
    return chain_trace([block("a", ((32, 32), dtype, True))], [Layer("a", (2048,), 0, 1024)])


def by_hand(trace: Trace, plan: Plan) -> Program:
    """One step of ``one_layer``, streamed, with all that it needs and not one dependency more."""
    ops = [op for _, _, op in trace.ops()]
    half = next(i for i, (_, v, _) in enumerate(trace.ops()) if v.phase == "backward" and v.block == "a")
    claim = 1 << 20

    def act(lane: Lane, verb: Verb, what: str, after: tuple[int, ...], **more: object) -> Action:
        return Action(lane, verb, what, 0, after=after, **more)  # type: ignore[arg-type]

    actions = (
        act(Lane.H2D, Verb.FETCH, "fetch a", (), block="a", slot=0, nbytes=4096),
        act(Lane.COMPUTE, Verb.COMPUTE, "forward a", (0,), ops=(0, half), uses=(Use("a", 0),), peak=claim),
        act(Lane.COMPUTE, Verb.COMPUTE, "backward a", (), ops=(half, len(ops)), uses=(Use("a", 0),), peak=claim),
        act(Lane.D2H, Verb.LAND, "gradient a.0", (2,), block="a", parameter="a.0", nbytes=4096),
        act(Lane.UPDATE, Verb.UPDATE, "update a", (3,), block="a", chunk=0),
    )
    stands = {Tier.DEVICE: {Kind.PARAMETER: device_standing(trace, plan)}, Tier.HOST: {Kind.STATE: plan.host}}
    return Program(actions, plan.streaming.slots, stands, 1, 1)


def without(program: Program, index: int, dependency: int) -> Program:
    """``program`` whose action ``index`` does not wait for ``dependency``."""
    actions = list(program.actions)
    after = tuple(a for a in actions[index].after if a != dependency)
    actions[index] = replace(actions[index], after=after)
    return replace(program, actions=tuple(actions))


def test_a_program_made_by_hand_is_accepted() -> None:
    trace = one_layer()
    check(trace, MACHINE, roomy(trace, slots=1), by_hand(trace, roomy(trace, slots=1)))


@pytest.mark.parametrize(
    ("index", "dependency", "subject", "words"),
    [
        (1, 0, "a", r"action 1 \(forward a\): it reads block a from slot 0, which holds nothing by then"),
        (3, 2, "a.0", r"action 3 \(gradient a.0\): the gradient of a.0 may not be complete when it starts"),
        (4, 3, "a.0", r"action 4 \(update a\): the gradient of a.0 lands in action 3, which may not be done"),
    ],
)
def test_a_missing_dependency_is_named(index: int, dependency: int, subject: str, words: str) -> None:
    trace = one_layer()
    plan = roomy(trace, slots=1)
    spoiled = without(by_hand(trace, plan), index, dependency)
    if index > 1:  # else the update does not even wait for the forward that reads what it changes
        actions = list(spoiled.actions)
        actions[4] = replace(actions[4], after=(2,) if index == 4 else (2, 3))
        spoiled = replace(spoiled, actions=tuple(actions))
    with pytest.raises(PlanInvalid, match=words) as caught:
        check(trace, MACHINE, plan, spoiled)
    assert (caught.value.action, caught.value.subject) == (index, subject)


def test_an_update_may_not_overtake_the_copy_that_it_would_change() -> None:
    """The fetch reads the home that the update writes: without an order compute may see half of each."""
    trace = one_layer()
    plan = roomy(trace, slots=1)
    program = without(by_hand(trace, plan), 4, 3)
    with pytest.raises(PlanInvalid, match=r"reads block a as action 0 copied it, and action 4 \(update a, step 0\)"):
        check(trace, MACHINE, plan, program)


def test_a_dependency_on_a_later_action_is_refused() -> None:
    trace = one_layer()
    plan = roomy(trace, slots=1)
    program = by_hand(trace, plan)
    actions = (replace(program.actions[0], after=(3,)), *program.actions[1:])
    with pytest.raises(PlanInvalid, match="waits for action 3, which is not before it"):
        check(trace, MACHINE, plan, replace(program, actions=actions))


def test_an_op_without_its_block_is_named_with_its_parameter() -> None:
    trace = one_layer()
    plan = roomy(trace, slots=1)
    program = by_hand(trace, plan)
    actions = (program.actions[0], replace(program.actions[1], uses=()), *program.actions[2:])
    with pytest.raises(PlanInvalid, match=r"op 0 \(linear\) reads parameter a.0, .* block a") as caught:
        check(trace, MACHINE, plan, replace(program, actions=actions))
    assert (caught.value.action, caught.value.subject) == (1, "a.0")


# Device bytes.


def needed(trace: Trace) -> tuple[int, Plan, Program]:
    """The device bytes of a hosted ``one_layer`` with one slot, and a plan under exactly that budget.

    Slot 4096, input 256. The most is at ``wgrad``: x is an input, the gradient of what was saved 2048, what was saved
    2048, the gradient itself 4096; out (1024), its gradient and softmax are gone.
    """
    most = 4096 + 256 + (2048 + 2048 + 4096)
    plan = roomy(trace, slots=1)
    plan = replace(plan, device=most, budget=replace(plan.budget, device=most))
    program = by_hand(trace, plan)
    claims = tuple(replace(a, peak=most - 4352) if a.verb is Verb.COMPUTE else a for a in program.actions)
    return most, plan, replace(program, actions=claims)


def test_the_exact_bytes_are_enough_and_one_less_is_not() -> None:
    trace = one_layer()
    most, plan, program = needed(trace)
    check(trace, MACHINE, plan, program)
    short = replace(plan, device=most - 1, budget=replace(plan.budget, device=most - 1))
    with pytest.raises(DoesNotFit, match=r"op \d+ \(wgrad of block a\) in action 2 \(backward a\) needs") as caught:
        check(trace, MACHINE, short, program)
    assert (caught.value.tier, caught.value.needed, caught.value.allowed) == ("device", most, most - 1)
    assert "the largest tensor is tensor" in str(caught.value)
    small = replace(MACHINE, device_capacity=most - 1)
    with pytest.raises(DoesNotFit, match="device memory"):
        check(trace, small, plan, program)


def test_a_program_that_says_too_little_of_itself_is_refused() -> None:
    trace = one_layer()
    most, plan, program = needed(trace)
    actions = [replace(a, peak=a.peak - 1) if i == 2 else a for i, a in enumerate(program.actions)]
    with pytest.raises(PlanInvalid, match=f"holds {most - 1} bytes while it runs, and {most} may be there"):
        check(trace, MACHINE, plan, replace(program, actions=tuple(actions)))


def test_a_gradient_is_there_until_its_landing_is_certain() -> None:
    """Backward in two actions: the gradient of the last block may still be there in the second, unless that waits."""
    blocks = [block("a", ((8,), "float32", True)), block("b", ((64, 64), "float32", True))]
    trace = chain_trace(blocks, [Layer("a", (64,), 0, 64), Layer("b", (64,), 0, 64)])
    plan = roomy(trace, slots=2)
    program = plain_program(trace, plan, steps=1)
    landing = next(i for i, a in enumerate(program.actions) if a.parameter == "b.0")
    waits = next(i for i, a in enumerate(program.actions) if landing in a.after and a.verb is Verb.COMPUTE)
    # Without the wait 64 * 64 * 4 bytes more; the claim says what is needed with it and is then too small.
    most = 64 * 64 * 4
    actions = [replace(a, peak=most - 1) if i == waits else a for i, a in enumerate(program.actions)]
    tight = replace(program, actions=tuple(actions))
    check(trace, MACHINE, plan, tight)
    with pytest.raises(PlanInvalid, match="may be there") as caught:
        check(trace, MACHINE, plan, without(tight, waits, landing))
    assert caught.value.action == waits


def test_a_gradient_is_there_until_the_action_that_makes_it_is_over() -> None:
    """Backward in one action: at its last op both gradients of the block are there, 4096 bytes each, with the gradient
    of what it saved and that itself, 2048 each. In the slot are both parameters; the input has 256 bytes."""
    trace = chain_trace([block("a", *[((32, 32), "float32", True)] * 2)], [Layer("a", (2048,), 0, 1024)])
    plan = roomy(trace, slots=1)
    program = by_hand(trace, plan)
    fetch, forward, backward, first, update = program.actions
    second = replace(first, what="gradient a.1", parameter="a.1")
    moves = replace(fetch, nbytes=2 * 4096), forward, backward, first, second
    program = replace(program, actions=(*moves, replace(update, after=(3, 4))))
    check(trace, MACHINE, plan, program)
    most = 2 * 4096 + 256 + 2 * 4096 + 2 * 2048
    short = replace(plan, device=most - 1, budget=replace(plan.budget, device=most - 1))
    with pytest.raises(DoesNotFit, match="wgrad of block a") as caught:
        check(trace, MACHINE, short, program)
    assert caught.value.needed == most


def test_outputs_of_the_pass_before_are_there_until_forward_is_over() -> None:
    """Of two passes the second has them beside it, where forward takes the most: 640 bytes more; backward has none."""
    for temporary, more in ((1 << 16, 640), (0, 0)):
        layers = [Layer(b.name, (2048,), temporary, 1024) for b in BLOCKS]
        found = []
        for held in (0, 640):
            trace = chain_trace(BLOCKS, layers, held_nbytes=held)
            plan = plan_for(trace, tuple(Placement(b.name, *RESIDENT) for b in BLOCKS), Streaming(), roomy=True)
            stands = device_standing(trace, plan, gradients=True)
            small = replace(plan, device=stands, budget=Budget(stands))
            with pytest.raises(DoesNotFit, match="are tensors of the step") as caught:
                check(trace, MACHINE, small, micro_batches=2)
            found.append(caught.value.needed)
        assert found[1] - found[0] == more


def test_a_program_has_the_passes_and_steps_that_it_says() -> None:
    plan = roomy(CHAIN)
    program = plain_program(CHAIN, plan, 2, 1)
    check(CHAIN, MACHINE, plan, program)
    actions = list(program.actions)
    last = max(i for i, a in enumerate(actions) if a.verb is Verb.COMPUTE and a.ops[0] == 0)
    wrong = [replace(a, step=0) if i == last else a for i, a in enumerate(actions)]
    with pytest.raises(PlanInvalid, match="it says step 0 in pass 1 of the program") as caught:
        check(CHAIN, MACHINE, plan, replace(program, actions=tuple(wrong)))
    assert caught.value.action == last
    with pytest.raises(PlanInvalid, match="it computes after the last pass of the last step") as caught:
        check(CHAIN, MACHINE, plan, replace(program, actions=(*actions, replace(actions[last], after=()))))
    assert caught.value.action == len(actions)


def test_recomputation_spares_what_only_the_block_saves() -> None:
    """Two blocks that save 64 KiB each: at the loss, one of them recomputed, 64 KiB less are there."""
    kib64 = 64 * 1024
    blocks = [block(n, ((8,), "float32", True)) for n in "ab"]
    trace = chain_trace(blocks, [Layer(n, (kib64,), 0, 512) for n in "ab"])
    most = {}
    for recompute in ((), ("a",), ("b",)):
        plan = plan_for(trace, tuple(Placement(n, *RESIDENT) for n in "ab"), Streaming(), recompute, roomy=True)
        program = plain_program(trace, plan)
        stands = device_standing(trace, plan, gradients=True)
        small = replace(plan, device=stands, budget=Budget(stands))
        with pytest.raises(DoesNotFit) as caught:
            check(trace, MACHINE, small, program)
        most[recompute] = caught.value.needed
    # Backward of b: what a and b saved and the gradient of the latter. Recomputing a leaves the first out; recomputing
    # b, which comes back before, leaves out nothing.
    assert most[()] - most["a",] == kib64
    assert most["b",] >= most[()]


# What stands.


def test_host_bytes_have_a_closed_form() -> None:
    """Streamed from the host, fp32, Adam: parameters, gradients and two states of 1,024 elements each, per block; one
    gradient of staging."""
    plan = roomy(CHAIN)
    host = 3 * (4096 + 4096 + 2 * 4096) + 4096
    fitting = replace(plan, host=host, budget=replace(plan.budget, host=host))
    check(CHAIN, MACHINE, fitting, plain_program(CHAIN, plan))
    short = replace(fitting, budget=replace(fitting.budget, host=host - 1))
    for machine, tight in ((replace(MACHINE, host_capacity=host - 1), fitting), (MACHINE, short)):
        with pytest.raises(DoesNotFit, match="host memory") as caught:
            check(CHAIN, machine, tight)
        assert (caught.value.tier, caught.value.needed, caught.value.allowed) == ("host", host, host - 1)
    with pytest.raises(PlanInvalid, match=f"host peak of {host - 1} bytes"):
        check(CHAIN, MACHINE, replace(plan, host=host - 1))


def test_disk_bytes_have_a_closed_form() -> None:
    """On disk: parameters in whole pages, two states in one chunk. On the host: gradients, two host slots, three
    chunks of the ring, a gradient of staging and the bounce buffer."""
    plan = roomy(CHAIN, (Tier.DISK, Tier.HOST, Tier.DISK))
    disk, host = 3 * (4096 + 2 * 4096), 3 * 4096 + 2 * 4096 + UPDATE_RING * 2 * 4096 + 4096 + DISK_BLOCK
    exact = replace(plan, host=host, disk=disk, budget=replace(plan.budget, host=host, disk=DiskBudget("folder", disk)))
    check(CHAIN, MACHINE, exact, plain_program(CHAIN, plan))
    short = replace(exact, budget=replace(exact.budget, disk=DiskBudget("folder", disk - 1)))
    with pytest.raises(DoesNotFit, match="disk memory: the plan needs") as caught:
        check(CHAIN, MACHINE, short)
    assert (caught.value.tier, caught.value.needed, caught.value.allowed) == ("disk", disk, disk - 1)


@pytest.mark.parametrize("machine", [roomy_machine(disk=False), MACHINE])
def test_a_disk_that_is_not_there_is_said(machine: Machine) -> None:
    plan = roomy(CHAIN, (Tier.HOST, Tier.HOST, Tier.DISK))
    if machine.disk is not None:
        plan = replace(plan, budget=replace(plan.budget, disk=None))
    with pytest.raises(DoesNotFit, match=r"has none|names none") as caught:
        check(CHAIN, machine, plan)
    assert caught.value.tier == "disk"


def test_more_pinned_than_allowed_is_refused() -> None:
    plan = roomy(CHAIN)
    short = replace(plan, budget=replace(plan.budget, pinned=plan.pinned - 1))
    for machine, tight in ((replace(MACHINE, pinned_capacity=plan.pinned - 1), plan), (MACHINE, short)):
        with pytest.raises(DoesNotFit) as caught:
            check(CHAIN, machine, tight)
        assert (caught.value.tier, caught.value.needed) == ("pinned", plan.pinned)


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_placement_is_accepted(home: tuple[Tier, Tier, Tier], micro_batches: int, device: str) -> None:
    trace = replace(CHAIN, device=device)
    plan = roomy(trace, home)
    check(trace, roomy_machine(device), plan, plain_program(trace, plan, 3, micro_batches))
    check(trace, roomy_machine(device), plan, micro_batches=micro_batches)
