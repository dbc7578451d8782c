"""Updates by a process beside the storage: the numbers are those of an update on the host, and so is what is done."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import forebay
from forebay.arenas import arenas_of
from forebay.calls import Calls
from forebay.device.delays import RandomDelays
from forebay.lowering import lower
from forebay.memory import Kind, Tier
from forebay.optim.rules import AdamRule, LionRule, SgdRule, UpdateRule
from forebay.plans import Plan, Update
from forebay.runtime.blocks import find_blocks
from forebay.runtime.hooks import session_of
from forebay.states import Masters
from forebay.timeline import Lane
from tests.null.updating import at_home, updating
from tests.parity.models import CASES, Case
from tests.parity.observed import LANES, by_lane, observed
from tests.parity.speculating import AMPLE, MIXED, Run, speculating
from tests.parity.test_delays import STATES
from tests.parity.test_lowering_device_updates import plan_for
from tests.parity.test_lowering_order import traced
from tests.parity.test_speculation import ACTIONS, LOOP, assert_same, run_all


def at_storage(case: Case, dtype: torch.dtype, plan: Plan, density: float | None = None) -> Plan:
    """``plan`` in which all blocks with states on disk are updated there, with this share of gradients (None: with
    gradients as they are), and the others as they were."""
    model = find_blocks(case.model(dtype)).model
    on_disk = [p.block for p in plan.placements if p.states is Tier.DISK]
    plan = replace(plan, streaming=replace(plan.streaming, masters=Masters.WHOLE))
    plan = updating(plan, Update.STORAGE, [name for name in on_disk if model.block(name).gradient_nbytes])
    changes = () if density is None else ("gradients go in part",)
    plan = replace(plan, streaming=replace(plan.streaming, gradient_density=density), changes_numbers=changes)
    sizes = arenas_of(model, plan, STATES)
    return replace(plan, host=sizes.host, disk=sizes.disk)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("density", [None, 1.0])
def test_whatever_a_loop_does(density: float | None, tmp_path: Path) -> None:
    """Everything that a loop may do, once, between steps: against updates on the host, whose numbers are those of plain
    PyTorch. Two folders in stripes; some blocks beside the storage, some ahead of their step; every job late by
    chance. Where the largest elements go and those are all, the numbers are the same."""
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
    dtype = torch.bfloat16
    plan = at_storage(MIXED, dtype, speculating(MIXED, dtype, disk=True), density)
    plan = replace(plan, streaming=replace(plan.streaming, disk_reads=Calls(8192, 2), disk_writes=Calls(8192, 2)))
    assert plan.updated(Update.STORAGE) and plan.updated(Update.AHEAD)
    # What goes as a sum of two numbers has one NaN for all: of those behind an infinite loss the bits are others.
    between = [action for action in ACTIONS if density is None or action != "infinite"]
    actions = [*LOOP, *(one for action in between for one in ("backward", action, "step", "zero")), *LOOP]
    whole = at_home(plan, host=AMPLE, streaming=replace(plan.streaming, gradient_density=None))
    expected = run_all(Run(MIXED, dtype, whole, f"{tmp_path}/a:64MiB", None), actions)
    folders = f"{tmp_path}/b:{plan.disk - 8192},{tmp_path}/c:64MiB"
    there = Run(MIXED, dtype, plan, folders, RandomDelays(1, max_seconds=0.001))
    assert_same([_without_residuals(seen) for seen in run_all(there, actions)], expected, actions)


def test_what_is_looked_at_waits_until_no_other_is_updated(tmp_path: Path) -> None:
    """States are looked at in memory through which updates of other blocks pass: who reads a master, or states, right
    behind a step waits for all of these, however late they are."""
    case, dtype = CASES["llama"], torch.float32
    plan = at_storage(case, dtype, at_home(plan_for("llama", "disk")))
    run = Run(case, dtype, plan, f"{tmp_path}:64MiB", RandomDelays(1, max_seconds=0.01))
    attachment = session_of(run.model)
    assert attachment is not None
    session = attachment.session
    there = [session.store.blocks[name] for name in plan.updated(Update.STORAGE)]
    name = next(iter(there[0].steps))
    looks = (lambda: forebay.parameters(run.model)[name], lambda: session.read_states(name))
    for step, look in enumerate(looks):
        run.backward(step)
        run.optimizer.step()
        for state in there:
            state.queue_deferred()
        assert sum(state.current.states.written is not None for state in there) > 1  # they are under way
        look()
        assert all(state.current.states.written is None for state in there)
        run.optimizer.zero_grad()
    run.close()


def _without_residuals(seen: Any) -> Any:
    """What a loop has seen, without what plain PyTorch does not have."""
    if not isinstance(seen, dict):
        return seen
    return {name: value for name, value in seen.items() if not name.startswith("residual")}


@pytest.mark.thinned(2)
@pytest.mark.parametrize("density", [None, 0.1])
def test_the_program_is_what_the_runtime_does(density: float | None, tmp_path: Path) -> None:
    """The same jobs on every lane, in the same order, of as many bytes, within the bytes of the plan."""
    case, steps = CASES["llama"], 3
    plan = at_storage(case, torch.float32, at_home(plan_for("llama", "disk")), density)
    program = lower(traced("llama"), plan, steps=steps, micro_batches=2)
    lanes = (*LANES, Lane.STORAGE_UPDATE)
    made = {lane: [a.what for a in program.actions if a.lane is lane] for lane in lanes}
    found = observed(case, plan, 2, f"{tmp_path}:64MiB", steps=steps, between=False)
    assert made == by_lane(found.timeline.events, lanes)
    assert made[Lane.STORAGE_UPDATE] and not made[Lane.UPDATE]
    peak = found.timeline.peaks
    assert peak[Tier.HOST] <= plan.host and peak[Tier.DISK] == plan.disk
    assert (Kind.STATE in program.standing[Tier.HOST]) == (density is not None)
    there = (Lane.DISK_WRITE, Lane.DISK_READ)
    written = {lane: [a.nbytes for a in program.actions if a.lane is lane] for lane in there}
    events = found.timeline.events
    assert written == {lane: [e.nbytes for e in events if e.lane is lane] for lane in there}


@pytest.mark.slow
@pytest.mark.parametrize("moments", ["8bit", "bfloat16"])
def test_moments_of_few_bits(moments: str, tmp_path: Path) -> None:
    """What rounds by chance rounds there as it does here."""
    left = []
    for beside in (False, True):
        model = MIXED.model(torch.float32)
        optimizer = forebay.optim.AdamW(model.parameters(), lr=1e-2, moments=moments)  # type: ignore[arg-type]
        states = optimizer.rule.state_names
        plan = at_home(speculating(MIXED, torch.float32, disk=True, states=states))
        plan = replace(plan, placements=tuple(replace(p, states=Tier.DISK) for p in plan.placements))
        bound = find_blocks(model).model
        names = tuple(b.name for b in bound.blocks if b.gradient_nbytes) if beside else ()
        plan = updating(plan, Update.STORAGE, names)
        sizes = arenas_of(bound, plan, states)
        plan = replace(plan, host=sizes.host, disk=sizes.disk)
        model, made = forebay.prepare(
            model, optimizer, plan=plan, device_memory=AMPLE, disk=f"{tmp_path}:64MiB", device="cpu"
        )
        for step in range(3):
            model(**MIXED.inputs(step, torch.float32))["loss"].backward()
            made.step()
            made.zero_grad()
        left.append({name: value.clone() for name, value in forebay.parameters(model).items()})
        forebay.close(model)
    assert all(torch.equal(left[0][name], left[1][name]) for name in left[0])


RULES: list[UpdateRule] = [
    AdamRule(decoupled=True, amsgrad=False),
    AdamRule(decoupled=False, amsgrad=True),
    AdamRule(decoupled=True, amsgrad=False, moments="4bit"),
    SgdRule(momentum=True),
    SgdRule(momentum=False),
    LionRule(),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_a_rule_crosses_to_another_process(rule: UpdateRule) -> None:
    other = pickle.loads(pickle.dumps(rule))
    assert type(other) is type(rule) and other.state_names == rule.state_names
    assert {k: v for k, v in vars(other).items() if k != "_kernel"} == {
        k: v for k, v in vars(rule).items() if k != "_kernel"
    }
