"""How many bytes of gradients may be on their way to the host. No torch."""

from __future__ import annotations

from collections import deque
from typing import Protocol, final

from forebay.device.base import Completion

__all__ = ["ComputeOrder", "GradientWindow"]


class ComputeOrder(Protocol):
    """What the window asks of a ``Device``."""

    def hold_compute(self, completion: Completion) -> None:
        """Compute that is issued after this call sees what ``completion`` stands for."""


@final
class GradientWindow:
    """At most ``window`` bytes of gradients are under way at any time; first in, first out."""

    def __init__(self, compute: ComputeOrder, window: int) -> None:
        self._compute = compute
        self._window = window
        self._under_way: deque[tuple[Completion, int]] = deque()
        self._bytes = 0

    def admit(self, nbytes: int) -> None:
        """Waits until ``nbytes`` more may leave the device.

        The wait is what bounds device memory: a gradient is freed when its copy is done, and without it a backward
        that is faster than the link would pile them up.
        """
        while self._under_way and (self._under_way[0][0].done() or self._bytes + nbytes > self._window):
            self._await_oldest()

    def empty(self) -> None:
        """Compute goes on when nothing is under way: a pass begins so, and what it makes has the device to itself."""
        while self._under_way:
            self._await_oldest()

    def _await_oldest(self) -> None:
        completion, size = self._under_way.popleft()
        self._compute.hold_compute(completion)
        completion.wait()
        self._bytes -= size

    def sent(self, completion: Completion, nbytes: int) -> None:
        """``nbytes`` are under way until ``completion``."""
        self._under_way.append((completion, nbytes))
        self._bytes += nbytes
        # A gradient larger than the window is waited for at once: the window holds for it too.
        self.admit(0)

    def drain(self) -> None:
        """Waits for every gradient that is under way."""
        while self._under_way:
            completion, size = self._under_way.popleft()
            self._bytes -= size
            completion.wait()
