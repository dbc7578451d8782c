"""A small prepared model beside the same one under plain PyTorch, for what fails while it trains."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import forebay
from forebay.arenas import arenas
from forebay.budgets import Budget, DiskBudget
from forebay.device.base import Delays
from forebay.device.cpu import CpuDevice
from forebay.layout import PAGE, align
from forebay.memory import Tier
from forebay.plans import Plan
from forebay.runtime.blocks import find_blocks
from forebay.units import MiB

__all__ = ["AMPLE", "WIDTH", "Trained", "adamw", "disk_plan", "network", "prepare", "step"]

WIDTH = 96
AMPLE = "8MiB"


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(4)])


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def disk_plan(
    folder: Path,
    disk_copies: int = 1,
    checksums: bool = False,
    dtype: torch.dtype = torch.float32,
    parameters: Tier = Tier.DISK,
    update_chunk: int = 2048,
) -> Plan:
    """Parameters and states of every block on disk; updates may be queued when ``step`` returns. A block has 9,312
    elements, of which ``update_chunk`` are updated at a time."""
    model = network(dtype)
    model, _ = forebay.prepare(model, adamw(model), device_memory=AMPLE, policy="stream", device="cpu")
    made = forebay.report(model).plan
    forebay.close(model)
    largest = align(made.streaming.slots[0], PAGE)
    streaming = replace(made.streaming, host_slots=(largest, largest), update_chunk=update_chunk, overlap_update=True)
    streaming = replace(streaming, disk_copies=disk_copies, checksums=checksums)
    homes = tuple(replace(p, parameters=parameters, states=Tier.DISK) for p in made.placements)
    sizes = arenas(find_blocks(model).model, homes, streaming, ("exp_avg", "exp_avg_sq"))
    budget = Budget(made.budget.device, disk=DiskBudget(str(folder), 64 * MiB))
    return replace(made, budget=budget, placements=homes, streaming=streaming, host=sizes.host, disk=sizes.disk)


def prepare(way: str, folder: Path, device: Any = "cpu") -> tuple[nn.Module, torch.optim.Optimizer]:
    model = network()
    options: dict[str, Any] = {"policy": way}
    if way == "disk":
        options = {"plan": disk_plan(folder), "disk": f"{folder}:64MiB"}
    return forebay.prepare(model, adamw(model), device_memory=AMPLE, device=device, **options)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    dtype = next(model.parameters()).dtype
    model(torch.ones(2, WIDTH, dtype=dtype)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


class Trained:
    """A prepared model beside the same one under plain PyTorch."""

    def __init__(self, plan: Plan, folder: Path, delays: Delays | None = None) -> None:
        self.device = CpuDevice(8 * MiB, delays=delays)
        model = network()
        self.model, self.optimizer = forebay.prepare(
            model,
            adamw(model),
            plan=plan,
            device_memory=AMPLE,
            disk=f"{folder}:64MiB",
            device=self.device,
        )
        self.reference = network()
        self.plain = torch.optim.AdamW(self.reference.parameters(), lr=1e-2, fused=True)

    def steps(self, count: int) -> None:
        for _ in range(count):
            step(self.model, self.optimizer)
            step(self.reference, self.plain)

    def backward(self) -> None:
        self.model(torch.ones(2, WIDTH)).square().mean().backward()

    def assert_equal(self) -> None:
        values = forebay.parameters(self.model)
        assert all(torch.equal(values[n], p) for n, p in self.reference.named_parameters())

    def counter(self, name: str) -> int:
        return forebay.report(self.model).timeline.counters[name]

    def close(self) -> None:
        forebay.close(self.model)
        live = self.device.usage().live
        self.device.close()
        assert live == 0
