"""Orders of a few ops, searched one op at a time. No torch.

A state is the set of ops that have run; what is live then does not depend on their order, so that the best way to a
state is the one with the lowest peak. States are looked at in order of that peak, which makes the first way to the end
the best there is. An op that makes no more than fits below the peak so far, and lets go of as much as it makes, is run
at once: whatever runs instead, it could have run before without any level being higher.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Final, final

from forebay.planners.layout.aim import Deadline
from forebay.planners.ordering.parts import Part

__all__ = ["STATES", "Searched", "searched"]

STATES: Final = 10_000
"""So many are looked at before a search gives up."""


@dataclass(frozen=True)
class Searched:
    """The best ``order`` of a part's ops that was found, by their places; None: none has a lower peak than what was
    known. Whatever the order, its peak is ``bound`` bytes or more."""

    order: tuple[int, ...] | None
    bound: int


def searched(part: Part, floor: int, deadline: Deadline, states: int = STATES) -> Searched:
    """An order of ``part`` with a lower peak than program order, where there is one; below ``floor`` bytes no peak is
    of any use. After ``states`` states, or with the time, the search gives up: then ``bound`` is what it has shown."""
    return _Search(part, floor).run(deadline, states)


@final
class _Search:
    def __init__(self, part: Part, floor: int) -> None:
        self._part, self._floor = part, floor
        self._needs = [sum(1 << need for need in needs) for needs in part.needs]
        self._whole = (1 << len(part.ops)) - 1
        # Of each state that was reached the one before, the ops between the two, and the peak on that way.
        self._came: dict[int, tuple[int, tuple[int, ...], int]] = {}
        self._heap: list[tuple[int, int, int, int, int]] = []

    def run(self, deadline: Deadline, states: int) -> Searched:
        known = self._part.peak
        self._reach(0, 0, self._part.begins, max(self._floor, self._part.begins), ())
        for count in range(states):
            if not self._heap or (not count % 64 and deadline.over):
                break
            peak, _, _, state, live = heappop(self._heap)
            if peak >= known:
                return Searched(None, known)
            if state == self._whole:
                return Searched(self._way(), peak)
            for op in self._able(state):
                high = live + self._part.makes[op]
                if high < known:
                    after = state | 1 << op
                    self._reach(state, after, high - self._freed(op, after), max(peak, high), (op,))
        # All that is left of the heap is no better than its first, and what is not on it is no better than ``known``.
        return Searched(None, min(known, self._heap[0][0]) if self._heap else known)

    def _reach(self, before: int, state: int, live: int, peak: int, ops: tuple[int, ...]) -> None:
        """Notes a state, and runs whatever costs nothing there."""
        ran = list(ops)
        free = True
        while free:
            free = False
            for op in self._able(state):
                makes = self._part.makes[op]
                freed = self._freed(op, state | 1 << op) if live + makes <= peak else -1
                if freed >= makes:
                    state, live, free = state | 1 << op, live + makes - freed, True
                    ran.append(op)
        # The first way to a state need not be the best one: the second may have a lower peak, and is on the heap too.
        if state in self._came and self._came[state][2] <= peak:
            return
        self._came[state] = (before, tuple(ran), peak)
        heappush(self._heap, (peak, -state.bit_count(), len(self._came), state, live))

    def _able(self, state: int) -> Iterator[int]:
        """The ops that may run next, as of ``state``."""
        for op, needs in enumerate(self._needs):
            if not state >> op & 1 and needs & state == needs:
                yield op

    def _freed(self, op: int, state: int) -> int:
        """Bytes that go as ``op`` runs last of ``state``."""
        return sum(nbytes for bits, nbytes in self._part.touching[op] if bits & state == bits)

    def _way(self) -> tuple[int, ...]:
        """The ops from the first state to the last."""
        ways, state = [], self._whole
        while state:
            state, ops, _ = self._came[state]
            ways.append(ops)
        return tuple(op for ops in reversed(ways) for op in ops)
