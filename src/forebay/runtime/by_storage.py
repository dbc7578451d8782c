"""What is known of storages, for as long as they are there."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar, final

import torch

__all__ = ["ByStorage"]

T = TypeVar("T")


@final
class ByStorage(Generic[T]):
    """Values by the storage that they are of, which is not held: an address is used again when its storage is gone.
    The value goes with its storage, in whatever thread lets go of that last."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[torch.UntypedStorage], T]] = {}

    def put(self, storage: torch.UntypedStorage, value: T) -> None:
        """``value`` is that of ``storage`` from now on."""
        key = storage._cdata
        # Not the method itself: a storage that lives on would hold this, and the values of all others.
        gone: Callable[[weakref.ref[torch.UntypedStorage]], None] = partial(_forget, weakref.ref(self), key)
        self._known[key] = weakref.ref(storage, gone), value

    def get(self, storage: torch.UntypedStorage) -> T | None:
        """The value of ``storage``."""
        known = self._known.get(storage._cdata)
        return None if known is None or known[0]() is not storage else known[1]

    def pop(self, storage: torch.UntypedStorage) -> T | None:
        """The value of ``storage``, which has none any more."""
        value = self.get(storage)
        self._known.pop(storage._cdata, None)
        return value

    def clear(self) -> None:
        """No storage has a value any more."""
        self._known.clear()

    def _gone(self, key: int, was: weakref.ref[torch.UntypedStorage]) -> None:
        known = self._known.get(key)
        # Another storage may have the address by now.
        if known is not None and known[0] is was:
            self._known.pop(key, None)


def _forget(known: weakref.ref[ByStorage[T]], key: int, was: weakref.ref[torch.UntypedStorage]) -> None:
    values = known()
    if values is not None:
        values._gone(key, was)
