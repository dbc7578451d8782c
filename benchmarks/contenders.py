"""Who trains: plain PyTorch and forebay, with the same loop of the user's.

torch is imported when a contender starts, so that cases can be listed without it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from benchmarks.case import Account, Contender, DeviceKind, Job, LaneUse, Running

if TYPE_CHECKING:
    import torch

__all__ = ["AGAIN", "FUSED", "PLAIN", "Forebay", "Plain", "exhausted"]

LEARNING_RATE = 1e-4


def exhausted(error: Exception) -> bool:
    """Whether ``error`` says that memory ran out, in torch's words or forebay's."""
    import torch

    from forebay.errors import BudgetExceeded, DoesNotFit

    if isinstance(error, torch.OutOfMemoryError | MemoryError | BudgetExceeded | DoesNotFit):
        return True
    # torch's allocator for the CPU has no class of its own for this.
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error)


@final
@dataclass(frozen=True, kw_only=True)
class Plain(Contender):
    """Plain PyTorch: everything on the device, ``torch.optim.AdamW`` with its defaults or with ``fused=True``; with
    fp32 copies of parameters in 16 bits, as forebay has them, where ``wide``. ``checkpointed``: every block runs again
    in backward. ``saved_on_host``: under ``torch.autograd.graph.save_on_cpu`` with page-locked memory. ``updates``:
    whether there is a step at all."""

    name: str = "plain"
    what: str = "PyTorch, torch.optim.AdamW as a user writes it"
    fused: bool = False
    wide: bool = False
    checkpointed: bool = False
    saved_on_host: bool = False
    updates: bool = True

    @property
    def budgets(self) -> Mapping[str, str]:
        return {}

    def start(self, job: Job) -> Running:
        import torch

        model = job.model.build(job.seq, "cpu")
        seeded = _copy_of_parameters(model)
        model.to(job.device.value)
        if self.checkpointed:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        optimizer: torch.optim.Optimizer
        if self.wide:
            from forebay.optim import AdamW

            optimizer = AdamW(model.parameters(), lr=LEARNING_RATE)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True if self.fused else None)
        saved = (lambda: torch.autograd.graph.save_on_cpu(pin_memory=True)) if self.saved_on_host else nullcontext
        return _PlainRunning(job, model, optimizer, seeded, updates=self.updates, around=saved)


PLAIN = Plain()
FUSED = Plain(name="plain-fused", what="PyTorch, torch.optim.AdamW(fused=True)", fused=True)
AGAIN = Plain(name="plain-again", what="the same as plain: its ratio is what the host's drift alone does")


@final
@dataclass(frozen=True, kw_only=True)
class Forebay(Contender):
    """forebay under budgets and a policy, as in ``forebay.prepare``; ``disk`` is a size, the folder is the job's.
    ``clip`` is the norm that gradients are clipped to before each step (None: they are not)."""

    device_memory: str
    name: str = "forebay"
    what: str = "forebay"
    host_memory: str | None = None
    disk: str | None = None
    policy: str = "auto"
    clip: float | None = None

    @property
    def budgets(self) -> Mapping[str, str]:
        given = {"device": self.device_memory, "host": self.host_memory, "disk": self.disk}
        return {tier: size for tier, size in given.items() if size is not None}

    def start(self, job: Job) -> Running:
        import torch

        from forebay import api

        model = job.model.build(job.seq, "cpu")
        seeded = _copy_of_parameters(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        folder = job.scratch
        folder.mkdir(parents=True, exist_ok=True)
        model, wrapped = api.prepare(
            model,
            optimizer,
            job.model.batch(job.batch, job.seq, "cpu", seed=0),
            device_memory=self.device_memory,
            host_memory=self.host_memory,
            disk=None if self.disk is None else f"{folder}:{self.disk}",
            policy=self.policy,
            device=job.device.value,
        )
        return _ForebayRunning(job, model, wrapped, seeded, clip=self.clip)


def _copy_of_parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The state dict of ``model`` on the CPU, in memory of its own: what every turn starts from."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


class _Loop(Running):
    """The user's loop, the same for everyone: forward, ``around`` which there may be something, backward, clipping
    where it is asked for, update, zero_grad."""

    def __init__(
        self,
        job: Job,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        seeded: Mapping[str, torch.Tensor],
        *,
        updates: bool = True,
        clip: float | None = None,
        around: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._updates = updates
        self._clip = clip
        self._around = around
        self._job = job
        self._model = model
        self._optimizer = optimizer
        self._batches: list[dict[str, torch.Tensor]] = []
        self._seeded = seeded

    def reset(self, batches: int, first_seed: int) -> None:
        job = self._job
        gc.collect()  # so that no turn pays for the garbage of the one before
        self._model.load_state_dict(self._seeded)
        seeds = range(first_seed, first_seed + batches)
        self._batches = [job.model.batch(job.batch, job.seq, job.device.value, seed) for seed in seeds]

    def step(self, index: int) -> Any:
        with self._around():
            loss = self._model(**self._batches[index]).loss
        loss.backward()
        if self._clip is not None:
            import torch

            torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._clip)
        if self._updates:
            self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.detach()

    def read(self, loss: Any) -> float:
        return float(loss)


@final
class _PlainRunning(_Loop):
    def finish(self) -> None:
        if self._job.device is DeviceKind.CUDA:
            import torch

            torch.cuda.synchronize()

    def account(self) -> Account:
        if self._job.device is not DeviceKind.CUDA:
            return Account()
        import torch

        return Account(peaks={"device": torch.cuda.max_memory_allocated()})

    def close(self) -> None:
        del self._model, self._optimizer, self._batches


@final
class _ForebayRunning(_Loop):
    def finish(self) -> None:
        from forebay import api

        api.synchronize(self._model)

    def account(self) -> Account:
        from forebay import api

        record = api.report(self._model)
        timeline = record.timeline
        moved, busy = timeline.moved(), timeline.busy()
        lanes = {
            lane.value: LaneUse(moved[lane], seconds, moved[lane] / seconds if moved[lane] else None)
            for lane, seconds in busy.items()
            if seconds > 0
        }
        return Account(
            peaks={usage.tier.value: usage.peak for usage in timeline.tiers},
            lanes=lanes,
            counters=dict(timeline.counters),
            notes=(*record.plan.reasons, *record.plan.changes_numbers),
        )

    def close(self) -> None:
        from forebay import api

        api.close(self._model)
        del self._model, self._optimizer, self._batches
