"""The checker, and the lowering that it judges, on blocks that stay on the device and are updated in backward: all of
their gradients are there by then, are let go, and nothing reads the block behind that."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forebay.arenas import arenas_of
from forebay.checking import check
from forebay.checking.fitting import staying_gradients
from forebay.errors import ConfigError, DoesNotFit, PlanInvalid
from forebay.lowering import lower
from forebay.lowering.liveness import device_bound
from forebay.memory import Kind, Tier
from forebay.model import Model
from forebay.plans import Placement, Plan, Update, used_up
from forebay.program import Program, Verb
from forebay.timeline import Lane
from forebay.trace import Phase, Trace
from tests.null.ahead import ends_of_steps
from tests.null.passing import passing, read_late, run_late
from tests.null.strategies import RESIDENT, roomy, roomy_machine
from tests.null.synthetic import block
from tests.null.tracing import Layer, TraceBuilder, chain_trace
from tests.null.updating import at_home

MACHINE = roomy_machine()
N, WIDTH = 4, 4096
BLOCKS = [block(f"b{i}", ((32, 32), "float32", True)) for i in range(N)]  # 4096 bytes each
CHAIN = chain_trace(BLOCKS, [Layer(b.name, (2048,), 0, 1024) for b in BLOCKS])


def staying(trace: Trace, names: list[str] | None = None) -> Plan:
    """All of ``trace`` on the device, and ``names`` (None: all that may be) updated in backward."""
    return passing(trace, roomy(trace, RESIDENT), names=names)


def updates(program: Program, step: int = 0) -> dict[str, int]:
    return {a.block: i for i, a in enumerate(program.actions) if a.verb is Verb.UPDATE and a.step == step}


def moved(program: Program, index: int, to: int) -> Program:
    """Action ``index`` is issued as the one at ``to``, when those that it came after are on their way."""
    actions = list(program.actions)
    action = actions.pop(index)
    actions.insert(to, action)
    places = {index: to} | {i: i + 1 for i in range(to, index)} | {i: i - 1 for i in range(index + 1, to + 1)}
    renamed = [
        replace(a, after=tuple(sorted({j for j in (places.get(k, k) for k in a.after) if j < i})))
        for i, a in enumerate(actions)
    ]
    return replace(program, actions=tuple(renamed))


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_each_is_updated_behind_its_last_gradient(device: str) -> None:
    """In the compute order, the last block first, and all but the first before backward is over."""
    trace = replace(CHAIN, device=device)
    plan = staying(trace)
    assert used_up(plan.placements, resident=True) == ("b0", "b1", "b2", "b3")
    program = lower(trace, plan, steps=3)
    check(trace, roomy_machine(device), plan, program)
    for step, end in enumerate(ends_of_steps(program)):
        found = updates(program, step)
        assert list(found) == ["b3", "b2", "b1", "b0"]
        assert found["b1"] < end < found["b0"]
        assert all(program.actions[i].lane is Lane.COMPUTE for i in found.values())


def test_the_device_holds_the_gradients_of_one() -> None:
    """Four blocks' parameters and two states of each; the gradients of all are no arena's any more, and what is beside
    the arenas has the one that the block was given its update for."""
    plan, other = staying(CHAIN), roomy(CHAIN, RESIDENT)
    sizes = arenas_of(CHAIN.model, plan, CHAIN.state_names)
    assert sizes.device == N * 3 * WIDTH and sizes.device_gradients == 0 == staying_gradients(CHAIN, plan)
    assert arenas_of(CHAIN.model, other, CHAIN.state_names).device_gradients == N * WIDTH
    less = device_bound(CHAIN, other) - plan.device
    assert (N - 1) * WIDTH <= less <= N * WIDTH
    program = lower(CHAIN, plan)
    level = most = 0
    for action in program.actions:
        level += sum(c.nbytes for c in action.changes if c.kind is Kind.GRADIENT)
        most = max(most, level)
    assert level == 0 and most == WIDTH


def test_a_promise_that_is_a_byte_short() -> None:
    plan = staying(CHAIN)
    tight = replace(plan, budget=replace(plan.budget, device=plan.device))
    check(CHAIN, replace(MACHINE, device_capacity=plan.device), tight)
    with pytest.raises(PlanInvalid, match=f"device peak of {plan.device - 1} bytes"):
        check(CHAIN, MACHINE, replace(plan, device=plan.device - 1))
    with pytest.raises(DoesNotFit, match="device memory"):
        check(CHAIN, MACHINE, replace(tight, budget=replace(plan.budget, device=plan.device - 1)))


def test_an_update_before_its_gradient() -> None:
    plan = staying(CHAIN)
    program = lower(CHAIN, plan)
    for name, words in (("b0", r"the gradient of b0\.0 is not there"), ("b2", r"before op \d+ .*, which reads it")):
        at = updates(program)[name]
        before = max(i for i, a in enumerate(program.actions[:at]) if a.verb is Verb.COMPUTE)
        with pytest.raises(PlanInvalid, match=f"block {name} is updated in backward.*{words}"):
            check(CHAIN, MACHINE, plan, moved(program, at, before))


def test_an_update_that_is_missing_or_comes_twice() -> None:
    plan = staying(CHAIN)
    program = lower(CHAIN, plan)
    at = updates(program)["b1"]
    twice = replace(program, actions=(*program.actions[: at + 1], *program.actions[at:]))
    with pytest.raises(PlanInvalid, match=r"the gradient of b1\.0 is not there"):
        check(CHAIN, MACHINE, plan, twice)
    other = staying(CHAIN, ["b0", "b2", "b3"])
    with pytest.raises(PlanInvalid, match="b1"):  # it is made when its step asks, and the plan says in backward
        check(CHAIN, MACHINE, other, program)


def test_an_update_of_another_step() -> None:
    plan = staying(CHAIN)
    program = lower(CHAIN, plan)
    at = updates(program)["b2"]
    actions = list(program.actions)
    actions[at] = replace(actions[at], step=1)
    with pytest.raises(PlanInvalid, match="it says step 1 in pass 0"):
        check(CHAIN, MACHINE, plan, replace(program, actions=tuple(actions)))


def test_gradients_that_an_update_does_not_free() -> None:
    """The program has to say itself that they are gone, or it says that the device holds more than was promised."""
    plan = staying(CHAIN)
    program = lower(CHAIN, plan)
    kept = [replace(a, changes=()) if a.verb is Verb.UPDATE else a for a in program.actions]
    tight = replace(plan, budget=replace(plan.budget, device=plan.device))
    with pytest.raises(DoesNotFit, match="device memory"):
        check(CHAIN, MACHINE, tight, replace(program, actions=tuple(kept)))


def test_a_block_that_backward_reads_again_after_its_update() -> None:
    """Here by a plan that nobody made: ``Usable`` leaves it out."""
    trace = read_late()
    assert used_up(staying(trace).placements, resident=True) == ("b",)
    with pytest.raises(PlanInvalid, match=r"block a is updated in backward before op \d+ .*, which reads it"):
        check(trace, MACHINE, staying(trace, ["a"]))


def test_a_block_that_runs_again_after_its_update() -> None:
    """Even where no other op reads it behind that: a recomputation would be that of the next step. ``Usable`` leaves it
    out, since nobody knows yet what will be recomputed; here by plans that nobody made."""
    trace = run_late()
    assert used_up(staying(trace).placements, resident=True) == ("b",)
    plan = staying(trace, ["a"])
    check(trace, MACHINE, plan)
    plan = replace(plan, recompute=("a",))
    plan = replace(plan, device=device_bound(trace, plan))
    with pytest.raises(PlanInvalid, match=r"op 0 \(linear of block a\) runs again and reads block a, which is updated"):
        check(trace, MACHINE, plan)


def test_a_recomputation_that_is_asked_for_too_late() -> None:
    """Behind the backward of its block, which finds nothing to read."""
    plan = replace(staying(CHAIN, ["b3"]), recompute=("b3",))
    plan = replace(plan, device=device_bound(CHAIN, plan))
    program = lower(CHAIN, plan)
    check(CHAIN, MACHINE, plan, program)
    again = next(i for i, a in enumerate(program.actions) if a.recomputed)
    late = moved(program, again, updates(program)["b3"])
    with pytest.raises(PlanInvalid, match=r"not in memory; block b3 has to be recomputed before"):
        check(CHAIN, MACHINE, plan, late)


def test_gradients_in_one_memory_go_together() -> None:
    """Blocks whose gradients are views of the same bytes keep theirs until the step."""
    trace = of_one_memory()
    assert used_up(staying(trace).placements, resident=True) == ()
    with pytest.raises(PlanInvalid, match=r"uses up the gradients of block a .* that of b\.0 lies in the same memory"):
        check(trace, MACHINE, staying(trace, ["a"]))


def of_one_memory() -> Trace:
    """Two blocks that one op reads, and of which one op makes the gradients, next to each other."""
    model = Model((block("a", ((32, 32), "float32", True)), block("b", ((32, 32), "float32", True))))
    b = TraceBuilder(model, {"input_ids": 256})
    one, other = (b.ids[name] for name in ("a.0", "b.0"))
    v = b.begin("a", Phase.FORWARD)
    out = v.make("linear", [b.ids["input_ids"], one, other], 2048, saved=True)
    v.save()
    v.pack(out)
    v.drop(out)
    b.end(v)
    v = b.begin("a", Phase.BACKWARD)
    both = v.make("wgrad", [out], 2 * WIDTH, Kind.GRADIENT)
    v.unsave(out)
    for parameter in (one, other):
        v.complete(parameter, v.make("split", [both], WIDTH, Kind.GRADIENT, view_of=both))
    b.end(v)
    return b.trace()


def test_several_backward_passes_a_step_are_refused() -> None:
    plan = staying(CHAIN)
    with pytest.raises(ConfigError, match="one backward a step, got 2"):
        lower(CHAIN, plan, micro_batches=2)
    program = lower(CHAIN, at_home(plan), micro_batches=2)
    with pytest.raises(PlanInvalid, match="2 passes a step"):
        check(CHAIN, MACHINE, plan, program)


def test_nothing_else_is_done_with_what_stays() -> None:
    for how in (Update.AHEAD, Update.DEVICE, Update.STORAGE):
        with pytest.raises(ConfigError, match=f"set its update to step or backward, got {how.value}"):
            Placement("b0", *RESIDENT, how)
    assert Placement("b0", *RESIDENT, Update.BACKWARD).resident
    assert RESIDENT == (Tier.DEVICE,) * 3


def test_it_needs_no_slots_and_comes_back_from_json() -> None:
    plan = staying(CHAIN)
    assert not plan.streaming.gradient_slots and plan.host == 0
    assert Plan.from_json(plan.to_json()) == plan
