"""GPT-shaped models of the sizes that papers train, and plans for models of any shape (``nets``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Protocol

from benchmarks.papers.record import Point
from forebay.budgets import Budget, DiskBudget
from forebay.collector import collector_paused
from forebay.errors import DoesNotFit
from forebay.machine import Machine
from forebay.memory import Tier
from forebay.planners import Bench, make_plan
from forebay.planning import problem_of
from forebay.plans import UpdateTime

if TYPE_CHECKING:
    from forebay.trace import Trace

__all__ = [
    "HEAD",
    "SEQ",
    "Gpt",
    "Shape",
    "bench_of",
    "best",
    "largest",
    "largest_batch",
    "last_that_fits",
    "point",
    "traced",
    "with_device",
    "with_disk",
    "with_host",
]

SEQ = 1024
"""Tokens in a sequence, in all of these papers."""

VOCABULARY = 50257
HEAD = 128
"""Elements of a head. How many heads there are decides nothing here."""

WHOLE_DISK = "disk"


class Shape(Protocol):
    """A model, said by its sizes. ``str`` names it."""

    @property
    def parameters(self) -> int:
        """Elements of all parameters."""
        ...

    def flops(self, batch: int) -> float:
        """Of a step, as papers on such models count them."""
        ...

    def captured(self, batch: int) -> Trace:
        """A step of ``batch`` sequences or images. Nothing is computed, and no weight has memory."""
        ...


@dataclass(frozen=True)
class Gpt:
    """A GPT-2 of transformers without dropout, 16-bit parameters with fp32 master and moments: ``layers`` of ``hidden``
    elements."""

    layers: int
    hidden: int

    @property
    def parameters(self) -> int:
        """Elements of all parameters: per layer 12 h^2 of matrices, 13 h of norms and biases; tied embeddings."""
        h = self.hidden
        return self.layers * (12 * h * h + 13 * h) + (VOCABULARY + SEQ) * h + 2 * h

    def flops(self, batch: int) -> float:
        """Of a step of ``batch`` sequences as papers on offloading count them: 8 for each parameter and token, that is
        forward twice (activations are made again) and backward."""
        return 8.0 * self.parameters * batch * SEQ

    def captured(self, batch: int) -> Trace:
        """A step of ``batch`` sequences. Nothing is computed, and no weight has memory."""
        import torch
        from transformers import GPT2Config, GPT2LMHeadModel

        import forebay

        sizes = {"n_embd": self.hidden, "n_layer": self.layers, "n_head": self.hidden // HEAD, "n_positions": SEQ}
        config: Any = GPT2Config(vocab_size=VOCABULARY, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **sizes)
        with torch.device("meta"):
            model: Any = GPT2LMHeadModel(config)
        tokens = torch.zeros((batch, SEQ), dtype=torch.int64, device="meta")
        return forebay.profile(model.half().train(), {"input_ids": tokens, "labels": tokens}, device="cuda")

    def __str__(self) -> str:
        return f"{self.parameters / 1e9:.1f}B ({self.layers} x {self.hidden})"


@lru_cache(maxsize=4)  # a trace of some hundred layers is large, and claims go through the batches of one model
def traced(shape: Shape, batch: int) -> Trace:
    """``shape.captured``, of the latest that were asked for."""
    return shape.captured(batch)


def bench_of(shape: Shape, batch: int, machine: Machine, update: UpdateTime = "step") -> Bench:
    """A bench for a step of ``batch`` with all that ``machine`` has."""
    disk = None if machine.disk is None else DiskBudget(WHOLE_DISK, machine.disk.capacity)
    budget = Budget(machine.device_capacity, None, None, disk)
    return Bench(problem_of(traced(shape, batch), machine, budget, update=update))


def point(policy: str, shape: Shape, batch: int, machine: Machine, update: UpdateTime = "step") -> Point:
    """The plan of ``policy`` for a step of ``batch`` sequences or images, with all that ``machine`` has. ``update`` is
    that of ``planners.Problem``."""
    made = Point(policy, machine.name, str(shape), shape.parameters, batch, None, shape.flops(batch))
    with collector_paused():
        bench = bench_of(shape, batch, machine, update)
        try:
            plan = make_plan(bench.problem, policy, bench)
        except DoesNotFit as refusal:
            return replace(made, refusal=str(refusal))
        peaks = plan.peaks(1)
        seconds = plan.step_seconds
    return replace(made, step_seconds=seconds, device=peaks[Tier.DEVICE], host=peaks[Tier.HOST], disk=peaks[Tier.DISK])


def largest(
    policy: str, shapes: Sequence[Shape], batch: int, machine: Machine
) -> tuple[Point | None, tuple[Point, ...]]:
    """The largest of ``shapes``, which are from small to large, that fits: see ``last_that_fits``."""
    return last_that_fits([partial(point, policy, shape, batch, machine) for shape in shapes])


def largest_batch(
    policy: str, shape: Shape, batches: Sequence[int], machine: Machine
) -> tuple[Point | None, tuple[Point, ...]]:
    """The largest of ``batches``, which are from small to large, that fits: see ``last_that_fits``."""
    return last_that_fits([partial(point, policy, shape, batch, machine) for batch in batches])


def last_that_fits(makes: Sequence[Callable[[], Point]]) -> tuple[Point | None, tuple[Point, ...]]:
    """The last that fits of what ``makes`` make, which ask for more and more (None: none does), and all that were
    tried: what asks for more than one that does not fit is not."""
    tried: dict[int, Point] = {}
    below, above = -1, len(makes)
    while above - below > 1:
        middle = (below + above) // 2
        tried[middle] = makes[middle]()
        if tried[middle].fits:
            below = middle
        else:
            above = middle
    return tried.get(below), tuple(tried[index] for index in sorted(tried))


def best(
    policy: str, shape: Shape, batches: Sequence[int], machine: Machine, update: UpdateTime = "step"
) -> tuple[Point | None, tuple[Point, ...]]:
    """The batch with the most flops a second, and all that were tried."""
    tried = tuple(point(policy, shape, batch, machine, update) for batch in batches)
    fitting = [one for one in tried if one.fits]
    return max(fitting, key=lambda one: one.teraflops, default=None), tried


def with_device(machine: Machine, nbytes: int) -> Machine:
    """``machine`` with so many bytes of device memory."""
    return replace(machine, device_capacity=nbytes)


def with_host(machine: Machine, nbytes: int) -> Machine:
    """``machine`` with so many bytes of host memory."""
    return replace(machine, host_capacity=nbytes, pinned_capacity=nbytes)


def with_disk(machine: Machine, *, there: bool) -> Machine:
    """``machine`` with its disk, or without one."""
    return machine if there else replace(machine, disk=None)
