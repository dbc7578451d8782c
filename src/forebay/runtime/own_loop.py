"""Which of the loops that take turns a model is trained in: that one, and no other, may use it meanwhile."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Final, final

from forebay.errors import UsageError

__all__ = ["OwnLoop"]

_RUNNING: Final = ContextVar["OwnLoop | None"]("forebay loop", default=None)
"""The loop that the calling thread is in, or was begun by. A variable of the context: threads in which micro-batches
take turns have that of the thread that made them."""


@final
class OwnLoop:
    """That of one model, ``number`` among those that take turns; None while none does."""

    def __init__(self) -> None:
        self.number: int | None = None

    def enter(self) -> None:
        """What the calling thread does from here on is of this loop."""
        _RUNNING.set(self)

    def expect(self) -> None:
        """Raises ``UsageError`` in the loop of another model: what torch keeps for each thread would be that one's."""
        running = _RUNNING.get()
        if running is None or running is self or running.number is None or self.number is None:
            return
        raise UsageError(
            f"the loop of model {running.number} uses model {self.number}, which has a loop of its own: give "
            f"forebay.alternate the loops in the order of their models, and each its own model only"
        )
