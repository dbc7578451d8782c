"""Updates that a step has asked for and that no lane knows yet.

An update on the device goes over the link that brings the blocks of the next forward, and the link is first in, first
out: were all updates of a step queued at once, the first fetch would come after the last of them. So each one waits
here until somebody needs what it reads or makes, which mostly is the fetch of its block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

__all__ = ["Deferred"]


@final
class Deferred:
    """At most one update, of one block."""

    def __init__(self) -> None:
        self._queue: Callable[[], object] | None = None

    def put(self, queue: Callable[[], object]) -> None:
        """``queue`` is called once, when the update is needed. One that is still here comes before it, and is queued
        now."""
        self.now()
        self._queue = queue

    def now(self) -> None:
        """Queues the update, if there is one."""
        # Taken off first: who queues it asks for the same homes.
        queue, self._queue = self._queue, None
        if queue is not None:
            queue()

    def drop(self) -> None:
        """Nobody will need it: the session ends."""
        self._queue = None
