"""Slots on the host through which gradients pass: of blocks that are updated in backward, as soon as all of theirs have
landed. No torch.

A block takes a slot when the first of its gradients lands, and gives it back when its update is queued, with the
completion at which that has read them. Where all slots that would do are taken, the block that has had one the longest
is updated with what has landed of it: nothing else would ever give one back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

from forebay.device.base import Completion
from forebay.errors import ForebayError
from forebay.scheduling.staging import Sized

__all__ = ["GradientSlot", "GradientSlots"]


@final
class GradientSlot:
    """One buffer, the ``number``-th of ``Streaming.gradient_slots``. ``read`` is what the next occupant's gradients
    come after."""

    def __init__(self, number: int, buffer: Any) -> None:
        self.number = number
        self.buffer = buffer
        self.nbytes: int = buffer.nbytes
        self.read: tuple[Completion, ...] = ()


@final
class GradientSlots:
    """Which slot is whose. Used from one thread."""

    def __init__(self, buffers: Sequence[Sized]) -> None:
        # The one that was given back first is the first to be taken: its reader is the most likely to be done.
        self._free = [GradientSlot(number, buffer) for number, buffer in enumerate(buffers)]
        self._taken: dict[str, GradientSlot] = {}  # by block, the one that has had its slot the longest first

    def of(self, block: str) -> GradientSlot | None:
        """The slot of ``block``, if it has one."""
        return self._taken.get(block)

    def in_the_way(self, nbytes: int) -> str | None:
        """The block that has to give its slot back before another one can have ``nbytes``; None if there is a slot.
        Raises ``ForebayError`` where no slot is large enough."""
        if any(slot.nbytes >= nbytes for slot in self._free):
            return None
        for block, slot in self._taken.items():
            if slot.nbytes >= nbytes:
                return block
        raise ForebayError(f"gradients of a block take {nbytes} bytes and no slot for gradients has as many")

    def take(self, block: str, nbytes: int) -> GradientSlot:
        """A free slot for ``block``, which has none; what is written there comes after ``GradientSlot.read``."""
        slot = next(slot for slot in self._free if slot.nbytes >= nbytes)
        self._free.remove(slot)
        self._taken[block] = slot
        return slot

    def give_back(self, block: str, read: Sequence[Completion]) -> None:
        """The slot of ``block`` is free for others once ``read`` are done."""
        slot = self._taken.pop(block)
        slot.read = tuple(read)
        self._free.append(slot)
