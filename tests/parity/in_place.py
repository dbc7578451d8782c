"""Models whose homes on disk a checkpoint names in place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import forebay
from forebay.arenas import arenas_of
from forebay.memory import Tier
from forebay.plans import Plan
from forebay.runtime.blocks import find_blocks
from tests.parity.content import content
from tests.parity.models import Case
from tests.parity.test_streaming import everything_on_disk

__all__ = ["MOMENTS", "InPlace", "prepared", "two_places"]

MOMENTS = ("exp_avg", "exp_avg_sq")
AMPLE = "64MiB"


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, fused=True)


def two_places(model: nn.Module, plan: Plan, **streaming: Any) -> Plan:
    """``plan`` with two places for what it has on disk."""
    made = replace(plan, streaming=replace(plan.streaming, **{"disk_copies": 2, **streaming}))
    sizes = arenas_of(find_blocks(model).model, made, MOMENTS)
    return replace(made, disk=sizes.disk, host=sizes.host)


def states_on_disk(model: nn.Module, plan: Plan, **streaming: Any) -> Plan:
    """``plan``, which has everything on disk, with the parameters on the host."""
    homes = tuple(replace(p, parameters=Tier.HOST) for p in plan.placements)
    return two_places(model, replace(plan, placements=homes), **streaming)


def prepared(
    model: nn.Module, disk: Path, kept: Path, change: Callable[[nn.Module, Plan], Plan] = two_places
) -> tuple[nn.Module, torch.optim.Optimizer]:
    plan = change(model, everything_on_disk(model, f"{disk}:64MiB"))
    options: dict[str, Any] = {"plan": plan, "disk": f"{disk}:64MiB", "crash_safe": kept}
    return forebay.prepare(model, adamw(model), device_memory=AMPLE, device="cpu", **options)


class InPlace:
    """A model of ``case`` in training, saved in ``kept``."""

    def __init__(
        self, case: Case, dtype: torch.dtype, folder: Path, change: Callable[[nn.Module, Plan], Plan] = two_places
    ) -> None:
        self.case, self.dtype = case, dtype
        disk, self.kept = folder / "disk", folder / "kept"
        disk.mkdir(exist_ok=True)
        self.model, self.optimizer = prepared(case.model(dtype), disk, self.kept, change)

    def steps(self, which: range) -> list[torch.Tensor]:
        losses = []
        for step in which:
            loss = self.model(**self.case.inputs(step, self.dtype))["loss"]
            loss.backward()
            losses.append(loss.detach().clone())
            self.optimizer.step()
            self.optimizer.zero_grad()
        return losses

    def save(self, step: int, *, background: bool = False) -> int:
        return forebay.save(self.model, self.optimizer, self.kept, step=step, background=background)

    def resume(self) -> int:
        return forebay.resume(self.model, self.optimizer, self.kept).step

    def content(self) -> dict[str, torch.Tensor]:
        return content(self.model, self.optimizer)

    def written(self) -> int:
        """Bytes that the disk tier has written."""
        forebay.synchronize(self.model)
        return forebay.report(self.model).timeline.counters["disk_written"]

    def close(self) -> None:
        forebay.close(self.model)
