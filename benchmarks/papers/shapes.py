"""GPT-shaped models of the sizes that papers train, and plans for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

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

__all__ = ["HEAD", "SEQ", "Gpt", "best", "largest", "point", "traced", "with_disk", "with_host"]

SEQ = 1024
"""Tokens in a sequence, in all of these papers."""

VOCABULARY = 50257
HEAD = 128
"""Elements of a head. How many heads there are decides nothing here."""

WHOLE_DISK = "disk"


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

    def __str__(self) -> str:
        return f"{self.parameters / 1e9:.1f}B ({self.layers} x {self.hidden})"


@lru_cache(maxsize=4)  # a trace of some hundred layers is large, and claims go through the batches of one model
def traced(shape: Gpt, batch: int) -> Trace:
    """A step of ``batch`` sequences. Nothing is computed, and no weight has memory."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    import forebay

    sizes = {"n_embd": shape.hidden, "n_layer": shape.layers, "n_head": shape.hidden // HEAD, "n_positions": SEQ}
    config: Any = GPT2Config(vocab_size=VOCABULARY, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **sizes)
    with torch.device("meta"):
        model: Any = GPT2LMHeadModel(config)
    tokens = torch.zeros((batch, SEQ), dtype=torch.int64, device="meta")
    return forebay.profile(model.half().train(), {"input_ids": tokens, "labels": tokens}, device="cuda")


def point(policy: str, shape: Gpt, batch: int, machine: Machine, update: UpdateTime = "step") -> Point:
    """The plan of ``policy`` for a step of ``batch`` sequences, with all that ``machine`` has. ``update``: see
    ``planners.Problem``."""
    trace = traced(shape, batch)
    disk = None if machine.disk is None else DiskBudget(WHOLE_DISK, machine.disk.capacity)
    made = Point(policy, machine.name, str(shape), shape.parameters, batch, None, shape.flops(batch))
    with collector_paused():
        bench = Bench(problem_of(trace, machine, Budget(machine.device_capacity, None, None, disk), update=update))
        try:
            plan = make_plan(bench.problem, policy, bench)
        except DoesNotFit as refusal:
            return replace(made, refusal=str(refusal))
        peaks = plan.peaks(1)
        seconds = plan.step_seconds
    return replace(made, step_seconds=seconds, device=peaks[Tier.DEVICE], host=peaks[Tier.HOST], disk=peaks[Tier.DISK])


def largest(policy: str, shapes: Sequence[Gpt], batch: int, machine: Machine) -> tuple[Point | None, tuple[Point, ...]]:
    """The largest of ``shapes``, which are from small to large, that fits (None: none does), and all that were tried:
    what is larger than one that does not fit is not."""
    tried: dict[int, Point] = {}
    below, above = -1, len(shapes)
    while above - below > 1:
        middle = (below + above) // 2
        tried[middle] = point(policy, shapes[middle], batch, machine)
        if tried[middle].fits:
            below = middle
        else:
            above = middle
    return tried.get(below), tuple(tried[index] for index in sorted(tried))


def best(
    policy: str, shape: Gpt, batches: Sequence[int], machine: Machine, update: UpdateTime = "step"
) -> tuple[Point | None, tuple[Point, ...]]:
    """The batch with the most flops a second, and all that were tried."""
    tried = tuple(point(policy, shape, batch, machine, update) for batch in batches)
    fitting = [one for one in tried if one.fits]
    return max(fitting, key=lambda one: one.teraflops, default=None), tried


def with_host(machine: Machine, nbytes: int) -> Machine:
    """``machine`` with so many bytes of host memory."""
    return replace(machine, host_capacity=nbytes, pinned_capacity=nbytes)


def with_disk(machine: Machine, *, there: bool) -> Machine:
    """``machine`` with its disk, or without one."""
    return machine if there else replace(machine, disk=None)
