"""What torch takes in backward for a view that forward has written to, which fake tensors do not show.

An op in place on a view (the result of a linear layer for more than two dimensions is one) is one on its base. Whoever
reads a view after what it is of was written to sends its gradient through ``AsStridedBackward``, which copies it into
zeros as large as the base (``as_strided_backward`` in torch's ``FunctionsManual.cpp``). Of tensors of a subclass, and
fake ones are such, torch goes back over the ops that made the view instead (``VariableTypeUtils.h``), and copies
nothing where it has all of the base.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import final

import torch
from torch._ops import OpOverload

__all__ = ["WrittenViews"]


@final
class WrittenViews:
    """Has a step under fake tensors copy the gradients of such views, as one with real tensors does."""

    def __init__(self) -> None:
        self._made = defaultdict[int, list[weakref.ref[torch.Tensor]]](list)
        self._written: dict[int, weakref.ref[torch.Tensor]] = {}

    def make(self, func: OpOverload, root: int, tensors: Iterable[torch.Tensor]) -> None:
        """The op ``func`` has made ``tensors``, views of the storage with the number ``root``."""
        # No gradient goes through what is detached; and a layer that is cast in its forward (``Module.to``) has torch
        # swap detached parameters, which it refuses where anything refers to one weakly.
        if torch.is_grad_enabled() and func is not torch.ops.aten.detach.default:
            self._made[root].extend(map(weakref.ref, tensors))

    def write(self, root: int) -> None:
        """An op is about to write to the storage."""
        if torch.is_grad_enabled() and root in self._made:
            views = [(view, found) for view in self._made[root] if (found := view()) is not None]
            self._made[root] = [view for view, _ in views]
            self._written |= {id(found): view for view, found in views if _has_all(found)}

    def read(self, tensors: Iterable[torch.Tensor]) -> None:
        """An op reads ``tensors`` and writes to none of them. Only now they have the history that was made anew: torch
        does so when somebody asks for it, and not where a dispatch mode is asked."""
        if not self._written or not torch.is_grad_enabled():
            return
        for tensor in tensors:
            found = self._written.get(id(tensor))
            if found is not None:
                del self._written[id(tensor)]
                if found() is tensor and tensor.requires_grad:
                    tensor.register_hook(_copying(tensor))


def _has_all(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is a view of all elements of another. Of a part torch copies the gradient either way."""
    base = tensor._base
    return base is not None and base.dtype is tensor.dtype and base.numel() == tensor.numel() > 0


def _copying(tensor: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    base = tensor._base
    assert base is not None
    shape, stride, numel = tensor.shape, tensor.stride(), base.numel()
    offset = tensor.storage_offset() - base.storage_offset()

    def copied(gradient: torch.Tensor) -> torch.Tensor:
        there = gradient.new_zeros(numel).as_strided(shape, stride, offset)
        there.copy_(gradient)
        return there

    return copied
