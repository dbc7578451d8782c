"""Two places on disk: the one that a checkpoint has, and the one that updates write.

A checkpoint copies nothing of what is at home on disk: it names it. From then on the block's next update reads there
and writes the other place (``Streaming.disk_copies``), which is the current copy after that, and is updated in place
until the next checkpoint names it. An update writes every byte anyway, so that this costs room and no time.

While a checkpoint is on its way to the disk nobody knows which of the two must be left alone: the one before may turn
out to stand. So who is about to write waits for its outcome.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum, auto
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from forebay.runtime.blockstate import BlockCopy

__all__ = ["Alternate", "Hold", "Outcome"]


class Hold(Enum):
    """Whether the checkpoint that stands has the current copy of a block."""

    FREE = auto()  # it has not: updates write in place
    KEPT = auto()  # it has: the next update writes the other place


class Outcome(ABC):
    """What becomes of a checkpoint."""

    @abstractmethod
    def stands(self) -> bool:
        """Waits until that is known; whether it is the one that stands."""

    @abstractmethod
    def expect_done(self) -> None:
        """Waits until that is known; raises what went wrong."""


@final
class Alternate:
    """``copy`` is the other place of those homes of a block that are on disk; the rest of it is where it always is."""

    def __init__(self, copy: BlockCopy) -> None:
        self.copy = copy
        self._hold = Hold.FREE
        self._coming: Outcome | None = None

    @property
    def hold(self) -> Hold:
        """Who has the current copy, when no checkpoint is on its way any more."""
        if self._coming is not None:
            if self._coming.stands():
                self._hold = Hold.KEPT
            # Only now: where the wait was interrupted, the checkpoint is still on its way.
            self._coming = None
        return self._hold

    def keep(self, coming: Outcome) -> None:
        """The current copy is what the checkpoint ``coming`` has; the one before has come or has failed."""
        self._hold = self.hold  # what became of that one must not be forgotten
        self._coming = coming

    def turned(self, before: BlockCopy) -> None:
        """The copy that was the other one is the current one, and no checkpoint has it; ``before`` was it until now."""
        self.copy, self._hold = before, Hold.FREE
