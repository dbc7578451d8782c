"""The program of updates on the device is what the runtime does: the same jobs on every lane, in the same order."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from forebay.budgets import DiskBudget
from forebay.layout import PAGE, align
from forebay.lowering import lower
from forebay.machine import Machine
from forebay.memory import Kind, Tier
from forebay.phases import phases
from forebay.plans import Plan, Update
from forebay.program import Program, Verb
from forebay.runtime.blocks import find_blocks
from forebay.simulation import simulate
from forebay.timeline import Lane
from tests.null.planning import machine
from tests.null.updating import at_home, updating
from tests.parity.device_updating import placed
from tests.parity.models import CASES
from tests.parity.observed import LANES, by_lane, observed
from tests.parity.speculating import trained
from tests.parity.test_lowering_order import prepared_plan, sized, streamed, traced

STEPS, MICRO_BATCHES = 3, 2


def plan_for(name: str, where: str, *, overlap: bool = True, there: int = 100) -> Plan:
    """The first ``there`` blocks that train are updated on the device, in a window of two chunks."""
    trace, case = traced(name), CASES[name]
    plan = prepared_plan(case.model(torch.float32), "stream")
    plan = streamed(trace, plan, 3, distance=2, window=1 << 12, overlap=overlap)
    largest = align(max(b.nbytes for b in trace.model.blocks), PAGE)
    placements = plan.placements
    if where == "disk":
        plan = replace(plan, streaming=replace(plan.streaming, host_slots=(largest, largest)))
        placements = tuple(
            replace(p, states=Tier.DISK, parameters=p.parameters if p.parameters is Tier.DEVICE else Tier.DISK)
            for p in placements
        )
        plan = replace(plan, budget=replace(plan.budget, disk=DiskBudget("somewhere", 1 << 26)))
    plan = replace(plan, placements=placements)
    names = trained(find_blocks(case.model(torch.float32)).model)[:there]
    streaming = replace(plan.streaming, update_window=1)
    return placed(case, torch.float32, updating(plan, Update.DEVICE, names, streaming=streaming), cells=2)


def ran(name: str, plan: Plan, disk: str | None) -> dict[Lane, list[str]]:
    """All that every lane did."""
    found = observed(CASES[name], plan, MICRO_BATCHES, disk, steps=STEPS, between=False)
    return by_lane(found.timeline.events, (*LANES, Lane.DEVICE_UPDATE))


def lowered(program: Program) -> dict[Lane, list[str]]:
    return {lane: [a.what for a in program.actions if a.lane is lane] for lane in (*LANES, Lane.DEVICE_UPDATE)}


@pytest.mark.thinned(3)
@pytest.mark.parametrize("where", ["host", "disk"])
@pytest.mark.parametrize("name", ["llama", "llama-tied", "frozen", "unused"])
def test_order(name: str, where: str, tmp_path: Path) -> None:
    """To the end of the run, whose updates are queued when somebody waits for them."""
    plan = plan_for(name, where)
    made = lowered(lower(traced(name), plan, steps=STEPS, micro_batches=MICRO_BATCHES))
    assert made == ran(name, plan, f"{tmp_path}:64MiB" if where == "disk" else None)
    assert any(what.startswith("load ") for what in made[Lane.H2D]) and made[Lane.DEVICE_UPDATE]


def test_order_where_each_step_waits_for_its_updates() -> None:
    plan = plan_for("llama", "host", overlap=False)
    program = lower(traced("llama"), plan, steps=STEPS, micro_batches=MICRO_BATCHES)
    assert lowered(program) == ran("llama", plan, None)


def test_beside_updates_at_home() -> None:
    plan = plan_for("llama", "host", there=2)
    made = lowered(lower(traced("llama"), plan, steps=STEPS, micro_batches=MICRO_BATCHES))
    assert made == ran("llama", plan, None)
    assert made[Lane.UPDATE] and made[Lane.DEVICE_UPDATE]


def test_what_the_window_takes_stands() -> None:
    plan = plan_for("llama", "host")
    program = lower(traced("llama"), plan)
    assert program.standing[Tier.DEVICE][Kind.STAGING] == plan.streaming.update_window
    # While loading, evaluating, saving and resuming as well.
    nothing = dict.fromkeys(Tier, 0)
    for phase, peak in phases(traced("llama"), plan, nothing).items():
        less = phases(traced("llama"), at_home(plan), nothing)[phase]
        assert peak.device - less.device == (plan.streaming.update_window if phase != "step" else 0)


def test_every_step_has_its_own_updates() -> None:
    """Whenever they are written down: each chunk once a step, between what is loaded and what is stored for it."""
    plan = plan_for("frozen", "disk")
    program = lower(traced("frozen"), plan, steps=STEPS)
    made: dict[int, Counter[tuple[str, int]]] = {step: Counter() for step in range(STEPS)}
    state: dict[tuple[str, int, int], Verb] = {}
    for action in program.actions:
        if action.verb is Verb.UPDATE:
            made[action.step][action.block, action.chunk] += 1
        if action.verb in (Verb.LOAD, Verb.UPDATE, Verb.STORE):
            key = action.block, action.chunk, action.step
            assert (state.get(key), action.verb) not in {(None, Verb.UPDATE), (Verb.UPDATE, Verb.LOAD)}
            state[key] = action.verb
    assert made[0] and set(made[0].values()) == {1}
    assert made[0] == made[1] == made[2]
    assert set(state.values()) == {Verb.STORE}


def test_bytes_of_a_step() -> None:
    """As over a real link (test_device_update_memory): in fp32, 16 bytes an element there and 12 back."""
    trace, plan = traced("llama"), plan_for("llama", "host")
    program = lower(trace, plan)
    last = [a for a in program.actions if a.step == program.steps - 1]
    elements = sum(trace.model.block(name).trainable_numel for name in plan.updated(Update.DEVICE))
    padding = sum(a.nbytes for a in last if a.what.startswith("load states ")) - 8 * elements
    assert 0 <= padding < PAGE * sum(a.verb is Verb.UPDATE for a in last)
    assert sum(a.nbytes for a in last if a.verb is Verb.LOAD) == 16 * elements + padding
    assert sum(a.nbytes for a in last if a.verb is Verb.STORE) == 12 * elements + padding


def slow_host(update_rate: float) -> Machine:
    return machine(update=update_rate)


def test_a_slow_host_is_a_reason_to_update_on_the_device() -> None:
    """The slower the host, the later a step of the plan that updates there; the other one does not ask."""
    trace, plan = traced("llama"), plan_for("llama", "host")
    home = sized(trace, plan, placements=at_home(plan).placements)
    seconds = {
        (place, rate): simulate(trace, slow_host(rate), one).step_seconds[-1]
        for rate in (1e12, 1e6)
        for place, one in (("home", home), ("device", plan))
    }
    assert seconds["device", 1e12] == seconds["device", 1e6]
    assert seconds["home", 1e12] < seconds["device", 1e12] < seconds["home", 1e6]
