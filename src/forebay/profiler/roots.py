"""The storages of a step: which tensor lies in which, and when each one goes away."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from torch.utils._python_dispatch import _disable_current_modes

from forebay.memory import Kind

__all__ = ["Handle", "Made", "Root", "Roots"]

Geometry = tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...]]
"""Where a tensor lies in its root: offset in bytes, dtype, shape, stride in elements."""


@final
@dataclass(slots=True, eq=False)
class Root:
    """One storage, and what is known of it while the step is recorded.

    ``source`` is its kind if it was there before the step. ``handles`` are autograd's saved tensors that need it,
    ``aliases`` storages that stand for it again because backward has asked for it. ``dropped`` and ``unsaved`` are
    numbers of ops, or None as long as it has not happened. ``trusted`` says that its values, where it has any, are
    what they would be, ``picked`` that they follow from picks that were made up; ``copy`` are those that autograd was
    given, as long as it keeps them. ``call`` is that of the module which makes it; ``spent`` and ``released`` are as
    in ``trace.Op``.
    """

    number: int
    nbytes: int
    source: Kind | None
    name: str
    born: int
    call: int
    base: int = -1
    handles: int = 0
    aliases: int = 0
    dropped: int | None = None
    unsaved: int | None = None
    spent: int | None = None
    released: int | None = None
    gradient: bool = False
    trusted: bool = True
    picked: bool = False
    copy: weakref.ref[torch.UntypedStorage] | None = None

    @property
    def live(self) -> bool:
        """Whether something the step made is in memory now; a gradient is the plan's to count."""
        if self.source is not None or self.gradient:
            return False
        return self.dropped is None or self.handles > 0 or self.aliases > 0


@final
@dataclass(slots=True)
class Made:
    """A tensor by number: where it lies, its own bytes, and the op after which it is first known."""

    root: Root
    nbytes: int
    dtype: str
    op: int
    packed: bool = False


@final
class Handle:
    """What autograd keeps instead of a tensor: enough to make one again, and nothing of its storage."""

    __slots__ = ("_released", "call", "dtype", "offset", "read", "root", "shape", "stride", "values")

    def __init__(
        self,
        root: Root,
        offset: int,
        tensor: torch.Tensor,
        values: torch.UntypedStorage | None,
        call: int,
        released: Callable[[Handle], None],
    ) -> None:
        self.values = values
        self.root = root
        self.offset = offset
        self.dtype = tensor.dtype
        self.shape = tensor.shape
        self.stride = tensor.stride()
        self.call = call
        self.read = False
        self._released = released
        root.handles += 1

    def restored(self) -> torch.Tensor:
        """The tensor over its ``values``, as a storage of its own."""
        if self.values is None:
            raise ValueError("a handle of a fake tensor has no values")
        empty = torch.empty(0, dtype=self.dtype, device=self.values.device)
        return empty.set_(
            self.values[0 : self.values.nbytes()], self.offset // self.dtype.itemsize, self.shape, self.stride
        )

    def __del__(self) -> None:
        self.root.handles -= 1
        self._released(self)


@final
class _Place(weakref.ref[torch.UntypedStorage]):
    """A storage that is watched: its root, and where in it the storage begins (bytes). ``alias``: it stands for what
    was saved in the call of that number."""

    __slots__ = ("alias", "key", "offset", "root")

    def __new__(
        cls, storage: torch.UntypedStorage, died: Callable[[_Place], None], root: Root, offset: int, alias: int | None
    ) -> _Place:
        return super().__new__(cls, storage, died)

    def __init__(
        self, storage: torch.UntypedStorage, died: Callable[[_Place], None], root: Root, offset: int, alias: int | None
    ) -> None:
        super().__init__(storage, died)  # type: ignore[call-arg]
        self.root = root
        self.offset = offset
        self.alias = alias
        self.key = storage._cdata


@final
class Roots:
    """Finds the root of every tensor by its storage, and notes deaths.

    Tensors of the same root, place, shape and dtype are one tensor here, whatever Python objects stand for it.
    ``now`` is the number of the latest op: what dies, dies after it. ``call`` is the number of the call of a block's
    module that runs, 0 outside of all. ``kept`` says, by call, after which op the last tensor saved in it was let go;
    ``asked`` are the calls of whose saved tensors backward has asked for one. ``packed`` says after which
    op autograd has first saved a tensor of a root, in that order.
    """

    def __init__(self) -> None:
        self.now = 0
        self.call = 0
        self.kept: dict[int, int] = {}
        self.asked: set[int] = set()
        self.packed: dict[Root, int] = {}
        self.roots: list[Root] = []
        self.made: list[Made] = []
        self._places: dict[int, _Place] = {}
        self._numbers: dict[tuple[int, Geometry], int] = {}

    def find(self, tensor: torch.Tensor) -> tuple[Root, int] | None:
        """The root of ``tensor`` and its offset in bytes there, or None for a storage not seen before."""
        place = self._places.get(tensor.untyped_storage()._cdata)
        if place is None or place() is None:
            return None
        return place.root, place.offset + int(tensor.storage_offset()) * tensor.element_size()

    def add(
        self, tensor: torch.Tensor, *, nbytes: int | None = None, source: Kind | None = None, name: str = ""
    ) -> Root:
        """A new root: the storage of ``tensor``, of its size unless ``nbytes`` are given."""
        storage = tensor.untyped_storage()
        size = storage.nbytes() if nbytes is None else nbytes
        root = Root(len(self.roots), size, source, name, self.now, self.call)
        self.roots.append(root)
        self._watch(storage, root, 0, alias=None)
        root.base = self.number(tensor)
        return root

    def alias(self, tensor: torch.Tensor, handle: Handle) -> None:
        """``tensor`` has a storage of its own that stands for what ``handle`` keeps."""
        handle.root.aliases += 1
        handle.read = True
        self.asked.add(handle.call)
        offset = handle.offset if handle.values is None else 0
        self._watch(tensor.untyped_storage(), handle.root, offset, alias=handle.call)

    def number(self, tensor: torch.Tensor) -> int:
        """The number of ``tensor``, whose root is known; a new number if nothing like it was there."""
        found = self.find(tensor)
        if found is None:
            raise KeyError("the storage of this tensor was never seen")
        root, offset = found
        key = (root.number, (offset, tensor.dtype, tuple(tensor.shape), tensor.stride()))
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.made)
            name = str(tensor.dtype).removeprefix("torch.")
            self.made.append(Made(root, tensor.nbytes, name, self.now))
        return number

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` has a number already."""
        found = self.find(tensor)
        if found is None:
            return False
        return (found[0].number, (found[1], tensor.dtype, tuple(tensor.shape), tensor.stride())) in self._numbers

    def pack(self, tensor: torch.Tensor, *, with_values: bool) -> Handle | None:
        """Notes that autograd saves ``tensor``; None if its storage was never seen."""
        found = self.find(tensor)
        if found is None:
            return None
        root, offset = found
        self.packed.setdefault(root, self.now)
        self.made[root.base].packed = self.made[self.number(tensor)].packed = True
        return Handle(root, offset, tensor, _copy(root, tensor) if with_values else None, self.call, self._let_go)

    def live_nbytes(self) -> int:
        """Bytes of what the step made and still holds, gradients left out."""
        return sum(root.nbytes for root in self.roots if root.live)

    def _watch(self, storage: torch.UntypedStorage, root: Root, offset: int, *, alias: int | None) -> None:
        place = _Place(storage, self._died, root, offset, alias)
        self._places[place.key] = place

    def _died(self, place: _Place) -> None:
        if self._places.get(place.key) is place:
            del self._places[place.key]
        if place.alias is None:
            place.root.dropped = self.now
            return
        place.root.aliases -= 1
        if place.alias and place.root.call == place.alias:
            place.root.spent = self.now
        self._unsaved(place.root, place.alias)

    def _let_go(self, handle: Handle) -> None:
        self.kept[handle.call] = self.now
        # What backward has read is gone when the tensor that it was given is.
        if handle.call and handle.root.call == handle.call and not handle.read:
            handle.root.spent = self.now
        self._unsaved(handle.root, handle.call)

    def _unsaved(self, root: Root, call: int) -> None:
        # The last of several: a tensor may be saved, let go and saved again.
        if root.call != call or not call:
            root.released = self.now
        if root.handles == 0 and root.aliases == 0:
            root.unsaved = self.now


def _copy(root: Root, tensor: torch.Tensor) -> torch.UntypedStorage:
    """A copy of the storage of ``tensor``, one for all that is saved of it."""
    copy = root.copy() if root.copy is not None else None
    if copy is None:
        with _disable_current_modes():
            copy = tensor.untyped_storage().clone()
        root.copy = weakref.ref(copy)
    return copy
