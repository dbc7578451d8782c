"""What compiled blocks make where no dispatch mode sees it, counted when it is handed on.

Compiled code may take its memory without telling PyTorch's dispatcher (inductor does). What stays of it comes out in
three places: as what autograd saves, as the block's result, and as a gradient. What it takes only while it runs comes
out nowhere; of that the plan's promise is what was measured before (``profiler.compiled``).
"""

from __future__ import annotations

import weakref
from typing import Any, final

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from forebay.device.base import Watch
from forebay.device.compiling import outside_of_graphs
from forebay.memory import Kind

__all__ = ["Unseen"]


@final
class Unseen:
    """The compiled blocks of one model whose forward is running, innermost last, each with the storages that it was
    given: those are counted by whoever made them. The blocks are held weakly: an interrupt may leave saved-tensor hooks
    on, which hold this."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._running: list[tuple[weakref.ref[nn.Module], frozenset[int]]] = []

    def attach(self, module: nn.Module) -> list[RemovableHandle]:
        """Puts the hooks on ``module``. To be followed by the pre-hook that exposes its parameters, prepended."""
        return [
            # Not prepended: the parameters are exposed then, and what the user's hooks made of the arguments is given.
            module.register_forward_pre_hook(outside_of_graphs(self._before), with_kwargs=True),
            # always_call: an exception in forward must take the module off the list too.
            module.register_forward_hook(outside_of_graphs(self._after), prepend=True, always_call=True),
        ]

    def abandon(self) -> None:
        """Forgets what an interrupt left running."""
        self._running.clear()

    def saved(self, tensor: torch.Tensor) -> None:
        """``tensor`` is saved for backward."""
        if self._running and tensor.untyped_storage()._cdata not in self._running[-1][1]:
            self._watch.found(tensor, Kind.ACTIVATION)

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        given = (*tree_leaves((args, kwargs)), *module.parameters(), *module.buffers())
        self._running.append((weakref.ref(module), frozenset(_keys(given))))

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._running or self._running[-1][0]() is not module:
            return  # its pre-hook did not come so far
        _, given = self._running.pop()
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata not in given:
                self._watch.found(leaf, Kind.TEMPORARY)


def _keys(values: Any) -> list[int]:
    return [value.untyped_storage()._cdata for value in values if type(value) in (torch.Tensor, nn.Parameter)]
