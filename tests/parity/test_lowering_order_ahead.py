"""With updates ahead of their step the program is still what the runtime does, on every lane, whatever speculates."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from forebay.arenas import arenas, home_nbytes
from forebay.budgets import Budget, DiskBudget
from forebay.lowering import lower
from forebay.memory import Tier
from forebay.plans import Placement, Plan, Streaming, Update
from forebay.program import Action, Program, Verb
from forebay.timeline import Event, Lane
from forebay.trace import Trace
from tests.parity.models import CASES, Case
from tests.parity.observed import LANES, by_lane, observed
from tests.parity.test_lowering_order import traced

AMPLE = 64 << 20
STEPS = 4
HOMES = [(home, Tier.HOST, states) for home in (Tier.DEVICE, Tier.HOST, Tier.DISK) for states in (Tier.HOST, Tier.DISK)]
RESIDENT = (Tier.DEVICE, Tier.DEVICE, Tier.DEVICE)
COUNTED = (Lane.UPDATE, Lane.DISK_READ, Lane.DISK_WRITE)
"""Lanes whose bytes are compared job by job; a gradient that is added is two jobs, and one action of a program."""


def drawn(trace: Trace, choose: Random, folder: str, among: list[tuple[Tier, Tier, Tier]]) -> Plan:
    """Every block anywhere that ``among`` allows, and any of those that train and stream updated ahead."""
    blocks = trace.model.blocks
    homes = {b.name: choose.choice([h for h in among if h[0] is Tier.DEVICE or not b.held]) for b in blocks}
    streamed = [b for b in blocks if homes[b.name][0] is not Tier.DEVICE]
    on_disk = [home_nbytes(b) for b in blocks if homes[b.name][0] is Tier.DISK]
    able = [b.name for b in blocks if b.gradient_nbytes and homes[b.name] != RESIDENT]
    how = {name: Update.AHEAD for name in able if choose.random() < 0.6}
    placements = tuple(Placement(b.name, *homes[b.name], how.get(b.name, Update.STEP)) for b in blocks)
    streaming = Streaming(
        slots=(max(b.nbytes for b in streamed),) * choose.choice([2, 3]) if streamed else (),
        host_slots=(max(on_disk),) * choose.choice([2, 3]) if on_disk else (),
        prefetch_distance=choose.choice([0, 1, 2]),
        gradient_window=choose.choice([0, 4096, 40_000]),
        update_chunk=choose.choice([1024, 2048, 1 << 20]),
        overlap_update=choose.random() < 0.7,
    )
    sizes = arenas(trace.model, placements, streaming, trace.state_names)
    budget = Budget(AMPLE, disk=DiskBudget(folder, AMPLE) if sizes.disk else None)
    return Plan("drawn", budget, placements, streaming, AMPLE, sizes.host, sizes.disk)


def ran(case: Case, plan: Plan, micro_batches: int) -> tuple[Event, ...]:
    """What the last of ``STEPS`` steps did."""
    disk = plan.budget.disk
    where = None if disk is None else f"{disk.path}:{disk.nbytes}B"
    found = observed(case, plan, micro_batches, where, steps=STEPS)
    # The first step does not know yet how many gradients land in a step, all others do.
    assert found.timeline.counters["committed"] >= (STEPS - 1) * len(landing(case, plan))
    return found.last


def landing(case: Case, plan: Plan) -> set[str]:
    """The blocks that speculate of which anything has a gradient."""
    trace = traced(next(name for name, known in CASES.items() if known is case))
    names = [b.name for b in trace.model.blocks for _ in b.parameters]
    made = {names[v.resolve(g.parameter)] for _, v, op in trace.ops() for g in op.gradients}
    return made & set(plan.updated(Update.AHEAD))


def last_step(program: Program) -> list[Action]:
    return [a for a in program.actions if a.step == program.steps - 1]


def assert_same_jobs(name: str, plan: Plan, micro_batches: int) -> list[Action]:
    """Of a run and of the program. Returns the actions of the last step."""
    actions, events = (
        last_step(lower(traced(name), plan, micro_batches=micro_batches)),
        ran(CASES[name], plan, micro_batches),
    )
    assert {lane: [a.what for a in actions if a.lane is lane] for lane in LANES} == by_lane(events)
    for lane in COUNTED:
        assert [a.nbytes for a in actions if a.lane is lane] == [e.nbytes for e in events if e.lane is lane]
    return actions


MODELS = ("llama", "llama-tied", "used-twice", "frozen", "unused", "t5")


@pytest.mark.thinned(3)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", MODELS)
def test_the_program_is_what_runs(name: str, seed: int, tmp_path: Path) -> None:
    """Anything anywhere, with one micro-batch or two."""
    among = [*HOMES, RESIDENT] if seed else HOMES[:3:2]  # all in memory, then all homes
    plan = drawn(traced(name), Random(seed), str(tmp_path), among)
    assert plan.updated(Update.AHEAD)
    assert_same_jobs(name, plan, 1 + seed % 2)


@pytest.mark.parametrize("micro_batches", [1, 2, 3])
def test_updates_begin_before_backward_is_over(micro_batches: int, tmp_path: Path) -> None:
    """The job of the last block comes before the first block's gradients are on their way, in the run too."""
    trace = traced("llama")
    plan = drawn(trace, Random(1), str(tmp_path), HOMES[:3:2])
    plan = replace(plan, streaming=replace(plan.streaming, gradient_window=0))
    actions = assert_same_jobs("llama", plan, micro_batches)
    first = next(i for i, a in enumerate(actions) if a.verb is Verb.UPDATE)
    landings = [i for i, a in enumerate(actions) if a.verb in (Verb.LAND, Verb.ACCUMULATE)]
    assert actions[first].block in plan.updated(Update.AHEAD) and first < landings[-1]
    assert first > landings[len(landings) * (micro_batches - 1) // micro_batches]
