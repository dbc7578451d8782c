"""torch's limit of a card's memory, which is one for all that a process does there."""

from __future__ import annotations

import threading
from typing import Final, final

import torch

__all__ = ["SharedLimit", "limit_of"]


@final
class SharedLimit:
    """The limit of card ``index``: the sum of the budgets of those who are there. With the first one it begins, and
    behind the last one it is what it was before; in what order they go does not matter."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._lock = threading.Lock()
        self._shares: list[float | None] = []
        self._earlier = 1.0

    def enter(self, share: float | None) -> None:
        """One more, with a ``share`` of the card's memory; None: with all that the limit was before."""
        with self._lock:
            if not self._shares:
                self._earlier = torch.cuda.get_per_process_memory_fraction(self._index)
            self._shares.append(share)
            self._set()

    def leave(self, share: float | None) -> None:
        """One less, which had entered with ``share``."""
        with self._lock:
            self._shares.remove(share)
            self._set()

    def _set(self) -> None:
        given = [share for share in self._shares if share is not None]
        whole = min(1.0, sum(given)) if given and len(given) == len(self._shares) else self._earlier
        torch.cuda.set_per_process_memory_fraction(whole, self._index)


_LIMITS: Final[dict[int, SharedLimit]] = {}
"""By card. What they stand for is torch's, of the whole process, and so are they."""


def limit_of(index: int) -> SharedLimit:
    """The limit of card ``index``."""
    return _LIMITS.setdefault(index, SharedLimit(index))
