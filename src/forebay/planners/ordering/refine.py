"""An order of a part, made better moment by moment. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final

from forebay.planners.layout.aim import Deadline
from forebay.planners.ordering.cuts import least_before
from forebay.planners.ordering.parts import Part
from forebay.planners.ordering.search import STATES, searched

__all__ = ["Refined", "refined"]

FEW: Final = 24
"""A part of so many ops is searched as a whole at once."""

WINDOW: Final = 48
"""So many ops around a moment that no cut makes lower are searched."""


@dataclass(frozen=True)
class Refined:
    """An ``order`` of a part's ops, by their places, and bytes that no order of the whole graph takes less of."""

    order: tuple[int, ...]
    lower_bound: int


def refined(part: Part, floor: int, deadline: Deadline, *, states: int = STATES, few: int = FEW) -> Refined:
    """The best order of ``part`` that is found in the time; no order of the whole has a peak below ``floor``. A search
    looks at ``states`` states at most, and a part of ``few`` ops is searched as a whole."""
    if len(part.ops) <= few:
        found = searched(part, floor, deadline, states)
        if found.order is not None or found.bound >= part.peak:
            return Refined(found.order or tuple(range(len(part.ops))), found.bound)
        floor = max(floor, found.bound)
    return _Refinement(part, floor, deadline, states).run()


@final
class _Refinement:
    """The part as pieces, one behind the other: what was put into one stays in it until a window takes it.

    Cuts that were made before cost nothing where ops can only run one behind the other: of the sets that are best run
    before two such ops, one can be chosen that is within the other, since what is live is submodular."""

    def __init__(self, part: Part, floor: int, deadline: Deadline, states: int) -> None:
        self._part, self._floor, self._deadline, self._states = part, floor, deadline, states
        self._pieces = [_at_once(part)]
        self._asked = set[int]()
        self._cut_at = set[int]()

    def run(self) -> Refined:
        """Cuts at the worst moment, again and again."""
        best = self._order()
        least = max(self._part.levels(best))
        while not self._deadline.over:
            order = self._order()
            levels = self._part.levels(order)
            peak = max(levels)
            if peak < least:
                best, least = order, peak
            worst = levels.index(peak)
            self._ask(order[worst])
            if least <= self._floor or not (self._cut(order, worst, peak) or self._search(order, worst)):
                break
        return Refined(best, self._floor)

    def _order(self) -> tuple[int, ...]:
        return tuple(op for piece in self._pieces for op in piece)

    def _ask(self, op: int) -> None:
        """Raises the floor to the bytes that are live while ``op`` runs, in any order."""
        if op not in self._asked:
            self._asked.add(op)
            self._floor = max(self._floor, least_before(self._part, op)[1])

    def _cut(self, order: tuple[int, ...], worst: int, peak: int) -> bool:
        """Cuts the piece with the op at place ``worst`` of ``order`` into what is best run before it, itself, and the
        rest, once for each op. Returns whether fewer than ``peak`` bytes are live while it runs then."""
        if order[worst] in self._cut_at:
            return False  # a search has undone it since: cuts and searches would go on in a circle
        self._cut_at.add(order[worst])
        at, first = 0, 0
        while first + len(self._pieces[at]) <= worst:
            first += len(self._pieces[at])
            at += 1
        piece = self._pieces[at]
        window = self._part.window(piece, frozenset(order[:first]))
        before, _ = least_before(window, worst - first)
        cut = [
            tuple(op for place, op in enumerate(piece) if place in before),
            (order[worst],),
            tuple(op for place, op in enumerate(piece) if place not in before and place != worst - first),
        ]
        ahead = (*(place for place in range(len(piece)) if place in before), worst - first)
        if window.levels(ahead)[-1] >= peak:
            return False
        self._pieces[at : at + 1] = [one for one in cut if one]
        return True

    def _search(self, order: tuple[int, ...], worst: int) -> bool:
        """Searches the ops around place ``worst`` of ``order``, whatever pieces they are of. Returns whether that has
        made their peak lower."""
        first = max(0, min(worst - WINDOW // 2, len(order) - WINDOW))
        ops = order[first : first + WINDOW]
        window = self._part.window(ops, frozenset(order[:first]))
        found = searched(window, self._floor, self._deadline, self._states)
        if found.order is None:
            return False
        self._pieces = [order[:first], tuple(ops[place] for place in found.order), order[first + WINDOW :]]
        self._pieces = [piece for piece in self._pieces if piece]
        return True


def _at_once(part: Part) -> tuple[int, ...]:
    """Program order, but for ops that make nothing: they run as soon as they can, which makes no level higher."""
    waits: list[list[int]] = [[] for _ in part.ops]
    first: list[list[int]] = [[] for _ in part.ops]
    for op, needs in enumerate(part.needs):
        # Behind the last that it needs, which is behind all others: those that make nothing are never put off.
        (waits[needs[-1]] if needs and not part.makes[op] else first[op]).append(op)
    order: list[int] = []
    for op in range(len(part.ops)):
        ready = first[op]
        while ready:
            order += ready
            ready = [behind for one in ready for behind in waits[one]]
    return tuple(order)
