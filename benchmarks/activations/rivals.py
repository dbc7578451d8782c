"""What PyTorch itself offers against large activations: each as its documentation says, in the loop of ``loop``.

``plain``        nothing: what ratios and budgets are taken to.
``checkpoint``   ``gradient_checkpointing_enable`` with non-reentrant checkpoints: every block runs again in backward.
``save_on_cpu``  ``torch.autograd.graph.save_on_cpu``: everything that autograd saves, parameters too, goes to the host.
                 On ``cpu`` its ``tensor.cpu()`` is no copy, so that it would do nothing at all. Here its hooks copy,
                 there and back, between memory that stands for the host and memory that stands for the device: one
                 thread, no overlap, which is what it does with pageable memory.
``compile``      ``torch.compile`` with ``torch._functorch.config.activation_memory_budget``: the partitioner recomputes
                 until what is saved is that share.

Peaks of the device are counted in a pass of their own, so that no account slows a timed step down: by forebay's byte
ledger, to which the copies of ``save_on_cpu`` are host bytes; under ``compile``, whose buffers no dispatch mode sees,
by the allocations that PyTorch's profiler reports.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, final

import torch

from benchmarks.activations.loop import COUNTED_STEPS, LEARNING_RATE, Loop, counted, seeded
from benchmarks.case import Account, Contender, Job, Running
from forebay.device.ledger import StorageLedger
from forebay.memory import Kind, Ledger, Tier

__all__ = ["CHECKPOINT", "PLAIN", "PLAIN_AGAIN", "SAVE_ON_CPU", "Compiled", "Eager", "Rival"]


@final
@dataclass(frozen=True, kw_only=True)
class Rival(Contender):
    """Eager PyTorch with AdamW; ``checkpointed`` and ``saved_on_host`` say with which of its means."""

    name: str
    what: str
    checkpointed: bool = False
    saved_on_host: bool = False

    @property
    def budgets(self) -> Mapping[str, str]:
        return {}

    def start(self, job: Job) -> Running:
        model = job.model.build(job.seq, job.device.value)
        if self.checkpointed:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return Eager(job, model, HostCopies() if self.saved_on_host else None)


PLAIN = Rival(name="plain", what="PyTorch")
PLAIN_AGAIN = Rival(name="plain-again", what="the same as plain: its ratio is what the host's drift alone does")
CHECKPOINT = Rival(name="checkpoint", what="every block under torch.utils.checkpoint", checkpointed=True)
SAVE_ON_CPU = Rival(
    name="save_on_cpu", what="torch.autograd.graph.save_on_cpu, with copies that are copies", saved_on_host=True
)


@final
@dataclass(frozen=True, kw_only=True)
class Compiled(Contender):
    """``torch.compile`` with an activation memory budget of ``share`` (0 to 1) of what it saves by itself."""

    name: str
    what: str
    share: float

    @property
    def budgets(self) -> Mapping[str, str]:
        return {}

    def start(self, job: Job) -> Running:
        # The switches are of this process, and nobody else is in it. Dropout draws from eager PyTorch's generator.
        from torch._functorch import config as partitioner
        from torch._inductor import config as inductor

        partitioner.activation_memory_budget = self.share
        inductor.fallback_random = True
        return _Compiled(job, job.model.build(job.seq, job.device.value))


class _Unplanned(Loop):
    """A model and ``torch.optim.AdamW``."""

    def __init__(self, job: Job, model: torch.nn.Module) -> None:
        super().__init__(job, model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE), seeded(model))

    @final
    def finish(self) -> None:
        pass  # nothing is ever under way: cpu

    @final
    def close(self) -> None:
        self.output = None

    @final
    def count(self) -> None:
        """Runs the steps that are counted; ``settle`` comes before."""
        for index in range(COUNTED_STEPS):
            self.step(index)

    @final
    def settle(self) -> None:
        """Makes the batches of the steps that are counted. Nothing of the device is live then but ``standing``."""
        self.output = None
        self.reset(COUNTED_STEPS, first_seed=1)

    @final
    def standing(self) -> Iterator[tuple[Kind, torch.UntypedStorage]]:
        """The storages that live between steps, each once."""
        states = (v for state in self.optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor))
        found = {
            tensor.untyped_storage()._cdata: (kind, tensor.untyped_storage())
            for kind, tensors in (
                (Kind.STATE, states),
                (Kind.BUFFER, self.model.buffers()),
                (Kind.PARAMETER, self.model.parameters()),
            )
            for tensor in tensors
        }
        yield from found.values()


@final
class Eager(_Unplanned):
    """Steps of a ``Rival``."""

    def __init__(self, job: Job, model: torch.nn.Module, copies: HostCopies | None) -> None:
        super().__init__(job, model)
        self._copies = copies

    def forward(self, batch: Mapping[str, torch.Tensor]) -> Any:
        with self._saving():
            return self.model(**batch)

    def _saving(self) -> AbstractContextManager[object]:
        if self._copies is None:
            return nullcontext()
        return torch.autograd.graph.saved_tensors_hooks(self._copies.pack, self._copies.unpack)

    def account(self) -> Account:
        """Runs ``COUNTED_STEPS`` steps under the byte ledger."""
        self.settle()
        watch = StorageLedger(Ledger(Tier.DEVICE))
        for kind, storage in self.standing():
            watch.ledger.charge(kind, storage.nbytes())
            watch.adopt(storage)
        if self._copies is not None:
            self._copies.watch = watch
        watch.install()
        watch.activate(True)
        try:
            self.count()
        finally:
            watch.uninstall()
            if self._copies is not None:
                self._copies.watch = None
        host = 0 if self._copies is None else self._copies.ledger.usage().peak
        return Account(peaks={Tier.DEVICE.value: watch.ledger.usage().peak, Tier.HOST.value: host})


@final
class HostCopies:
    """The hooks of ``save_on_cpu``. While there is a ``watch``, the copies are counted as host bytes and not as the
    device's."""

    def __init__(self) -> None:
        self.ledger = Ledger(Tier.HOST)
        self.watch: StorageLedger | None = None

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy on the host."""
        watch = self.watch
        if watch is None:
            return torch.empty_like(tensor).copy_(tensor)
        # The ledger looks away while the host's memory is taken.
        watch.activate(False)
        copy = torch.empty_like(tensor).copy_(tensor)
        watch.activate(True)
        storage = copy.untyped_storage()
        watch.adopt(storage)
        self.ledger.charge(Kind.ACTIVATION, storage.nbytes())
        weakref.finalize(storage, self.ledger.discharge, Kind.ACTIVATION, storage.nbytes()).atexit = False
        return copy

    def unpack(self, copy: torch.Tensor) -> torch.Tensor:
        """A copy on the device."""
        return copy.clone()


@final
class _Compiled(_Unplanned):
    def __init__(self, job: Job, model: torch.nn.Module) -> None:
        super().__init__(job, model)
        self._compiled: Any = torch.compile(model)

    def forward(self, batch: Mapping[str, torch.Tensor]) -> Any:
        return self._compiled(**batch)

    def account(self) -> Account:
        """Runs ``COUNTED_STEPS`` steps under the profiler and adds up what the allocator reports to it."""
        self.settle()
        peak = counted(sum(storage.nbytes() for _, storage in self.standing()), self.count)
        return Account(peaks={Tier.DEVICE.value: peak, Tier.HOST.value: 0})
