"""Transfers and updates that come late: whoever needs their bytes waits, and no number changes.

The loop here reads nothing between the steps: a look at parameters or gradients waits for them, and would hide an
update that the next forward did not wait for.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import forebay
from forebay.arenas import arenas, home_nbytes
from forebay.budgets import Budget
from forebay.device.base import Delays
from forebay.device.cpu import CpuDevice
from forebay.device.delays import DelayOne, RandomDelays
from forebay.memory import Tier
from forebay.plans import Placement, Plan, Streaming
from forebay.runtime.blocks import find_blocks
from forebay.timeline import Lane
from tests.parity.compare import adamw, assert_same_training
from tests.parity.content import states_of
from tests.parity.models import CASES, Case, WithLoss, images

AMPLE = 64 * 2**20
STEPS = 2
MICRO_BATCHES = 2
LATE = 0.01
"""Seconds: more than the compute between a job and the first use of its bytes, so that who does not wait is early."""

STATES = ("exp_avg", "exp_avg_sq")


class Narrow(nn.Module):
    """Four small layers of two chunks each: few jobs, each of which can be delayed in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(40, 40) for _ in range(4)])
        self.head = nn.Linear(40, 4)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        x = pixel_values.flatten(1)[:, :40]
        for layer in self.layers:
            x = layer(x).relu()
        return self.head(x)


NARROW = Case(lambda: WithLoss(Narrow()), images)


def tiered(case: Case, dtype: torch.dtype, *, overlap: bool, host_slots: int) -> Plan:
    """A plan in which every lane has work: the blocks take turns in where their parameters and states live.

    With as many ``host_slots`` as blocks, no wait for a buffer stands in for a missing wait for the bytes; with few,
    a buffer that is reused too early shows.
    """
    homes = [(Tier.HOST, Tier.HOST), (Tier.DISK, Tier.DISK), (Tier.HOST, Tier.DISK), (Tier.DISK, Tier.HOST)]
    model = find_blocks(case.model(dtype)).model
    placements = []
    for i, block in enumerate(model.blocks):
        parameters, states = homes[i % len(homes)]
        placements.append(Placement(block.name, Tier.DEVICE if block.held else parameters, Tier.HOST, states))
    largest, largest_home = max(b.nbytes for b in model.blocks), max(map(home_nbytes, model.blocks))
    streaming = Streaming(
        slots=(largest, largest, largest),
        host_slots=(largest_home,) * host_slots,
        prefetch_distance=2,
        gradient_window=largest,
        update_chunk=1024,
        overlap_update=overlap,
        poison=True,
    )
    sizes = arenas(model, placements, streaming, STATES)
    return Plan("tiered", Budget(AMPLE), tuple(placements), streaming, AMPLE, sizes.host, sizes.disk)


@dataclass(frozen=True)
class Outcome:
    """All that a run leaves: losses, the last gradients, the parameters and the optimizer's states."""

    losses: tuple[torch.Tensor, ...]
    rest: dict[str, torch.Tensor]

    def assert_equal(self, other: Outcome) -> None:
        assert all(torch.equal(a, b) for a, b in zip(self.losses, other.losses, strict=True))
        assert self.rest.keys() == other.rest.keys()
        for name, tensor in self.rest.items():
            assert torch.equal(tensor, other.rest[name]), name


def train(case: Case, dtype: torch.dtype, delays: Delays | None, **prepare: Any) -> Outcome:
    """Steps of two micro-batches and a last one without its update, so that its gradients can be told."""
    device = CpuDevice(AMPLE, delays=delays)
    try:
        model = case.model(dtype)
        model, optimizer = forebay.prepare(
            model, adamw(list(model.parameters())), case.inputs(0, dtype), device_memory=AMPLE, device=device, **prepare
        )
        losses = []
        for step in range(STEPS + 1):
            for micro in range(MICRO_BATCHES):
                loss = model(**case.inputs(step * MICRO_BATCHES + micro, dtype))["loss"]
                loss.backward()
                losses.append(loss.detach())
            if step < STEPS:
                optimizer.step()
                # In place, the zeros must not overtake an update that has yet to read what they replace.
                optimizer.zero_grad(set_to_none=step % 2 == 1)
        rest = {f"gradient of {name}": g for name, g in forebay.gradients(model).items()}
        rest |= {f"parameter {name}": p for name, p in forebay.parameters(model).items()}
        rest |= states_of(optimizer)
        forebay.close(model)
        return Outcome(tuple(losses), rest)
    finally:
        device.close()


def assert_same_whichever_is_late(dtype: torch.dtype, plan: Plan, folder: Path, first: int, stride: int) -> None:
    """Against a run with everything on the device, in which nothing moves at all: one job of a run of ``plan`` is late,
    every ``stride``-th from ``first`` on in turn."""
    expected, disk = train(NARROW, dtype, None), f"{folder}:64MiB"
    counted = DelayOne(-1, LATE)
    train(NARROW, dtype, counted, plan=plan, disk=disk).assert_equal(expected)
    assert counted.count > 100
    for index in range(first, counted.count, stride):
        train(NARROW, dtype, DelayOne(index, LATE), plan=plan, disk=disk).assert_equal(expected)


# Together the four take each job of a run in turn, once: (dtype, overlap_update, first job, stride).
TURNS = [
    (torch.float32, True, 0, 3),
    (torch.bfloat16, True, 1, 3),
    (torch.float32, False, 2, 6),
    (torch.bfloat16, False, 5, 6),
]


@pytest.mark.thinned(2)
@pytest.mark.parametrize(("dtype", "overlap", "first", "stride"), TURNS)
def test_each_job_late_in_turn(dtype: torch.dtype, overlap: bool, first: int, stride: int, tmp_path: Path) -> None:
    plan = tiered(NARROW, dtype, overlap=overlap, host_slots=5)
    assert_same_whichever_is_late(dtype, plan, tmp_path, first, stride)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("lane", [Lane.H2D, Lane.D2H, Lane.UPDATE, Lane.DISK_READ, Lane.DISK_WRITE])
def test_a_slow_lane(lane: Lane, tmp_path: Path) -> None:
    """Every job of one lane is late, by less than ``LATE`` and each by its own time; the others are not."""
    expected = train(NARROW, torch.float32, None)
    plan, disk = tiered(NARROW, torch.float32, overlap=True, host_slots=1), f"{tmp_path}:64MiB"
    delays = RandomDelays(seed=1, max_seconds=LATE, lanes=[lane])
    train(NARROW, torch.float32, delays, plan=plan, disk=disk).assert_equal(expected)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["llama-tied", "used-twice", "checkpointed"])
def test_every_job_late_by_chance(name: str, dtype: torch.dtype, overlap: bool, tmp_path: Path) -> None:
    """Losses and gradients against plain PyTorch, with slots that are poisoned when their block leaves."""
    device = CpuDevice(AMPLE, delays=RandomDelays(seed=0, max_seconds=0.002))
    try:
        model = assert_same_training(
            CASES[name],
            dtype,
            steps=2,
            plan=tiered(CASES[name], dtype, overlap=overlap, host_slots=2),
            device_memory=AMPLE,
            disk=f"{tmp_path}:64MiB",
            device=device,
        )
        forebay.close(model)
    finally:
        device.close()
