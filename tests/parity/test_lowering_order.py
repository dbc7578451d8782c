"""The program is what the runtime does: the same jobs on every lane, in the same order, on real models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

import forebay
from forebay.arenas import arenas
from forebay.budgets import Budget, DiskBudget
from forebay.layout import PAGE, align
from forebay.lowering import lower
from forebay.memory import Tier
from forebay.plans import Placement, Plan
from forebay.profiler.capture import capture
from forebay.timeline import Lane
from forebay.trace import Trace
from forebay.units import parse_disk
from tests.parity.compare import adamw
from tests.parity.models import CASES
from tests.parity.observed import AMPLE, by_lane, lowered, observed

# Every step trains on the same batch, so that a router sends it the same way.
MODELS = ("gpt2", "llama", "llama-tied", "albert", "t5", "mixtral", "vit", "convnet", "used-twice", "frozen", "unused")


def prepared_plan(model: nn.Module, policy: str) -> Plan:
    optimizer = adamw([p for p in model.parameters() if p.requires_grad])
    model, _ = forebay.prepare(model, optimizer, device_memory=AMPLE, policy=policy, device="cpu")
    plan = forebay.report(model).plan
    forebay.close(model)
    return plan


@cache
def traced(name: str) -> Trace:
    case = CASES[name]
    return capture(case.model(torch.float32), case.inputs(0, torch.float32)).trace


def sized(trace: Trace, plan: Plan, *, placements: Sequence[Placement], disk: str | None = None) -> Plan:
    """``plan`` with other placements, and its figures made anew."""
    sizes = arenas(trace.model, placements, plan.streaming, trace.state_names)
    budget = Budget(plan.budget.device, disk=None if disk is None else DiskBudget(*parse_disk(disk)))
    return replace(
        plan,
        placements=tuple(placements),
        budget=budget,
        device=plan.budget.device,
        host=sizes.host,
        disk=sizes.disk,
    )


def streamed(trace: Trace, plan: Plan, slots: int, *, distance: int, window: int, overlap: bool = True) -> Plan:
    """Every block streamed through ``slots`` shared slots; held blocks keep one of their own."""
    held = {b.name for b in trace.model.blocks if b.held}
    placements = [
        Placement(b.name, Tier.DEVICE if b.name in held else Tier.HOST, Tier.HOST, Tier.HOST)
        for b in trace.model.blocks
    ]
    largest = max((b.nbytes for b in trace.model.blocks if b.name not in held), default=0)
    streaming = replace(
        plan.streaming,
        slots=(largest,) * slots,
        prefetch_distance=distance,
        gradient_window=window,
        update_chunk=2048,
        overlap_update=overlap,
    )
    return sized(trace, replace(plan, streaming=streaming), placements=placements)


# Each model with each policy and with one micro-batch and two.
WAYS = [
    (name, policy, 1 + (policy == ("stream", "auto")[i % 2]))
    for i, name in enumerate(MODELS)
    for policy in ("stream", "auto")
]


@pytest.mark.thinned(8)
@pytest.mark.parametrize(("name", "policy", "micro_batches"), WAYS)
def test_policies(name: str, policy: str, micro_batches: int) -> None:
    trace = traced(name)
    plan = prepared_plan(CASES[name].model(torch.float32), policy)
    assert lowered(lower(trace, plan, micro_batches=micro_batches)) == by_lane(
        observed(CASES[name], plan, micro_batches).last
    )


@pytest.mark.thinned(6)
@pytest.mark.parametrize("slots", [1, 2, 3, 5])
@pytest.mark.parametrize("name", ["llama", "llama-tied", "used-twice", "t5"])
def test_slots_and_distance(name: str, slots: int) -> None:
    trace = traced(name)
    plan = prepared_plan(CASES[name].model(torch.float32), "stream")
    for distance in (0, 1, 3):
        plan = streamed(trace, plan, slots + (name == "llama-tied"), distance=distance, window=1 << slots * 4)
        made = lowered(lower(trace, plan))
        assert made == by_lane(observed(CASES[name], plan, 1).last), distance
        assert any(made[Lane.H2D])


@pytest.mark.parametrize("name", ["llama", "llama-tied", "t5", "vit", "unused"])
def test_recomputed_blocks(name: str) -> None:
    trace = traced(name)
    layers = tuple(b.name for b in trace.model.blocks if b.module is not None and b.name[-1].isdigit())
    plan = streamed(trace, prepared_plan(CASES[name].model(torch.float32), "stream"), 3, distance=1, window=4096)
    plan = replace(plan, recompute=layers[::2])
    assert plan.recompute
    assert lowered(lower(trace, plan)) == by_lane(observed(CASES[name], plan, 1).last)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_states_and_parameters_on_disk(overlap: bool, micro_batches: int, tmp_path: Path) -> None:
    trace = traced("llama")
    plan = streamed(
        trace, prepared_plan(CASES["llama"].model(torch.float32), "stream"), 2, distance=2, window=4096, overlap=overlap
    )
    largest = align(plan.streaming.slots[0], PAGE)
    plan = replace(plan, streaming=replace(plan.streaming, host_slots=(largest, largest)))
    for every in (1, 2):  # every block, every second block
        placements = [
            replace(p, parameters=Tier.DISK, states=Tier.DISK) if i % every == 0 else p
            for i, p in enumerate(plan.placements)
        ]
        disk = f"{tmp_path}:64MiB"
        made = sized(trace, plan, placements=placements, disk=disk)
        program = lowered(lower(trace, made, micro_batches=micro_batches))
        assert program == by_lane(observed(CASES["llama"], made, micro_batches, disk).last)
        assert program[Lane.DISK_READ] and program[Lane.DISK_WRITE]
