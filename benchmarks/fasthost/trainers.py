"""Who trains in ``zero`` and ``accumulate``: plain PyTorch and forebay, one loop, each in a process of its own.

Nobody goes back to the first parameters between turns, which an engine that keeps copies of them cannot: all take the
same steps on the same batches from the start, so that their losses tell whether they compute the same.
"""

from __future__ import annotations

import gc
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, final

from benchmarks.case import Account, Contender, Job, LaneUse, Running

if TYPE_CHECKING:
    import torch

    from forebay.plans import Plan

__all__ = ["LEARNING_RATE", "Accumulating", "Forebay", "How", "Loop", "Mode", "Plain"]

LEARNING_RATE = 1e-4

Mode = Literal["offload", "infinity", "nvme"]
"""Where things are: parameters on the device, gradients and optimizer on the host (ZeRO-Offload: stage 2); parameters
on the host too (ZeRO-Infinity: stage 3); parameters and optimizer states on disk (ZeRO-Infinity with NVMe)."""


class Loop(Running):
    """Makes the batches; a subclass takes the steps."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._batches: list[dict[str, torch.Tensor]] = []

    @final
    def reset(self, batches: int, first_seed: int) -> None:
        gc.collect()  # so that no turn pays for the garbage of the one before
        job = self._job
        seeds = range(first_seed, first_seed + batches)
        self._batches = [job.model.batch(job.batch, job.seq, "cpu", seed) for seed in seeds]

    @final
    def step(self, index: int) -> Any:
        return self.train(self._batches[index])

    @abstractmethod
    def train(self, batch: Mapping[str, torch.Tensor]) -> Any:
        """One step; returns the loss."""

    @final
    def read(self, loss: Any) -> float:
        return float(loss)

    def finish(self) -> None:
        return

    def account(self) -> Account:
        return Account()

    def close(self) -> None:
        return


@final
@dataclass(frozen=True, kw_only=True)
class Plain(Contender):
    """PyTorch with everything in memory."""

    name: str
    what: str
    fused: bool = False

    @property
    def budgets(self) -> Mapping[str, str]:
        return {}

    def start(self, job: Job) -> Running:
        import torch

        model = job.model.build(job.seq, "cpu")
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True if self.fused else None)
        return _Eager(job, model, optimizer)


class _Eager(Loop):
    def __init__(self, job: Job, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(job)
        self._model, self._optimizer = model, optimizer

    @final
    def train(self, batch: Mapping[str, torch.Tensor]) -> Any:
        loss = self._model(**batch).loss
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.detach()


@final
@dataclass(frozen=True, kw_only=True)
class Forebay(Contender):
    """forebay with everything where ``mode`` has it."""

    name: str
    what: str
    mode: Mode

    @property
    def budgets(self) -> Mapping[str, str]:
        return {}

    def start(self, job: Job) -> Running:
        import torch

        from forebay import api

        model = job.model.build(job.seq, "cpu")
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        folder = job.scratch
        folder.mkdir(parents=True, exist_ok=True)
        batch = job.model.batch(job.batch, job.seq, "cpu", seed=0)
        made = _made(model, optimizer, batch, self.mode, str(folder))
        disk = str(folder) if made.disk else None
        prepared, wrapped = api.prepare(model, optimizer, batch, device_memory="32GiB", disk=disk, plan=made)
        return _Prepared(job, prepared, wrapped)


def _made(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Mapping[str, Any], mode: Mode, folder: str
) -> Plan:
    """The plan that streams every block, with parameters and states moved to where ``mode`` has them."""
    from forebay import api
    from forebay.arenas import arenas, home_nbytes
    from forebay.budgets import DiskBudget
    from forebay.memory import Tier
    from forebay.runtime.blocks import find_blocks

    api.prepare(model, optimizer, batch, device_memory="32GiB", policy="stream", loss="plain", device="cpu")
    made = api.report(model).plan
    api.close(model)
    if mode == "infinity":
        return made
    blocks = find_blocks(model).model
    if mode == "offload":
        # Each block keeps a slot of its own on the device: nothing is fetched but what an update has changed.
        placements = tuple(replace(p, parameters=Tier.DEVICE) for p in made.placements)
        streaming, budget = replace(made.streaming, slots=(), host_slots=()), made.budget
    else:
        held = {block.name for block in blocks.blocks if block.held}
        placements = tuple(
            replace(p, states=Tier.DISK, parameters=p.parameters if p.block in held else Tier.DISK)
            for p in made.placements
        )
        largest = max(map(home_nbytes, blocks.blocks))
        streaming = replace(made.streaming, host_slots=(largest,) * 6)
        budget = replace(made.budget, disk=DiskBudget(folder))
    sizes = arenas(blocks, placements, streaming, ("exp_avg", "exp_avg_sq"))
    device = max(made.device, sizes.device + made.device)
    return replace(
        made,
        placements=placements,
        streaming=streaming,
        budget=budget,
        device=device,
        host=sizes.host,
        disk=sizes.disk,
    )


@final
class _Prepared(_Eager):
    def finish(self) -> None:
        from forebay import api

        api.synchronize(self._model)

    def account(self) -> Account:
        from forebay import api

        record = api.report(self._model)
        return Account(peaks={tier.value: peak for tier, peak in record.measured_peaks().items()})

    def close(self) -> None:
        from forebay import api

        api.close(self._model)


How = Literal["plain", "one", "loop", "layers"]
"""PyTorch's loop; under forebay: one micro-batch alone, the loop over all, ``forebay.accumulate``."""


@final
@dataclass(frozen=True, kw_only=True)
class Accumulating(Contender):
    """A step over the rows of a batch as micro-batches of one row each, parameters and optimizer on the host."""

    name: str
    what: str
    how: How

    @property
    def budgets(self) -> Mapping[str, str]:
        return {}

    def start(self, job: Job) -> Running:
        import torch

        from forebay import api

        model = job.model.build(job.seq, "cpu")
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
        if self.how != "plain":
            row = job.model.batch(1, job.seq, "cpu", seed=0)
            model, optimizer = api.prepare(
                model, optimizer, row, device_memory="32GiB", policy="stream", loss="plain", device="cpu"
            )
        return _Accumulation(job, model, optimizer, self.how)


@final
class _Accumulation(Loop):
    def __init__(self, job: Job, model: torch.nn.Module, optimizer: torch.optim.Optimizer, how: How) -> None:
        super().__init__(job)
        self._model, self._optimizer, self._how = model, optimizer, how

    def train(self, batch: Mapping[str, torch.Tensor]) -> Any:
        from forebay import api

        rows = [{name: tensor[i : i + 1] for name, tensor in batch.items()} for i in range(self._job.batch)]
        if self._how == "layers":
            losses = api.accumulate(self._model, rows, lambda model, row: model(**row).loss)
        else:
            losses = [self._alone(row) for row in (rows[:1] if self._how == "one" else rows)]
        self._optimizer.step()
        self._optimizer.zero_grad()
        return losses[0]

    def _alone(self, row: Mapping[str, torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = self._model(**row).loss
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def finish(self) -> None:
        from forebay import api

        if self._how != "plain":
            api.synchronize(self._model)

    def account(self) -> Account:
        """The bytes of both directions of the link, over all steps so far."""
        from forebay import api

        if self._how == "plain":
            return Account()
        record = api.report(self._model)
        moved, busy = record.timeline.moved(), record.timeline.busy()
        lanes = {lane.value: LaneUse(moved[lane], busy[lane], None) for lane in moved if moved[lane]}
        return Account(lanes=lanes, counters={"steps": record.steps})

    def close(self) -> None:
        from forebay import api

        if self._how != "plain":
            api.close(self._model)
