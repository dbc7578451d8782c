"""What the host takes for one op of a training step beside its kernel, and what streaming adds to that.

Measured on a model so small that its kernels take next to nothing: Python of the modules, autograd, torch's
dispatcher; and, streamed, forebay's hooks, its ledger and the handing over to lanes. On ``cpu`` all of it lies between
the kernels; a GPU hides it as long as its queue is full.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import final

import torch
from torch import nn
from torch.nn import functional

from forebay.device import open_device
from forebay.memory import Tier
from forebay.opening import open_session
from forebay.optim.rules import read_optimizer
from forebay.plans import Budget, Placement, Plan, Streaming
from forebay.profiler.capture import capture
from forebay.profiler.effort import Effort
from forebay.profiler.stopwatch import Stopwatch
from forebay.runtime.blocks import find_blocks
from forebay.runtime.hooks import session_of
from forebay.units import MiB

__all__ = ["Overhead", "host_overhead"]

WIDTH, HEADS, LAYERS, TOKENS = 16, 2, 6, 8
WARM, STEPS_PER_ROUND = 3, 4
ROOM = 64 * MiB
"""Bytes on device and host: far more than the model takes."""


@dataclass(frozen=True)
class Overhead:
    """Seconds per op of a step: ``launch`` in plain PyTorch, ``watch`` more when every block streams."""

    launch: float
    watch: float


@final
class _Layer(nn.Module):
    """A transformer layer as model libraries write them: many small modules."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.after = nn.LayerNorm(WIDTH)
        self.gate, self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.before(x)
        shape = (*rows.shape[:-1], HEADS, WIDTH // HEADS)
        query, key, value = (p(rows).view(shape).transpose(1, 2) for p in (self.query, self.key, self.value))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = torch.add(x, self.out(mixed.transpose(1, 2).reshape(rows.shape)))
        rows = self.after(x)
        gated: torch.Tensor = self.down(functional.silu(self.gate(rows)) * self.up(rows))
        return torch.add(x, gated)


def host_overhead(stopwatch: Stopwatch, effort: Effort) -> Overhead:
    """Measures both on the ``cpu`` device, in turns."""
    batch = torch.ones(1, TOKENS, WIDTH)
    ops = sum(1 for _ in capture(_model(), (batch,), "sgd").trace.ops())
    plain, streamed = _model(), _model()
    optimizer = torch.optim.SGD(streamed.parameters(), lr=0.0)
    streamed, _ = _stream(streamed, optimizer)
    cases = {"plain": plain, "streamed": streamed}
    taken: dict[str, list[float]] = {name: [] for name in cases}
    try:
        for _ in range(WARM + STEPS_PER_ROUND * effort.rounds):
            for name, model in cases.items():
                taken[name].append(stopwatch.seconds(partial(_pass, model, batch)))
                model.zero_grad()
    finally:
        _close(streamed)
    # The fastest quarter: whatever else the machine does only ever adds.
    least = {name: sorted(seconds[WARM:])[len(seconds) // 4] for name, seconds in taken.items()}
    return Overhead(least["plain"] / ops, max(0.0, least["streamed"] - least["plain"]) / ops)


def _model() -> nn.Module:
    with torch.random.fork_rng(devices=[]):  # the user's random numbers are not touched
        return nn.Sequential(*(_Layer() for _ in range(LAYERS)))


def _pass(model: nn.Module, batch: torch.Tensor) -> None:
    model(batch).sum().backward()


def _stream(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Puts every layer at home on the host, with three slots to stream through."""
    bound = find_blocks(model)
    largest = max(block.nbytes for block in bound.model.blocks)
    streaming = Streaming(
        slots=(largest,) * 3, prefetch_distance=2, gradient_window=largest, update_chunk=1024, overlap_update=False
    )
    placements = tuple(Placement(block.name, Tier.HOST, Tier.HOST, Tier.HOST) for block in bound.model.blocks)
    plan = Plan("overhead", Budget(ROOM, ROOM), placements, streaming, device=ROOM, host=ROOM, disk=0)
    device = open_device("cpu", ROOM)
    try:
        return open_session(model, optimizer, bound, read_optimizer(optimizer), plan, device, owns_device=True)
    except BaseException:
        device.close()
        raise


def _close(model: nn.Module) -> None:
    attachment = session_of(model)
    if attachment is not None:
        attachment.session.synchronize()
        attachment.detach()
        attachment.session.close()
