"""What is to be done when a backward is over, however it ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch

__all__ = ["when_backward_ends"]


def when_backward_ends(act: Callable[[], None]) -> None:
    """Has ``act`` called, once, when the backward that runs in this thread is over, or has raised."""
    torch.autograd.Variable._execution_engine.queue_callback(_Once(act))


@final
class _Once:
    """What autograd calls when backward is over; where that raises it only lets go of this, which then calls itself."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act: Callable[[], None] | None = act

    def __call__(self) -> None:
        act, self._act = self._act, None
        if act is not None:
            act()

    def __del__(self) -> None:
        self()
