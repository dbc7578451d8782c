"""Steps of the model of ``timed``, and how a turn of them is timed."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, final

import torch
from torch import nn

from benchmarks.fasthost.queued import QueuedDevice
from benchmarks.fasthost.timed import AMPLE, TimedModel
from forebay import api
from forebay.plans import Plan

__all__ = ["ALWAYS", "NEVER", "Stepped"]

NEVER: Final = 1e9
ALWAYS: Final = 1e-3
"""Norms to clip to: nothing is, every step is."""


@final
class Stepped:
    """A ``TimedModel`` that steps under ``plan`` (None: in plain PyTorch, forward and backward only), and after each
    step what ``after`` does. ``crash_safe``: as in ``forebay.prepare``."""

    def __init__(
        self,
        layers: int,
        elements: int,
        plan: Callable[[TimedModel], Plan] | None,
        after: Callable[[nn.Module, torch.optim.Optimizer], object] | None = None,
        crash_safe: Path | None = None,
    ) -> None:
        self._after = after
        self.model = TimedModel(layers, elements)
        self._x = torch.zeros(1, TimedModel.WIDTH)
        self._optimizer: torch.optim.Optimizer | None = None
        self._device = QueuedDevice(self.model.pace.compute)
        if plan is not None:
            given = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
            made = plan(self.model)
            disk = None if made.budget.disk is None else made.budget.disk.path
            where = {"disk": disk, "device": self._device, "crash_safe": crash_safe}
            _, self._optimizer = api.prepare(self.model, given, plan=made, device_memory=AMPLE, **where)
        self.losses: list[float] = []

    def step(self, max_norm: float | None, *, settle: bool = False) -> None:
        """One step; ``settle`` waits for its update."""
        loss = self.model(self._x)
        loss.backward()
        value = self.model.read(loss)
        if self._optimizer is None:
            self.model.zero_grad()
            return
        self.losses.append(value)
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        self._optimizer.step()
        if self._after is not None:
            self._after(self.model, self._optimizer)
        if settle:
            api.synchronize(self.model)
        self._optimizer.zero_grad()

    def turn(self, steps: int, max_norm: float | None = None, *, settle: bool = False) -> float:
        """Seconds of a step among ``steps`` that follow one, from the beginning of the first of them to that of the one
        after the last."""
        self.settle()
        gc.collect()  # so that no turn pays for the garbage of those before: that takes longer than a step
        self.step(max_norm, settle=settle)
        start = time.perf_counter()
        for _ in range(steps):
            self.step(max_norm, settle=settle)
        taken = (time.perf_counter() - start) / steps
        self.settle()
        return taken

    def update_alone(self) -> float:
        """Seconds from ``step()`` to the end of all updates, with nothing beside them."""
        self.settle()
        self.model(self._x).backward()
        self.settle()
        start = time.perf_counter()
        if self._optimizer is not None:
            self._optimizer.step()
        self.settle()
        taken = time.perf_counter() - start
        self.model.zero_grad()
        return taken

    def settle(self) -> None:
        """Waits for whatever is under way."""
        if self._optimizer is None:
            self._device.synchronize()
        else:
            api.synchronize(self.model)

    def speculation(self) -> tuple[int, int]:
        """Updates ahead of their step so far, and those of them that were taken over."""
        counters = api.report(self.model).timeline.counters
        return counters["speculated"], counters["committed"]

    def close(self) -> None:
        if self._optimizer is not None:
            api.close(self.model)
        self._device.close()
        self.model.pace.compute.close()
