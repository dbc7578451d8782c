"""A small prepared model beside the same one under plain PyTorch, for what fails while it trains."""

from __future__ import annotations

from pathlib import Path

import torch

import forebay
from forebay.device.base import Delays
from forebay.device.cpu import CpuDevice
from forebay.plans import Plan
from forebay.units import MiB
from tests.faults.test_release import AMPLE, WIDTH, adamw, network, step

__all__ = ["Trained"]


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
