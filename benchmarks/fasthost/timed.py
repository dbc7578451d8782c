"""A model whose compute is a timed wait: what a step on a device of its own is like where there is only the host.

On ``cpu`` compute and updates share the cores, so that nothing can be hidden. Here forward and backward of a layer take
a fixed time in the queue of a device that is not there (``queued``). All else is real: parameters are fetched, saved
and fetched again, gradients land, updates run, and the output of a layer depends on its parameters, so that a step on
old ones shows in the loss. The gradient of a layer is the same bytes each time, as if a device had made them in its own
memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import partial
from typing import Any, final

import torch
from torch import nn

from benchmarks.fasthost.queued import Compute
from forebay.arenas import arenas
from forebay.budgets import Budget, DiskBudget
from forebay.calls import Calls
from forebay.machine import SPARED_CORES
from forebay.memory import Tier
from forebay.plans import Placement, Plan, Streaming, Update
from forebay.runtime.blocks import find_blocks
from forebay.units import GiB

__all__ = ["AMPLE", "Pace", "TimedModel", "plan_by_hand", "spread"]

AMPLE = 64 * GiB
"""Bytes: a budget that nothing comes near to."""

STATES = ("exp_avg", "exp_avg_sq")


@final
class Pace:
    """Seconds that a layer takes in ``forward`` and in ``backward``, and the queue in which it does (``compute``)."""

    def __init__(self) -> None:
        self.forward = 0.0
        self.backward = 0.0
        self.compute = Compute()

    def spread(self, seconds: float, layers: int) -> None:
        """Has forward and backward of all layers take ``seconds``, backward twice as long as forward."""
        self.forward, self.backward = seconds / 3 / layers, 2 * seconds / 3 / layers


class _Timed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, pace: Pace, gradient: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        ctx.pace, ctx.gradient = pace, gradient
        made = torch.empty_like(x)
        # By address: an op in the queue of a device keeps no tensor alive, and no slot from being given away.
        job = partial(_add_row, made.detach(), x.detach(), weight.data_ptr(), weight.dtype)
        pace.compute.launch(job, pace.forward)
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (weight,) = ctx.saved_tensors  # which fetches it, as a layer's backward does
        # An alias of its own: autograd takes it over as the gradient without a copy.
        made = ctx.gradient.detach().view(weight.shape)
        ctx.pace.compute.launch(_nothing, ctx.pace.backward)
        return gradients[0], made, None, None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, pace: Pace) -> torch.Tensor:
        ctx.shape = x.shape
        made = torch.empty(())
        pace.compute.launch(partial(_add_up, made.detach(), x.detach()), 0.0)
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0].expand(ctx.shape), None


def _add_row(made: torch.Tensor, x: torch.Tensor, address: int, dtype: torch.dtype) -> None:
    row = (ctypes.c_char * (x.numel() * dtype.itemsize)).from_address(address)
    torch.add(x, torch.frombuffer(row, dtype=dtype), out=made)


def _add_up(made: torch.Tensor, x: torch.Tensor) -> None:
    made.copy_(x.sum())


def _nothing() -> None:
    return


@final
class _Layer(nn.Module):
    def __init__(self, pace: Pace, gradient: torch.Tensor, rows: int, width: int, number: int) -> None:
        super().__init__()
        start = torch.randn(rows, width, generator=torch.Generator().manual_seed(number)) * 0.02
        self.weight = nn.Parameter(start.to(gradient.dtype))
        self._pace = pace
        self._gradient = [gradient]  # in a list: it is no buffer of the model's

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = _Timed.apply(x, self.weight, self._pace, self._gradient[0])  # type: ignore[no-untyped-call]
        return made


@final
class TimedModel(nn.Module):
    """``layers`` layers of ``elements`` parameters of ``dtype`` each. Called with x of shape (1, width), fp32. What it
    returns is a loss to be read with ``read``."""

    WIDTH = 1024

    def __init__(self, layers: int, elements: int, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.pace = Pace()
        gradient = torch.full((elements,), 1e-3, dtype=dtype)
        rows = elements // self.WIDTH
        made = (_Layer(self.pace, gradient, rows, self.WIDTH, number) for number in range(layers))
        self.layers = nn.ModuleList(made)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        total: torch.Tensor = _Total.apply(x, self.pace)  # type: ignore[no-untyped-call]
        return total

    def read(self, loss: torch.Tensor) -> float:
        """The value of ``loss``, when all that was launched is done."""
        self.pace.compute.synchronize()
        return float(loss.detach())


def spread(model: nn.Module, share: float, *, first: bool = False) -> list[str]:
    """A ``share`` of the blocks, evenly over all of them, the one among them whose gradient lands first.

    Where updates take turns to run under backward and under the next forward, each has the time of its neighbours. With
    ``first`` it is the first of forward that is among them: it lands last and is wanted first, so that its update has
    the time of the norm. The second one is not, which would be updated when the first has landed and has to wait. That
    leaves the beginning of backward without an update, which has to have time to spare.
    """
    blocks = [block.name for block in find_blocks(model).model.blocks if block.gradient_nbytes]
    order = blocks if first else blocks[::-1]
    count = round(share * len(order))
    # Half a distance later with ``first``, but for that one itself: places are rounded and not cut.
    return [order[(2 * number * len(order) + first * count) // (2 * count)] for number in range(count)]


def plan_by_hand(
    model: nn.Module,
    *,
    states: Tier,
    overlap: bool,
    speculate: Sequence[str] = (),
    chunk: int,
    own_slots: bool = False,
    spared: int = SPARED_CORES,
    disk: DiskBudget | None = None,
    reads: Calls | None = None,
    writes: Calls | None = None,
    disk_copies: int = 1,
) -> Plan:
    """``states`` is where the optimizer's live. ``chunk`` are the elements of an update job; ``overlap`` lets updates
    run under the next forward, where they leave ``spared`` cores to others. Every block streams through four slots, or
    with ``own_slots`` has one of its own, to which nothing is fetched but what an update has changed."""
    blocks = find_blocks(model).model
    largest = max(block.nbytes for block in blocks.blocks)
    home = Tier.DEVICE if own_slots else Tier.HOST
    placements = tuple(Placement(b.name, Tier.DEVICE if b.held else home, Tier.HOST, states) for b in blocks.blocks)
    placements = tuple(p.updating(Update.AHEAD) if p.block in speculate else p for p in placements)
    streaming = Streaming(
        slots=() if own_slots else (largest,) * 4,
        prefetch_distance=3,
        gradient_window=2 * largest,
        update_chunk=chunk,
        overlap_update=overlap,
        spared_cores=spared,
        disk_reads=reads or Calls(),
        disk_writes=writes or Calls(),
        disk_copies=disk_copies,
    )
    sizes = arenas(blocks, placements, streaming, STATES)
    budget = Budget(AMPLE, disk=disk)
    return Plan("by hand", budget, placements, streaming, AMPLE, sizes.host, sizes.disk)
