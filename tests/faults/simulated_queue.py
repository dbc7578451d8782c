"""A queue of the kernel's without the kernel: calls are made when they are waited for, in an order drawn at random."""

from __future__ import annotations

import errno
import random
from typing import final

from forebay.tiers.io import Io
from forebay.tiers.kernel_queue import CallQueue, Verb

__all__ = ["SimulatedQueue"]


@final
class SimulatedQueue(CallQueue):
    """Makes the calls of ``io``, whatever befalls these. ``most`` is how many were under way at one time."""

    def __init__(self, io: Io, seed: int = 0) -> None:
        self.most = 0
        self.closed = False
        self._io = io
        self._draw = random.Random(seed)
        self._under_way: list[tuple[int, Verb, int, memoryview, int]] = []

    @property
    def under_way(self) -> int:
        """Calls that are."""
        return len(self._under_way)

    def submit(self, number: int, verb: Verb, fd: int, buffer: memoryview, offset: int) -> None:
        assert not self.closed
        self._under_way.append((number, verb, fd, buffer, offset))
        self.most = max(self.most, len(self._under_way))

    def wait(self) -> list[tuple[int, int]]:
        assert self._under_way and not self.closed
        self._draw.shuffle(self._under_way)
        count = self._draw.randint(1, len(self._under_way))
        ended, self._under_way = self._under_way[:count], self._under_way[count:]
        return [(number, self._made(*call)) for number, *call in ended]

    def close(self) -> None:
        while self._under_way and not self.closed:
            self.wait()
        self.closed = True

    def _made(self, verb: Verb, fd: int, buffer: memoryview, offset: int) -> int:
        call = self._io.preadv if verb == "read" else self._io.pwritev
        try:
            return call(fd, buffer, offset)
        except OSError as error:
            return -(error.errno or errno.EIO)
