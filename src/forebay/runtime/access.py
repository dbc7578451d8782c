"""Parameters on the device: leases of slots, and ``param.data`` while a block computes."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import NamedTuple, final

import torch
from torch import nn

from forebay.device.base import Watch
from forebay.errors import DeviceOutOfMemory, ModelError
from forebay.model import Block, Parameter
from forebay.runtime.tensors import dtype_of
from forebay.scheduling.slots import Slot, SlotPool

__all__ = ["BlockAccess"]


class _Place(NamedTuple):
    """Where a parameter is in its slot; ``offset`` and ``stride`` in elements."""

    name: str
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, spec: Parameter) -> _Place:
        dtype = dtype_of(spec)
        return cls(spec.name, dtype, spec.offset // dtype.itemsize, spec.shape, spec.stride)


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
        # Whether a backward runs that is differentiated itself: its graph keeps every lease that it takes.
        self.differentiated = False
        self._live: dict[str, weakref.ref[torch.UntypedStorage]] = {}
        # By block, what ``expose`` does with each of its parameters.
        self._exposed: dict[str, tuple[_Place, ...]] = {}
        self._by_address: Mapping[int, Slot] = {s.buffer.untyped_storage().data_ptr(): s for s in pool.slots}

    def lease(self, block: str) -> torch.UntypedStorage:
        """The slot's memory with the parameters of ``block``, ready for compute. Raises ``DeviceOutOfMemory`` where no
        slot is free, and ``ModelError`` where a backward that is ``differentiated`` has them all."""
        at_hand = self.at_hand(block)
        if at_hand is not None:
            return at_hand
        try:
            slot = self._pool.acquire(block)
        except DeviceOutOfMemory as error:
            if not self.differentiated:
                raise
            raise ModelError(
                f"backward with create_graph=True keeps on the device the parameters of every block that it comes to, "
                f"and there is no slot left for block {block}: give prepare() a loss_fn that makes the second "
                f"derivative, which is planned with what it keeps, or policy='keep', which has all blocks there, if "
                f"device_memory allows it; else train this model without one"
            ) from error
        live = self._lives(block)
        if live is not None:
            self._pool.release(slot)  # the lease that lives holds the slot already
            return live
        lease: torch.UntypedStorage = slot.buffer.untyped_storage()[0 : slot.nbytes]
        self._watch.adopt(lease)
        weakref.finalize(lease, self._pool.release, slot).atexit = False
        self._live[block] = weakref.ref(lease)
        return lease

    def at_hand(self, block: str) -> torch.UntypedStorage | None:
        """What ``lease`` would return, if it need neither wait nor begin anything: most tensors that backward asks for
        are of the block that computes."""
        live = self._lives(block)
        return live if live is not None and self._pool.goes_on(block) else None

    def _lives(self, block: str) -> torch.UntypedStorage | None:
        reference = self._live.get(block)
        return None if reference is None else reference()

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
        places = self._exposed.get(block.name)
        if places is None:
            places = self._exposed[block.name] = tuple(map(_Place.of, block.parameters))
        for name, dtype, offset, shape, stride in places:
            parameters[name].data = self.view(lease, dtype, offset, shape, stride)

    def renew(self, block: str) -> None:
        """What a slot holds of ``block`` is not what is at home. Raises ``ForebayError`` while a graph may read it."""
        self._pool.invalidate(block)

    def slot_at(self, tensor: torch.Tensor) -> Slot | None:
        """The slot whose memory ``tensor`` is a view of, if it is one."""
        return self._by_address.get(tensor.untyped_storage().data_ptr())
