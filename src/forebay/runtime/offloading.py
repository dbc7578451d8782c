"""Blocks of which some ops' results leave the device, or become codes, and that do not recompute.

A dispatch mode is on while such a block's module runs in a training pass, until it is known which of the tensors that
are saved in a pass those are (``save_order.py``). It knows ops by name (``opnames.py``), says what the named ones have
made, and leaves everything as it is: what autograd saves of it becomes a handle in ``saved.py``, and the device has its
bytes again when forward has let go of them and the copy is done. The mode goes on with a forward pre-hook and comes off
with a forward hook, inside those that expose and hide the parameters.

ReLU saves its own result, and asks of it only where it is above 0, before any other op runs: what it makes may be a
mask for that one save. Whoever saves it afterwards has the numbers themselves. So it is not masked where nothing is
saved for it, or by other hooks than forebay's.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, final

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from forebay.device.modes import OpMode
from forebay.runtime.opnames import OpCounter, OpNames, roots_made, roots_treated
from forebay.runtime.save_order import Due, SaveOrder
from forebay.runtime.saved import SavedTensors
from forebay.scheduling.activations import described
from forebay.treatments import Treatment

__all__ = ["Offloading"]


@final
class Offloading:
    """The blocks of one model whose activations are treated while forward goes on."""

    def __init__(self, saved: SavedTensors, order: SaveOrder) -> None:
        self._saved = saved
        self._order = order
        # Modules whose forward is running, innermost last, each with what its mode is on in (None: not on).
        self._open: list[tuple[nn.Module, AbstractContextManager[None] | None]] = []

    def attach(self, block: str, module: nn.Module, treatments: Iterable[Treatment]) -> list[RemovableHandle]:
        """Puts the hooks on ``module``. To be followed by the pre-hook that exposes its parameters, prepended."""
        ops = _Ops(block, treatments, self._saved, self._order)
        return [
            module.register_forward_pre_hook(partial(self._before, ops), prepend=True),
            # always_call: an exception in forward must take the mode off too.
            module.register_forward_hook(self._after, always_call=True),
        ]

    def abandon(self) -> None:
        """Takes off the modes that an interrupt left on."""
        while self._open:
            _, inside = self._open.pop()
            if inside is not None:
                inside.__exit__(None, None, None)

    def _before(self, ops: _Ops, module: nn.Module, args: Any) -> None:
        # Not in evaluation, and not where a checkpoint of the model's own decides what is kept. A call of a block
        # inside itself is part of the same forward.
        inside: AbstractContextManager[None] | None = None
        begins = torch.is_grad_enabled() and self._saved.innermost() and all(m is not module for m, _ in self._open)
        if begins and self._order.enter(ops.block):
            ops.restart()
            inside = ops.mode.on()
            inside.__enter__()
        self._open.append((module, inside))

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._open or self._open[-1][0] is not module:
            return  # its pre-hook did not come as far as opening
        _, inside = self._open.pop()
        if inside is not None:
            inside.__exit__(None, None, None)


@final
class _Ops:
    """The ops of one block's forward, which ``mode`` sees."""

    def __init__(self, block: str, treatments: Iterable[Treatment], saved: SavedTensors, order: SaveOrder) -> None:
        self.mode = OpMode(self._run)
        self.block = block
        self._treated = {(t.op, t.occurrence): t for t in treatments if t.changes_bytes}
        self._counter = OpCounter(OpNames(op for op, _ in self._treated))
        self._saved = saved
        self._order = order

    def restart(self) -> None:
        """A forward of the block's module begins."""
        self._counter.restart()

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        name = None if self._order.treating else self._counter.name(func)
        if name is None:
            return result
        treatment = self._treated.get(name)
        if treatment is not None:
            signs = func is torch.ops.aten.relu.default and self._saves(args[0])
            for number, tensor in roots_treated(roots_made(result, args, kwargs), treatment):
                self._order.made(tensor, Due(treatment, described(self.block, *name, number)), signs=signs)
        return result

    def _saves(self, read: torch.Tensor) -> bool:
        """Whether the op that runs, and that read ``read``, will save what it needs by way of forebay's hooks."""
        return read.requires_grad and torch.is_grad_enabled() and self._saved.innermost()
