"""A queue of the kernel's without the kernel: calls are made when they are waited for, in an order drawn at random."""

from __future__ import annotations

import errno
import random
from collections.abc import Sequence
from typing import final

from forebay.tiers.io import Io
from forebay.tiers.kernel_queue import CallQueue, QueuedCall

__all__ = ["SimulatedQueue"]


@final
class SimulatedQueue(CallQueue):
    """Makes the calls of ``io``, whatever befalls these. ``most`` is how many were under way at one time."""

    def __init__(self, io: Io, seed: int = 0) -> None:
        self.most = 0
        self.closed = False
        self._io = io
        self._draw = random.Random(seed)
        self._under_way: list[QueuedCall] = []

    @property
    def under_way(self) -> int:
        """Calls that are."""
        return len(self._under_way)

    def submit(self, calls: Sequence[QueuedCall]) -> int:
        assert calls and not self.closed
        self._under_way += calls
        self.most = max(self.most, len(self._under_way))
        return len(calls)

    def wait(self, least: int) -> list[tuple[int, int]]:
        assert least <= len(self._under_way) and not self.closed
        self._draw.shuffle(self._under_way)
        count = self._draw.randint(least, len(self._under_way))
        ended, self._under_way = self._under_way[:count], self._under_way[count:]
        return [(call.number, self._made(call)) for call in ended]

    def close(self) -> None:
        while self._under_way and not self.closed:
            self.wait(1)
        self.closed = True

    def _made(self, asked: QueuedCall) -> int:
        call = self._io.preadv if asked.verb == "read" else self._io.pwritev
        try:
            return call(asked.fd, asked.buffer, asked.offset)
        except OSError as error:
            return -(error.errno or errno.EIO)
