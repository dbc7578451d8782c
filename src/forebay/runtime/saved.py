"""Saved tensors: what autograd keeps for backward, with every view of a slot replaced by a reference to its block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch

from forebay.device.base import Watch
from forebay.errors import ModelError
from forebay.memory import Kind
from forebay.runtime.access import BlockAccess
from forebay.runtime.measure import Measurement

__all__ = ["Kept", "SavedTensors", "SlotReference"]


@dataclass(frozen=True, slots=True)
class SlotReference:
    """A saved view of a block's parameters; ``offset`` and ``stride`` in elements. ``user`` is the block that was
    running."""

    block: str
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    user: str


@dataclass(frozen=True, slots=True)
class Kept:
    """Any other saved tensor, with torch's count of in-place changes to it (``version``) when it was saved."""

    tensor: torch.Tensor
    version: int
    user: str


@final
class SavedTensors:
    """The pair of hooks for ``torch.autograd.graph.saved_tensors_hooks``.

    ``measure`` says which block runs when a tensor is saved, and is told that block when the tensor is asked for:
    backward has come to it. ``on_unpack`` is called before that.
    """

    def __init__(self, access: BlockAccess, watch: Watch, measure: Measurement, on_unpack: Callable[[], None]) -> None:
        self._access = access
        self._watch = watch
        self._measure = measure
        self._on_unpack = on_unpack

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | Kept | SlotReference:
        """A reference for a view of a slot; any other tensor is kept, and counted as an activation."""
        if type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter:
            return _without_graph(tensor)
        if tensor.layout is not torch.strided:
            return _without_graph(tensor)  # a sparse tensor has no storage of its own
        slot = self._access.slot_at(tensor)
        if slot is None or slot.occupant is None:
            self._watch.attribute(tensor, Kind.ACTIVATION)
            return Kept(_without_graph(tensor), tensor._version, self._measure.block)
        return SlotReference(
            slot.occupant,
            tensor.dtype,
            int(tensor.storage_offset()),
            tuple(tensor.shape),
            tuple(tensor.stride()),
            self._measure.block,
        )

    def unpack(self, packed: torch.Tensor | Kept | SlotReference) -> torch.Tensor:
        """The tensor again; a block that has left the device is fetched.

        Raises ``ModelError`` for a tensor that was changed in place since it was saved, as autograd does by itself
        where there are no hooks.
        """
        if isinstance(packed, torch.Tensor):
            return packed
        self._on_unpack()
        self._measure.unpacked(packed.user)
        if isinstance(packed, Kept):
            if packed.tensor._version != packed.version:
                raise ModelError(_changed(packed))
            return packed.tensor
        since = self._measure.now()
        lease = self._access.lease(packed.block)
        self._measure.waited(since)
        return self._access.view(lease, packed.dtype, packed.offset, packed.shape, packed.stride)

    def innermost(self) -> bool:
        """Whether these hooks are the ones that a tensor saved now would go through: not so outside of the model's
        forward, and inside a checkpoint of the model's own, which decides by itself what is kept."""
        top = torch._C._autograd._top_saved_tensors_default_hooks(True)
        return top is not None and top[0] == self.pack


def _changed(kept: Kept) -> str:
    where = f" in block {kept.user}" if kept.user else ""
    return (
        f"a tensor of shape {tuple(kept.tensor.shape)} that was saved for backward{where} was changed in place "
        f"afterwards (version {kept.tensor._version}, saved at {kept.version}); change a copy of it (x = x + y, not "
        f"x += y)"
    )


def _without_graph(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` without the node that made it. A node that keeps its own output, by way of these hooks, would hold
    itself: a graph that no backward frees (a forward that failed, a loss that nobody wanted) would stay for good."""
    return tensor if tensor.grad_fn is None else tensor.detach()
