"""How many bytes may be on their way between device and host at one time, whatever the timing. No torch."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from typing import final

from forebay.checking.order import Order
from forebay.program import Program
from forebay.timeline import Lane

__all__ = ["Coming", "Leaving", "computes_around"]


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
        if not self._under_way:
            return [], []
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


@final
class Leaving:
    """What leaves the device, by the copies to the host that take it away, all of one lane, which therefore end in
    order. It is there until its copy is done. ``nbytes`` are those of all of it."""

    def __init__(self, order: Order) -> None:
        self.nbytes = 0
        self._order = order
        # By the place of the copy on its lane.
        self._there: list[tuple[int, int]] = []

    def add(self, action: int, nbytes: int) -> None:
        """``nbytes`` are there only until ``action`` is done."""
        insort(self._there, (self._order.position(action), nbytes))
        self.nbytes += nbytes

    def let_go(self, action: int) -> int:
        """Forgets what is away for certain when ``action`` starts. Returns the bytes."""
        gone, nbytes = self._away(action, 0)
        del self._there[:gone]
        self.nbytes -= nbytes
        return nbytes

    def most(self, coming: Sequence[tuple[int, int]], at: int = -1) -> int:
        """The most bytes at one time of what leaves and of what comes back (actions of one lane with their bytes, in
        order), now or (0 or more) when action ``at`` starts. What comes is there once it has started, and then all that
        it had waited for is gone."""
        gone, nbytes = self._away(at, 0) if at >= 0 else (0, 0)
        left = most = self.nbytes - nbytes
        if not coming:
            return most
        back, there, count, reached = 0, self._there, len(self._there), self._order.reached
        for action, more in coming:
            back += more
            if gone < count:
                done = reached(action, Lane.D2H)
                while gone < count and there[gone][0] < done:
                    left -= there[gone][1]
                    gone += 1
            if back + left > most:
                most = back + left
        return most

    def _away(self, action: int, gone: int) -> tuple[int, int]:
        """How many are away for certain when ``action`` starts, ``gone`` of which were; the bytes of the others."""
        nbytes, done = 0, self._order.reached(action, Lane.D2H)
        while gone < len(self._there) and self._there[gone][0] < done:
            nbytes += self._there[gone][1]
            gone += 1
        return gone, nbytes
