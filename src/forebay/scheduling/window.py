"""How many bytes may be on their way off the device: of gradients, or of activations. No torch."""

from __future__ import annotations

from collections import deque
from typing import Protocol, final

from forebay.device.base import Completion

__all__ = ["ComputeOrder", "TransferWindow"]


class ComputeOrder(Protocol):
    """What the window asks of a ``Device``."""

    def hold_compute(self, completion: Completion) -> None:
        """Compute that is issued after this call sees what ``completion`` stands for."""


@final
class TransferWindow:
    """At most ``window`` bytes are under way at any time; first in, first out. ``admit`` before a copy is queued,
    ``sent`` after, ``empty`` before a pass begins, or backward does."""

    def __init__(self, compute: ComputeOrder, window: int) -> None:
        self._compute = compute
        self._window = window
        self._under_way: deque[tuple[Completion, int]] = deque()
        self._bytes = 0

    def admit(self, nbytes: int) -> None:
        """Waits until ``nbytes`` more may leave the device.

        The wait is what bounds device memory: what leaves is freed when its copy is done, and without it compute that
        is faster than the link would pile it up.
        """
        while self._under_way and (self._under_way[0][0].done() or self._bytes + nbytes > self._window):
            self._await_oldest()

    def empty(self) -> None:
        """Compute goes on when nothing is under way: what it makes then has the device to itself."""
        while self._under_way:
            self._await_oldest()

    def _await_oldest(self) -> None:
        completion, size = self._under_way.popleft()
        self._compute.hold_compute(completion)
        completion.wait()
        self._bytes -= size

    def sent(self, completion: Completion, nbytes: int) -> None:
        """``nbytes`` are under way until ``completion``."""
        if not self._under_way and completion.done():
            self._compute.hold_compute(completion)
            completion.wait()
            return
        self._under_way.append((completion, nbytes))
        self._bytes += nbytes
        # What is larger than the window is waited for at once: the window holds for it too.
        self.admit(0)

    def drain(self) -> None:
        """Waits for all that is under way."""
        while self._under_way:
            completion, size = self._under_way.popleft()
            self._bytes -= size
            completion.wait()
