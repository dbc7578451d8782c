"""What is known of storages, for as long as they are there."""

from __future__ import annotations

import weakref
from typing import Generic, TypeVar, final

import torch

__all__ = ["ByStorage"]

T = TypeVar("T")


@final
class ByStorage(Generic[T]):
    """Values by the storage that they are of, which is not held: an address is used again when its storage is gone."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[torch.UntypedStorage], T]] = {}

    def put(self, storage: torch.UntypedStorage, value: T) -> None:
        """``value`` is that of ``storage`` from now on."""
        self._known[storage._cdata] = weakref.ref(storage), value

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
