"""Parameters on the device: leases of slots, and ``param.data`` while a block computes."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import final

import torch
from torch import nn

from forebay.device.base import Watch
from forebay.runtime.tensors import dtype_of
from forebay.scheduling.slots import Slot, SlotPool
from forebay.trace import Block

__all__ = ["BlockAccess"]


@final
class BlockAccess:
    """Gives out views of slots and knows when the last one is gone.

    A *lease* is a storage of its own over a slot's memory. Every tensor that is made from it, in Python or in
    autograd's graph, keeps it alive, so its finalizer says exactly when nobody can read the slot any more. That
    holds for saved tensors, for views that a module kept, and for what a checkpointed recomputation saves.
    """

    def __init__(self, pool: SlotPool, watch: Watch, device: torch.device) -> None:
        self._pool = pool
        self._watch = watch
        self._device = device
        self._live: dict[str, weakref.ref[torch.UntypedStorage]] = {}
        self._by_address: Mapping[int, Slot] = {s.buffer.untyped_storage().data_ptr(): s for s in pool.slots}

    def lease(self, block: str) -> torch.UntypedStorage:
        """The slot's memory with the parameters of ``block``, ready for compute."""
        slot = self._pool.acquire(block)
        reference = self._live.get(block)
        live = reference() if reference is not None else None
        if live is not None:
            self._pool.release(slot)  # the lease that lives holds the slot already
            return live
        lease: torch.UntypedStorage = slot.buffer.untyped_storage()[0 : slot.nbytes]
        self._watch.adopt(lease)
        weakref.finalize(lease, self._pool.release, slot).atexit = False
        self._live[block] = weakref.ref(lease)
        return lease

    def view(
        self,
        lease: torch.UntypedStorage,
        dtype: torch.dtype,
        offset: int,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
    ) -> torch.Tensor:
        """A tensor over a lease; ``offset`` and ``stride`` in elements."""
        return torch.empty(0, dtype=dtype, device=self._device).set_(lease, offset, shape, stride)

    def expose(self, block: Block, parameters: Mapping[str, nn.Parameter]) -> None:
        """Points ``param.data`` of the block's parameters at the slot."""
        lease = self.lease(block.name)
        for spec in block.parameters:
            dtype = dtype_of(spec)
            offset = spec.offset // dtype.itemsize
            parameters[spec.name].data = self.view(lease, dtype, offset, spec.shape, spec.stride)

    def slot_at(self, tensor: torch.Tensor) -> Slot | None:
        """The slot whose memory ``tensor`` is a view of, if it is one."""
        return self._by_address.get(tensor.untyped_storage().data_ptr())
