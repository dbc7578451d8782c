"""How many bytes may be on their way between device and host at one time, whatever the timing. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from forebay.checking.order import Order
from forebay.program import Program
from forebay.timeline import Lane

__all__ = ["Coming", "computes_around", "most_in_transit"]


@final
class Coming:
    """What comes back to the device: actions of one lane with their bytes, in order. They take memory from their start
    on, which may be at any time after all that they wait for."""

    def __init__(self, order: Order, coming: Sequence[tuple[int, int]]) -> None:
        self._order = order
        self._coming = coming
        self._next = 0
        self._under_way: list[tuple[int, int]] = []

    def at(self, action: int, then: int = -1) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """What may be under way before compute ``action`` starts but after the compute before it has, and what may be
        while it runs. To be asked of all compute, in order.

        ``action`` may be one of those that come as well, if it starts after the compute before it: what has come by
        then is no longer under way only if compute goes on, with action ``then``, after that."""
        # What one action must wait for, all later ones of its lane must: no more than one look at each.
        while self._next < len(self._coming) and not self._order.before(action, self._coming[self._next][0]):
            self._under_way.append(self._coming[self._next])
            self._next += 1
        before = [one for one in self._under_way if one[0] != action]
        until = action if then < 0 else then
        self._under_way = [
            one
            for one in self._under_way
            if not (self._order.before(one[0], action) and self._order.before(one[0], until))
        ]
        return before, self._under_way


def computes_around(program: Program) -> list[tuple[int, int]]:
    """Of every action the last one of the compute lane that comes before it, and the next that is not (-1: none)."""
    before, latest = [], -1
    for index, action in enumerate(program.actions):
        before.append(latest)
        latest = index if action.lane is Lane.COMPUTE else latest
    after, following = [], -1
    for index in reversed(range(len(program.actions))):
        following = index if program.actions[index].lane is Lane.COMPUTE else following
        after.append(following)
    return list(zip(before, reversed(after), strict=True))


def most_in_transit(order: Order, leaving: Sequence[tuple[int, int]], coming: Sequence[tuple[int, int]]) -> int:
    """The most bytes of both at one time. What leaves (the action that takes it away, bytes) is there until that is
    done; what comes (action, bytes; one lane, in order) is there once that has started, and then all that it had waited
    for is gone."""
    left = sum(nbytes for _, nbytes in leaving)
    most, back = left, 0
    for action, nbytes in coming:
        back += nbytes
        there = sum(size for done, size in leaving if not order.before(done, action)) if leaving else 0
        most = max(most, back + there)
    return most
