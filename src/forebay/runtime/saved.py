"""Saved tensors: what autograd keeps for backward. A view of a slot is replaced by a reference to its block, a view of
what was treated (``stash.py``) by a reference to that. References are tuples: one is made for every saved tensor, and a
frozen dataclass takes several times as long."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from types import MethodType
from typing import NamedTuple, final

import torch
from torch import nn

from forebay.device.base import Watch
from forebay.errors import ModelError
from forebay.memory import Kind
from forebay.model import Block
from forebay.runtime.access import BlockAccess
from forebay.runtime.measure import Measurement
from forebay.runtime.save_order import SaveOrder
from forebay.runtime.stash import Ticket
from forebay.runtime.unseen import Unseen

__all__ = ["Kept", "SavedTensors", "SlotReference", "Treated", "modified", "take_off"]


class SlotReference(NamedTuple):
    """A saved view of ``parameter``, which is one of ``block``; ``offset`` and ``stride`` in elements. ``version`` is
    torch's count of changes to the parameter when it was saved, ``user`` the block that was running."""

    block: str
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    user: str
    parameter: str
    version: int


class Kept(NamedTuple):
    """Any other saved tensor, with torch's count of in-place changes to it (``version``) when it was saved."""

    tensor: torch.Tensor
    version: int
    user: str


class Treated(NamedTuple):
    """A saved view of a storage that was treated; ``offset`` and ``stride`` in elements.

    ``witness`` is a tensor without bytes that shares torch's count of in-place changes with the one saved.
    """

    ticket: Ticket
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    witness: torch.Tensor
    user: str


Packed = torch.Tensor | Kept | Treated | SlotReference


@final
class SavedTensors:
    """The pair of hooks for ``torch.autograd.graph.saved_tensors_hooks``.

    ``parameters`` are those of the model's ``blocks``. ``order`` has treated what is to be. ``measure`` says which
    block runs when a tensor is saved, and ``on_unpack`` is told that block when the tensor is asked for: backward has
    come to it. ``unseen`` counts what compiled blocks save.
    """

    def __init__(
        self,
        blocks: Iterable[Block],
        parameters: Mapping[str, nn.Parameter],
        access: BlockAccess,
        order: SaveOrder,
        watch: Watch,
        measure: Measurement,
        on_unpack: Callable[[str], None],
    ) -> None:
        self._parameters = parameters
        self._places = {b.name: ([p.offset for p in b.parameters], [p.name for p in b.parameters]) for b in blocks}
        self._access = access
        self._order = order
        self._watch = watch
        self._measure = measure
        self._on_unpack = on_unpack
        self.unseen = Unseen(watch)

    def pack(self, tensor: torch.Tensor) -> Packed:
        """A reference for a view of a slot or of what was treated; any other tensor is kept. Both but the first are
        counted as activations."""
        if type(tensor) is not torch.Tensor and not isinstance(tensor, torch.nn.Parameter):
            return _without_graph(tensor)
        if tensor.layout is not torch.strided:
            return _without_graph(tensor)  # a sparse tensor has no storage of its own
        slot = self._access.slot_at(tensor)
        if slot is None or slot.occupant is None:
            self.unseen.saved(tensor)
            self._watch.attribute(tensor, Kind.ACTIVATION)
            ticket = self._order.saved(tensor)
            if ticket is None or tensor.is_conj() or tensor.is_neg() or not ticket.admits():
                return Kept(_without_graph(tensor), tensor._version, self._measure.block)
            return self._treated(ticket, tensor)
        return self._reference(slot.occupant, tensor)

    def _reference(self, block: str, tensor: torch.Tensor) -> SlotReference:
        offset = int(tensor.storage_offset())
        offsets, names = self._places[block]
        parameter = names[max(bisect_right(offsets, offset * tensor.itemsize) - 1, 0)]
        # The parameter's own count: that of ``tensor`` is another where it was made from ``parameter.data``.
        version = self._parameters[parameter]._version
        place = (offset, tuple(tensor.shape), tuple(tensor.stride()))
        return SlotReference(block, tensor.dtype, *place, self._measure.block, parameter, version)

    def _treated(self, ticket: Ticket, tensor: torch.Tensor) -> Treated:
        witness = tensor.detach()
        # Only this lets go of the storage and goes on counting with the tensor; the handle must not hold the bytes.
        witness.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        place = (int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride()))
        return Treated(ticket, tensor.dtype, *place, witness, self._measure.block)

    def unpack(self, packed: Packed) -> torch.Tensor:
        """The tensor again; a block that has left the device is fetched, what was treated is brought back.

        Raises ``ModelError`` for a tensor that was changed in place since it was saved, a parameter by a step say, as
        autograd does by itself where there are no hooks.
        """
        if isinstance(packed, torch.Tensor):
            return packed
        if not self._measure.goes_on(packed.user):
            self._on_unpack(packed.user)
        if isinstance(packed, Kept):
            if packed.tensor._version != packed.version:
                raise _changed(packed.tensor, packed.version, packed.tensor.shape, packed.user)
            return packed.tensor
        if isinstance(packed, Treated):
            if packed.witness._version != packed.ticket.version:
                raise _changed(packed.witness, packed.ticket.version, packed.shape, packed.user)
        else:
            version = self._parameters[packed.parameter]._version
            if version != packed.version:
                raise modified(packed.block, packed.parameter, version, packed.version)
        storage = self._storage(packed)
        return self._access.view(storage, packed.dtype, packed.offset, packed.shape, packed.stride)

    def _storage(self, packed: Treated | SlotReference) -> torch.UntypedStorage:
        """The bytes of ``packed`` on the device; compute may have to wait for them."""
        if isinstance(packed, SlotReference) and (at_hand := self._access.at_hand(packed.block)) is not None:
            return at_hand
        since = self._measure.now()
        if isinstance(packed, SlotReference):
            storage = self._access.lease(packed.block)
        else:
            storage = packed.ticket.tensor().untyped_storage()
        self._measure.waited(since)
        return storage

    def counts_with(self, watch: Watch) -> bool:
        """Whether what goes through these hooks is counted by ``watch``."""
        return self._watch is watch

    def innermost(self) -> bool:
        """Whether these hooks are the ones that a tensor saved now would go through: not so outside of the model's
        forward, and inside a checkpoint of the model's own, which decides by itself what is kept."""
        top = torch._C._autograd._top_saved_tensors_default_hooks(True)
        return top is not None and top[0] == self.pack


def take_off(watch: Watch) -> None:
    """Takes off the calling thread's stack the hooks that count with ``watch``, if they are on top.

    After a KeyboardInterrupt in a forward torch calls none of its hooks, so that they stay where that forward had put
    them. The next pass of the model takes them off, as does closing it; of a model that is dropped nobody else does.
    """
    while True:
        top = torch._C._autograd._top_saved_tensors_default_hooks(True)
        saved = top[0].__self__ if top is not None and isinstance(top[0], MethodType) else None
        if not isinstance(saved, SavedTensors) or not saved.counts_with(watch):
            return
        torch._C._autograd._pop_saved_tensors_default_hooks()


def modified(block: str, name: str, version: int, expected: int) -> ModelError:
    """The error, in torch's words, for a parameter that backward needs as forward has read it, changed since then."""
    return ModelError(
        f"one of the variables needed for gradient computation has been modified by an inplace operation: parameter "
        f"{name} of block {block} is at version {version}; expected version {expected} instead. An optimizer.step() or "
        f"a load_state_dict() came between a forward and its backward: call loss.backward() before it, or run the "
        f"forward again after it"
    )


def _changed(tensor: torch.Tensor, version: int, shape: tuple[int, ...], user: str) -> ModelError:
    """The error for a ``tensor`` that was changed in place since it was saved with ``version``."""
    where = f" in block {user}" if user else ""
    return ModelError(
        f"a tensor of shape {tuple(shape)} that was saved for backward{where} was changed in place afterwards "
        f"(version {tensor._version}, saved at {version}); change a copy of it (x = x + y, not x += y)"
    )


def _without_graph(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` without the node that made it. A node that keeps its own output, by way of these hooks, would hold
    itself: a graph that no backward frees (a forward that failed, a loss that nobody wanted) would stay for good."""
    return tensor if tensor.grad_fn is None else tensor.detach()
