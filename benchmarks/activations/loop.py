"""The user's loop that every contender runs, and forebay in it.

The output has a name, as a plan assumes: it lives on while the next forward runs. The generator is set before every
step, so that dropout draws the same masks for everyone.
"""

from __future__ import annotations

import gc
from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any, final

import torch

from benchmarks.case import Account, Contender, Job, Running
from forebay import api
from forebay.device.base import Device
from forebay.device.cpu import CpuDevice
from forebay.memory import Tier
from forebay.plans import Plan
from forebay.profiler.compiled import allocations, peak_of
from forebay.units import format_bytes

__all__ = ["COUNTED_STEPS", "LEARNING_RATE", "Loop", "Planned", "changes_of", "counted", "seeded"]

LEARNING_RATE = 1e-4

COUNTED_STEPS = 2
"""Steps that a peak is taken over: the second one meets what the first one left."""


class Loop(Running):
    """Forward, backward, update, ``zero_grad``. Every turn starts from the parameters that ``seeded`` holds."""

    def __init__(
        self, job: Job, model: torch.nn.Module, optimizer: torch.optim.Optimizer, seeded: Mapping[str, torch.Tensor]
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self._job = job
        self._seeded = seeded
        self._batches: list[dict[str, torch.Tensor]] = []
        self._first_seed = 0
        self.output: Any = None

    @abstractmethod
    def forward(self, batch: Mapping[str, torch.Tensor]) -> Any:
        """The model's output for ``batch``."""

    @final
    def reset(self, batches: int, first_seed: int) -> None:
        gc.collect()  # so that no turn pays for the garbage of the one before
        self.model.load_state_dict(self._seeded)
        job, seeds = self._job, range(first_seed, first_seed + batches)
        self._batches = [job.model.batch(job.batch, job.seq, job.device.value, seed) for seed in seeds]
        self._first_seed = first_seed

    @final
    def step(self, index: int) -> Any:
        torch.manual_seed(self._first_seed + index)
        self.output = self.forward(self._batches[index])
        self.output.loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self.output.loss.detach()

    @final
    def read(self, loss: Any) -> float:
        return float(loss)


def seeded(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The state dict of ``model`` in memory of its own."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


@final
@dataclass(frozen=True, kw_only=True)
class Planned(Contender):
    """forebay under ``plan``; where that was made for compiled blocks, they are compiled with an activation memory
    budget of ``share``."""

    name: str
    what: str
    plan: Plan
    share: float = 1.0

    @property
    def budgets(self) -> Mapping[str, str]:
        return {"device": format_bytes(self.plan.budget.device)}

    def start(self, job: Job) -> Running:
        seq, device = job.seq, job.device.value
        compiled = bool(self.plan.compiled)
        model = job.model.build_compiled(seq, device, self.share) if compiled else job.model.build(seq, device)
        values = seeded(model)
        return _PlannedLoop(job, model, _prepared(job, model, self.plan, device), values)


def _prepared(job: Job, model: torch.nn.Module, plan: Plan, device: str | Device) -> torch.optim.Optimizer:
    """Puts ``plan`` under ``model``; the optimizer to use."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    batch = job.model.batch(job.batch, job.seq, job.device.value, seed=0)
    return api.prepare(model, optimizer, batch, device_memory=plan.budget.device, plan=plan, device=device)[1]


@final
class _PlannedLoop(Loop):
    def forward(self, batch: Mapping[str, torch.Tensor]) -> Any:
        return self.model(**batch)

    def finish(self) -> None:
        api.synchronize(self.model)

    def account(self) -> Account:
        record = api.report(self.model)
        peaks = {tier.value: peak for tier, peak in record.measured_peaks().items()}
        if record.plan.compiled:
            peaks[Tier.DEVICE.value] = max(peaks[Tier.DEVICE.value], self._counted(record.plan))
        return Account(peaks=peaks, counters=dict(record.timeline.counters))

    def _counted(self, plan: Plan) -> int:
        """The device's peak under ``plan`` where its ledger does not see all, of further steps: ``counted``.

        Whoever asks for a copy makes it there. PyTorch's profiler hears of the thread that it was started in and of no
        other: what a lane's thread lets go of, such as a gradient that has landed, would be counted for ever.
        """
        self.close()
        budget = plan.budget.device
        with closing(CpuDevice(budget, brief=budget)) as device:
            self.optimizer = _prepared(self._job, self.model, plan, device)
            self.reset(1 + COUNTED_STEPS, first_seed=1)
            self.step(0)  # what is made in a first step only, such as buffers of lanes, stands then
            self.output = None
            self.finish()
            peak = counted(device.ledger.usage().live, self._count)
            self.close()
        self.optimizer = _prepared(self._job, self.model, plan, self._job.device.value)
        return peak

    def _count(self) -> None:
        for index in range(1, 1 + COUNTED_STEPS):
            self.step(index)
        self.finish()

    def close(self) -> None:
        self.output = None
        api.close(self.model)


def counted(standing: int, steps: Callable[[], None]) -> int:
    """The most bytes at once while ``steps`` run: ``standing`` before them, and what this thread takes."""
    return standing + peak_of(changes_of(steps))


def changes_of(steps: Callable[[], None]) -> list[int]:
    """Bytes that PyTorch's allocator for the CPU hands out (above 0) and takes back in this thread while ``steps`` run,
    in their order."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        steps()
    return allocations(profile)
