"""Activations that stay or move op by op: the program is what the runtime does, in order and to the byte."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import forebay
from forebay.checking import check
from forebay.device.cpu import CpuDevice
from forebay.lowering import Liveness, device_bound, lower
from forebay.memory import Tier
from forebay.plans import Plan
from forebay.program import Program, Verb
from forebay.simulation import Costs, play
from forebay.states import Masters
from forebay.timeline import Lane, Timeline
from forebay.trace import Trace
from forebay.treatments import Fate
from forebay.units import parse_bytes
from tests.null.strategies import roomy_machine
from tests.parity import offloading
from tests.parity.models import Case
from tests.parity.observed import AMPLE, by_lane, lowered, observed
from tests.parity.offloading import movable, moving
from tests.parity.recomputing import plan_of, recomputable
from tests.parity.treated import SUBJECTS, eligible, treated

MODELS = ("llama", "llama-tied", "gpt2-dropout", "albert", "t5", "vit", "convnet", "used-twice", "mixtral")
SMALL, MIDDLE, LARGE = (0, 0), (20_000, 5_000), (1 << 20, 1 << 20)
"""Windows of offloads and of reloads, in bytes."""

HOW = [
    ("move", False, SMALL),
    ("move", True, MIDDLE),
    ("move", False, LARGE),
    ("keep", False, SMALL),
    ("again", True, SMALL),
    ("again", False, MIDDLE),
]
"""Kinds of plans (``planned``), whether blocks are resident, windows."""


def subject(name: str, kind: str) -> Case:
    """A model; with dropout only where blocks recompute, since what the others move is listed without it."""
    plain = name.removesuffix("-dropout")
    return offloading.SUBJECTS[plain] if kind == "move" or name == "used-twice" else SUBJECTS[name]


def batch_of(case: Case) -> Mapping[str, Any]:
    """A batch. Language models without a cache: what a recomputation remembers of it is no activation of the step."""
    batch = case.inputs(0, torch.float32)
    return {**batch, "use_cache": False} if "input_ids" in batch else batch


@cache
def traced(name: str, kind: str) -> Trace:
    case = subject(name, kind)
    return forebay.profile(case.model(torch.float32), batch_of(case))


def planned(name: str, kind: str, resident: bool, windows: tuple[int, int]) -> Plan:
    """``move``: nothing recomputes, and all that may leaves. Else all blocks recompute; ``keep``: no op that may be
    named runs again; ``again``: one in three is kept, one moved, one run again."""
    trace = traced(name, kind)
    if kind == "move":
        plan = moving(plan_of(trace.model, (), resident=resident, slots=2), movable(trace))
    else:
        plan = plan_of(trace.model, recomputable(trace.model), resident=resident, slots=2)
        fates: tuple[Fate | None, ...] = (Fate.KEEP, Fate.OFFLOAD, None) if kind == "again" else (Fate.KEEP,)
        fate_of = {one: fates[i % len(fates)] for i, one in enumerate(eligible(trace))}
        plan = treated(plan, {one: fate for one, fate in fate_of.items() if fate is not None})
    arena = Liveness(trace).host_activations(plan.recompute, plan.activations)
    streaming = replace(plan.streaming, offload_window=windows[0], reload_window=windows[1], host_activations=arena)
    return replace(plan, streaming=streaming, host=plan.host - plan.streaming.host_activations + arena)


def ran(
    case: Case, plan: Plan, micro_batches: int = 1, disk: str | None = None
) -> tuple[Timeline, dict[Lane, list[str]]]:
    """The account of three steps, and what the last of them did on each lane. Copies are made by who asks for them: the
    program is played with transfers that are never late, and where a window is open, one that is late still has its
    bytes on the device."""
    device = CpuDevice(parse_bytes(AMPLE), brief=parse_bytes(AMPLE))
    found = observed(case, plan, micro_batches, disk, steps=3, batch=batch_of(case), device=device)
    device.close()
    return found.timeline, by_lane(found.last)


def played(program: Program, trace: Trace) -> Timeline:
    return play(program, Costs(trace, roomy_machine("cpu"), Masters.WHOLE))


def peak(timeline: Timeline) -> int:
    return timeline.peaks[Tier.DEVICE]


def only(words: list[str], verb: str) -> list[str]:
    return [word for word in words if word.startswith(f"{verb} ")]


@pytest.mark.thinned(8)
@pytest.mark.parametrize(("kind", "resident", "windows"), HOW)
@pytest.mark.parametrize("name", MODELS)
def test_the_program_is_what_the_runtime_does(name: str, kind: str, resident: bool, windows: tuple[int, int]) -> None:
    """Every lane but that of reloads: the same, in order; of that one the same fetches in order, and the same reloads,
    whose order is compared below. The most bytes of the device: to the byte. And no more than was promised."""
    trace, plan = traced(name, kind), planned(name, kind, resident, windows)
    program = lower(trace, plan)
    timeline, did = ran(subject(name, kind), plan)
    said = lowered(program)
    for lane in (Lane.D2H, Lane.UPDATE):
        assert said[lane] == did[lane]
    assert only(said[Lane.H2D], "fetch") == only(did[Lane.H2D], "fetch")
    assert sorted(said[Lane.H2D]) == sorted(did[Lane.H2D])
    assert bool(only(said[Lane.H2D], "reload")) is (kind != "keep")
    assert timeline.counters["activations_kept"] == 0
    assert peak(played(program, trace)) == peak(timeline) <= device_bound(trace, plan)


@pytest.mark.thinned(4)
@pytest.mark.parametrize("kind", ["move", "again"])
@pytest.mark.parametrize("name", MODELS)
def test_reloads_come_in_the_order_of_the_program(name: str, kind: str) -> None:
    """With a window of 0 bytes each comes when it is asked for. A node of autograd, or a block that runs again, asks
    for several at once, in an order that is its own: what nothing is computed between is compared as a set."""
    plan = planned(name, kind, True, SMALL)
    program = lower(traced(name, kind), plan)
    _, did = ran(subject(name, kind), plan)
    real = iter(did[Lane.H2D])
    for group in groups(program, lambda verb: verb is Verb.RELOAD):
        assert {next(real) for _ in group} == set(group)
    assert list(real) == []


@pytest.mark.thinned(2)
@pytest.mark.parametrize(("kind", "resident", "windows"), HOW)
def test_two_passes_of_a_step(kind: str, resident: bool, windows: tuple[int, int]) -> None:
    trace, plan = traced("llama", kind), planned("llama", kind, resident, windows)
    program = lower(trace, plan, micro_batches=2)
    timeline, did = ran(subject("llama", kind), plan, micro_batches=2)
    said = lowered(program)
    assert said[Lane.D2H] == did[Lane.D2H]
    assert sorted(said[Lane.H2D]) == sorted(did[Lane.H2D])
    assert peak(played(program, trace)) == peak(timeline) <= device_bound(trace, plan)


def groups(program: Program, wanted: Callable[[Verb], bool]) -> list[list[str]]:
    """Of the last step, the actions in words that no compute lies between."""
    found: list[list[str]] = [[]]
    for action in program.actions:
        if action.step == program.steps - 1:
            if action.verb is Verb.COMPUTE:
                found.append([])
            elif wanted(action.verb):
                found[-1].append(action.what)
    return [group for group in found if group]


@pytest.mark.parametrize("kind", ["move", "again"])
@pytest.mark.parametrize("name", ["llama", "vit"])
def test_the_promise_is_near(name: str, kind: str) -> None:
    """Where nothing but activations counts, it is over by what may be under way and was not, and by what one node of
    autograd may ask for before the op that reads it."""
    plan = planned(name, kind, False, SMALL)
    timeline, _ = ran(subject(name, kind), plan)
    assert peak(timeline) <= device_bound(traced(name, kind), plan) <= 1.03 * peak(timeline)


class Tail(nn.Module):
    """A product, and after the last tensor that it saves a row of large ones that nobody saves."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = self.linear(x).repeat(1, 8)
        return (-(wide + 1) - 2).view(-1, 8, 64).sum(1)


class Tails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Tail() for _ in range(2))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = layer(x)
        return {"loss": x.square().mean()}


def test_what_is_named_after_the_last_save_is_there_until_forward_is_over() -> None:
    """Its block's forward does not know yet that no more will be saved. Four results of 64 KiB each, beside what the
    block makes of them (8 KiB), in the place of three at a time."""
    case = Case(Tails, lambda step: {"x": torch.randn(32, 64, generator=torch.Generator().manual_seed(step))})
    trace = forebay.profile(case.model(torch.float32), case.inputs(0, torch.float32))
    plan = plan_of(trace.model, recomputable(trace.model), resident=True)
    late = [one for one in eligible(trace) if not one.again and max(one.nbytes) == 65_536]
    assert len(late) == 2 * 4
    peaks = []
    for named in ([], late):
        chosen = treated(plan, dict.fromkeys(named, Fate.KEEP))
        timeline, _ = ran(case, chosen)
        peaks.append(peak(timeline))
        assert peak(played(lower(trace, chosen), trace)) == peaks[-1] <= device_bound(trace, chosen)
        check(trace, roomy_machine("cpu"), replace(chosen, device=device_bound(trace, chosen)))
    assert peaks[1] - peaks[0] == 65_536 + 8_192
