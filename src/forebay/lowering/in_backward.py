"""Updates in backward on paper: whose gradients are in which slot, and when they are used up, as
``runtime.in_backward`` has it. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from forebay.arenas import gradient_nbytes
from forebay.device.base import Completion
from forebay.lowering.homes import BlockHome, Homes
from forebay.lowering.recorder import Paper
from forebay.plans import Plan, used_up
from forebay.scheduling.gradients import GradientSlots

__all__ = ["PaperBackwardUpdates"]


@final
class PaperBackwardUpdates:
    """The blocks that are updated in backward (``Update.BACKWARD``) and are not resident, in steps of one backward."""

    def __init__(self, plan: Plan, homes: Homes) -> None:
        self._homes = homes
        self._names = frozenset(used_up(plan.placements, resident=False))
        self._slots = GradientSlots([Paper(nbytes) for nbytes in plan.streaming.gradient_slots])
        # By block: the gradients that lie in its slot, and all that this step has used up (places in the block).
        self._landed: dict[str, set[int]] = {}
        self._used_up: dict[str, set[int]] = {}

    def place(self, home: BlockHome) -> tuple[int, Sequence[Completion]]:
        """The slot in which the next gradient of a block lands, and what that comes after; -1 for a block whose
        gradients have a place of their own."""
        name = home.block.name
        if name not in self._names:
            return -1, ()
        slot = self._slots.of(name)
        if slot is None:
            nbytes = gradient_nbytes(home.block)
            while (other := self._slots.in_the_way(nbytes)) is not None:
                self._use_up(self._homes.blocks[other])
            slot = self._slots.take(name, nbytes)
        return slot.number, slot.read

    def landed(self, home: BlockHome, place: int) -> None:
        """The gradient of a parameter has landed."""
        name = home.block.name
        if name in self._names:
            self._landed.setdefault(name, set()).add(place)
            if len(self._landed[name]) + len(self._used_up.get(name, ())) == home.trained:
                self._use_up(home)

    def step(self, home: BlockHome) -> bool:
        """The step is asked for. Returns whether the block is one that it need not update any more: what has landed and
        is not used up is now."""
        name = home.block.name
        if name in self._names:
            self._use_up(home)
            self._used_up.pop(name, None)
        return name in self._names

    def _use_up(self, home: BlockHome) -> None:
        name = home.block.name
        tasks = self._landed.pop(name, set())
        if tasks:
            self._homes.update(home, frozenset(tasks))
            self._used_up.setdefault(name, set()).update(tasks)
            self._slots.give_back(name, [home.read_by.pop(place) for place in tasks][-1:])
