"""Whether what a plan moves to the host gets there, once in every pass, and comes back in time. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

from forebay.checking.live import Live
from forebay.checking.order import Order
from forebay.checking.step import Step
from forebay.checking.words import fault
from forebay.program import Action, Program

__all__ = ["Transfers"]


@final
class Transfers:
    """Offloads and reloads, in the order of the program; told of compute by whoever runs through it.

    ``offloads`` are the actions by root and pass, ``reloads`` all of them with their bytes. Every pass has the arena on
    the host to itself (``treated.check_host_room``), so that nothing may be under way from one to the next.
    """

    def __init__(self, step: Step, live: Live, program: Program, order: Order) -> None:
        self.offloads: dict[tuple[int, int], int] = {}
        self.reloads: list[tuple[int, int]] = []
        self._step = step
        self._live = live
        self._program = program
        self._order = order
        self._number = 0
        # In this pass: the action that makes a moved root, those that move it, what is not back for certain.
        self._made: dict[int, int] = {}
        self._out: dict[int, int] = {}
        self._in: dict[int, int] = {}
        self._coming: list[int] = []

    # Compute.

    def begin(self, number: int) -> None:
        """Pass ``number`` begins."""
        self._number = number
        for table in (self._made, self._out, self._in):
            table.clear()
        self._coming.clear()

    def end(self, index: int) -> None:
        """The pass is over at action ``index``. Raises ``PlanInvalid`` for a root that was not moved in it, or that may
        be on its way back: the next pass may write to its bytes on the host."""
        for root in self._live.treated.moved:
            if root not in self._out:
                raise self._fault(index, root, f"has to be on the host and is not moved there in pass {self._number}")
        for root in self._coming:
            raise self._fault(self._in[root], root, f"may not be back when pass {self._number} is over")

    def made(self, number: int, index: int) -> None:
        """Op ``number`` ran for the first time in the pass, in action ``index``."""
        for root in self._step.ops[number].made:
            if root in self._live.treated.moved:
                self._made[root] = index

    def arrived(self, index: int) -> Iterator[int]:
        """Roots that are on the device again for certain when action ``index`` starts, and were not before."""
        while self._coming and self._order.before(self._in[self._coming[0]], index):
            yield self._coming.pop(0)

    def is_out(self, root: int, index: int) -> bool:
        """Whether ``root`` is on the host for certain when action ``index`` starts."""
        return root in self._out and self._order.before(self._out[root], index)

    # Moves.

    def offload(self, index: int, action: Action) -> None:
        """Raises ``PlanInvalid`` for an offload of what is not there (yet), or not once."""
        root = self._moved(index, action)
        if root in self._out:
            raise self._fault(index, root, f"is on the host already: action {self._out[root]} moves it in this pass")
        if root not in self._made or not self._order.before(self._made[root], index):
            raise self._fault(index, root, "may not be complete when it starts")
        freed = -sum(change.nbytes for change in action.changes)
        if not 0 <= freed <= self._step.nbytes[root]:
            raise self._fault(index, root, f"has other bytes than the {freed} that this frees")
        self._out[root] = index
        self.offloads[root, self._number] = index

    def reload(self, index: int, action: Action) -> None:
        """Raises ``PlanInvalid`` for a reload of what may not be on the host, is there already, or is not wanted."""
        root = self._moved(index, action)
        if root not in self._out:
            raise self._fault(index, root, "is not on the host in this pass")
        if not self._order.before(self._out[root], index):
            raise self._fault(index, root, f"may not be on the host yet: action {self._out[root]} moves it")
        if root in self._in:
            raise self._fault(index, root, f"is on the device again already: action {self._in[root]} brings it back")
        if not self._live.is_wanted(root):
            raise self._fault(index, root, "is not read again")
        self._in[root] = index
        self._coming.append(root)
        self.reloads.append((index, self._step.nbytes[root]))

    def _moved(self, index: int, action: Action) -> int:
        root = action.tensor
        if root not in self._live.treated.moved:
            text = f"the plan does not move tensor {root} to the host"
            raise fault(self._program, index, f"tensor {root}", text)
        if action.nbytes != self._step.nbytes[root]:
            raise self._fault(index, root, f"has other bytes than the {action.nbytes} that this moves")
        return root

    def _fault(self, index: int, root: int, text: str) -> Exception:
        return fault(self._program, index, self._step.name(root), f"{self._step.name(root)} {text}")
