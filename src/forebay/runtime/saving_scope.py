"""Where in a forward what autograd saves goes through forebay's hooks.

Hooks for saved tensors cost some 5 microseconds for each tensor that is saved, and as many when it is read, whatever
they do, on the thread that launches a card's kernels (docs/log.md, 2026-11-30). Blocks that stay on the device, of a
plan that treats no activation, need none: nothing that they save is a view of a slot, or treated. While one of these
runs the hooks are off, and a hook on the node that made its result says when backward comes to it. Where every saved
tensor is counted (``vigil.py``) they stay on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from enum import Enum, auto
from types import TracebackType
from typing import Any, final

import torch
from torch import nn
from torch._C._autograd import _get_sequence_nr
from torch.utils._pytree import tree_leaves

from forebay.model import Block
from forebay.plans import Plan
from forebay.runtime.saved import SavedTensors

__all__ = ["Saves", "SavingScope", "quiet_blocks"]


class Saves(Enum):
    """What a pass saves that goes through the hooks: nothing, what has to, or all of it."""

    NOTHING = auto()
    NEEDED = auto()
    ALL = auto()


def quiet_blocks(plan: Plan, blocks: Iterable[Block], modules: Mapping[str, nn.Module]) -> frozenset[str]:
    """The ``blocks`` whose saved tensors need no hooks: of one module each, in which no module of another block is."""
    if plan.activations:
        return frozenset()  # what one block has made and is treated, another one saves
    resident = {placement.block for placement in plan.placements if placement.resident}
    whole = {b.name: modules[b.module] for b in blocks if b.module is not None and b.module in modules}
    owner = {modules[name]: block.name for block in blocks for name in block.modules if name in modules}
    return frozenset(
        name
        for name, module in whole.items()
        if name in resident
        and name not in plan.recompute
        and all(owner.get(inner, name) == name for inner in module.modules())
    )


class _Hooks(Enum):
    """Where the hooks of a pass are: on the thread's stack, off for a while, or gone with the end of the forward."""

    ON = auto()
    OFF = auto()
    GONE = auto()


@final
class SavingScope:
    """The length of one forward of the root, with the hooks ``saved``, off while blocks of ``quiet`` run. While one of
    ``streamed`` runs they are on: what is in it may read its slot."""

    def __init__(self, saved: SavedTensors, quiet: Collection[str], streamed: Collection[str]) -> None:
        self._saved = saved
        self._quiet = quiet
        self._streamed = streamed
        self._hooks = _Hooks.GONE
        # Of every module that runs, innermost last: where the hooks were before it, whether it reads a slot, and the
        # number of the node that autograd made next when it began.
        self._running: list[tuple[_Hooks, bool, int]] = []

    @classmethod
    def again(cls, saved: SavedTensors) -> SavingScope | None:
        """One for a module that begins in a backward, with the hooks on until it is closed: a reentrant checkpoint of
        the model's own runs it again, without any, and it saves parameters. None where it is not so."""
        if not torch.is_grad_enabled() or torch._C._current_graph_task_id() == -1:
            return None
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            return None
        return cls(saved, (), ()).__enter__()

    def __enter__(self) -> SavingScope:
        # Where somebody else's hooks are around the forward they would be the innermost while these are off.
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            self._quiet = ()
        self._push()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """The forward is over."""
        if self._hooks is _Hooks.ON:
            self._pop()
        self._hooks = _Hooks.GONE

    def begin(self, blocks: Iterable[Block]) -> None:
        """A module with ``blocks`` begins."""
        names = [block.name for block in blocks]
        slots = any(name in self._streamed for name in names) or (bool(self._running) and self._running[-1][1])
        self._running.append((self._hooks, slots, _get_sequence_nr()))
        self._turn(_Hooks.ON if slots or not all(name in self._quiet for name in names) else _Hooks.OFF)

    def end(self, output: Any, reached: Callable[[], None]) -> None:
        """The innermost module has ended. If the hooks were off, ``reached`` is called when backward comes to what it
        has made of ``output``."""
        was_off = self._hooks is _Hooks.OFF
        before, _, first = self._running.pop()
        self._turn(before)
        if was_off:
            _announce(output, first, reached)

    def _turn(self, wanted: _Hooks) -> None:
        """The hooks are as ``wanted``, if they are there at all and nobody else's are in between."""
        if wanted is _Hooks.ON and self._hooks is _Hooks.OFF:
            if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
                self._push()
        elif wanted is _Hooks.OFF and self._hooks is _Hooks.ON and self._saved.innermost():
            self._pop()

    def _push(self) -> None:
        torch._C._autograd._push_saved_tensors_default_hooks(self._saved.pack, self._saved.unpack)
        self._hooks = _Hooks.ON

    def _pop(self) -> None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
        self._hooks = _Hooks.OFF


def _announce(output: Any, first: int, reached: Callable[[], None]) -> None:
    """Has ``reached`` called when backward comes to one of the nodes that made ``output``, from the ``first`` on: what
    is only handed on belongs to who made it."""

    def before(gradients: Any) -> None:
        reached()

    for leaf in tree_leaves(output):
        if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None and leaf.grad_fn._sequence_nr() >= first:
            leaf.grad_fn.register_prehook(before)
