"""Two places on disk: the one that a checkpoint has, and the one that updates write.

A checkpoint copies nothing of what is at home on disk: it names it. From then on the block's next update reads there
and writes the other place (``Streaming.disk_copies``), which is the current copy after that, and is updated in place
until the next checkpoint names it. An update writes every byte anyway, so that this costs room and no time. Where a
block is updated ahead of its step, into a spare copy (``speculation``), the other place is a third one: it becomes the
spare copy when the checkpoint has what would have.

While a checkpoint is on its way to the disk nobody knows which of the two must be left alone: the one before may turn
out to stand. So who is about to write waits for its outcome.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from enum import Enum, auto
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from forebay.runtime.blockstate import BlockCopy
    from forebay.runtime.homes import Home

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
    """The other place of what of a block is on disk: its ``parameters``, its ``states``, or both (None: not there)."""

    def __init__(self, parameters: Home | None, states: Home | None) -> None:
        self._parameters = parameters
        self._states = states
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

    def instead_of(self, copy: BlockCopy) -> BlockCopy:
        """``copy`` with the other place of what is on disk; what is in memory is where it is."""
        parameters = copy.parameters if self._parameters is None else self._parameters
        return replace(copy, parameters=parameters, states=copy.states if self._states is None else self._states)

    def keep(self, coming: Outcome) -> None:
        """The current copy is what the checkpoint ``coming`` has; the one before has come or has failed."""
        self._hold = self.hold  # what became of that one must not be forgotten
        self._coming = coming

    def turned(self, before: BlockCopy) -> None:
        """Another copy is the current one, which no checkpoint has, and what was the other place has its use;
        ``before``, which the checkpoint has, was the current one until now."""
        if self._parameters is not None:
            self._parameters = before.parameters
        if self._states is not None:
            self._states = before.states
        self._hold = Hold.FREE
