"""Saved tensors: what autograd keeps for backward, with every view of a slot replaced by a reference to its block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch

from forebay.device.base import Watch
from forebay.memory import Kind
from forebay.runtime.access import BlockAccess

__all__ = ["SavedTensors", "SlotReference"]


@dataclass(frozen=True)
class SlotReference:
    """A saved view of a block's parameters; ``offset`` and ``stride`` in elements."""

    block: str
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@final
class SavedTensors:
    """The pair of hooks for ``torch.autograd.graph.saved_tensors_hooks``.

    ``on_unpack`` is called before a reference is followed: backward has begun.
    """

    def __init__(self, access: BlockAccess, watch: Watch, on_unpack: Callable[[], None]) -> None:
        self._access = access
        self._watch = watch
        self._on_unpack = on_unpack

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | SlotReference:
        """A reference for a view of a slot; any other tensor is kept, and counted as an activation."""
        if type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter:
            return _without_graph(tensor)
        if tensor.layout is not torch.strided:
            return _without_graph(tensor)  # a sparse tensor has no storage of its own
        slot = self._access.slot_at(tensor)
        if slot is None or slot.occupant is None:
            self._watch.attribute(tensor, Kind.ACTIVATION)
            return _without_graph(tensor)
        return SlotReference(
            slot.occupant, tensor.dtype, int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride())
        )

    def unpack(self, packed: torch.Tensor | SlotReference) -> torch.Tensor:
        """The tensor again; a block that has left the device is fetched."""
        if isinstance(packed, torch.Tensor):
            return packed
        self._on_unpack()
        lease = self._access.lease(packed.block)
        return self._access.view(lease, packed.dtype, packed.offset, packed.shape, packed.stride)


def _without_graph(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` without the node that made it. A node that keeps its own output, by way of these hooks, would hold
    itself: a graph that no backward frees (a forward that failed, a loss that nobody wanted) would stay for good."""
    return tensor if tensor.grad_fn is None else tensor.detach()
