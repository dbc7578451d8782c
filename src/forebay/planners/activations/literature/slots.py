"""What a programme over the ops of a chain of blocks cannot do without: dynamic programming over slots of memory.

``rotor`` and ``rockmate`` count memory in slots. Bytes that are rounded up give an answer that fits; the same ones
rounded down give seconds that no answer goes below. Where all bytes are multiples of one slot both are one, and
the answer is the optimum. The relaxation of the integer programme (``checkmate``) is far below that: half of every
block runs again in it, with half of the workspace.

The *ways* of a block are what no other choice for its ops beats in bytes held until its backward, bytes at its fullest
and seconds (``menu``: Nemhauser and Ullmann). O(blocks x slots x ways).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from math import gcd, inf
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from forebay.planners.activations.literature.layers import Layer
from forebay.planners.activations.menu import thinned, undominated

__all__ = ["MOST_WAYS", "SLOTS", "Slotted", "Ways", "all_ways", "over_slots", "ways_of"]

SLOTS: Final = 4_000
"""Slots of memory at most."""

MOST_WAYS: Final = 30_000
"""Ways of a block that are kept as they are: a block of GPT-2 has 26,932."""

HELD, FULLEST, SECONDS = range(3)


@dataclass(frozen=True)
class Ways:
    """Of each way of a block the bytes held, bytes at its fullest and seconds (``points``), and whether the block runs
    again, then each op of it that may (``again``). ``all_of_them``: none was left out that is not beaten."""

    points: NDArray[Any]
    again: NDArray[Any]
    all_of_them: bool


@dataclass(frozen=True)
class Slotted:
    """The best answer, by whether each block and op runs again, and seconds that nothing goes below; ``x`` is None
    where nothing fits that was looked at, ``bound`` infinite where nothing can."""

    x: NDArray[Any] | None
    bound: float


def ways_of(layer: Layer) -> Ways:
    """The ways of ``layer``. Of more than ``MOST_WAYS`` one is kept in each cell of a grid."""
    items = layer.items
    kept = np.array([[items.held, items.held, 0.0]])
    if items.again is None:
        return Ways(kept, np.zeros((1, 0)), True)
    stays = sum(item.held for item in items.again if not item.reruns)
    points, codes, exact = np.array([[stays, stays + items.kept_held, items.again_seconds]]), np.ones((1, 1)), True
    for item in items.again:
        if item.reruns:
            # Kept, or made again: what is saved of it is there for its block's backward all the same.
            both = np.array([item.held, item.held, 0.0]), np.array([0.0, item.saved, item.seconds])
            points = np.concatenate([points + one for one in both])
            codes = np.concatenate([np.c_[codes, np.full(len(codes), again)] for again in (0.0, 1.0)])
            chosen = undominated(points)
            if len(chosen) > MOST_WAYS:
                chosen, exact = chosen[thinned(points[chosen])], False
            points, codes = points[chosen], codes[chosen]
    points, codes = np.concatenate([kept, points]), np.concatenate([np.zeros((1, codes.shape[1])), codes])
    chosen = undominated(points)
    return Ways(points[chosen], codes[chosen], exact)


def all_ways(layers: Sequence[Layer]) -> list[Ways]:
    """The ways of each of ``layers``; blocks that are alike have the same, which are found once."""
    known: dict[int, Ways] = {}
    for layer in layers:
        if id(layer.group) not in known:
            known[id(layer.group)] = ways_of(layer)
    return [known[id(layer.group)] for layer in layers]


def over_slots(ways: Sequence[Ways], allowed: float, *, bounded: bool = True) -> Slotted:
    """The least seconds that run again with ``allowed`` bytes, for blocks with ``ways`` in the order of the forward.
    With ``bounded`` False nothing is said of what others may have: the bound is 0."""
    distinct = {id(own): own.points for own in ways}.values()
    divisor = reduce(gcd, (int(nbytes) for points in distinct for nbytes in points[:, :SECONDS].flat), 0) or 1
    slot = max(float(divisor), allowed / SLOTS)
    best, places = _fastest(ways, allowed, slot, up=True)
    x = None
    if places is not None:
        x = np.concatenate([np.zeros(0), *(own.again[place] for own, place in zip(ways, places, strict=True))])
    if not bounded or not all(own.all_of_them for own in ways):
        return Slotted(x, 0.0)
    return Slotted(x, best if slot == divisor else _fastest(ways, allowed, slot, up=False)[0])


def _fastest(ways: Sequence[Ways], allowed: float, slot: float, *, up: bool) -> tuple[float, list[int] | None]:
    """Least seconds, and the way of each block; with bytes in slots, rounded ``up`` or down."""
    count = int(allowed // slot) + 1 if allowed >= 0 else 0
    best, history = np.full(count, inf), []
    best[:1] = 0.0
    known: dict[int, tuple[NDArray[Any], NDArray[Any]]] = {}
    for own in ways:
        if id(own) not in known:
            known[id(own)] = _in_slots(own, slot, up=up)
        places, points = known[id(own)]
        after, taken = np.full(count, inf), np.zeros(count, dtype=np.int32)
        for place, size, fullest, seconds in zip(places, *points.T, strict=True):
            # What was held before has to leave room for the block at its fullest.
            reached = best[: max(0, count - int(fullest))] + seconds
            target = slice(int(size), int(size) + len(reached))
            better = reached < after[target]
            after[target][better] = reached[better]
            taken[target][better] = place
        best = after
        history.append(taken)
    if not (best < inf).any():
        return inf, None
    at = int(np.argmin(best))
    seconds, chosen = float(best[at]), list[int]()
    for own, taken in zip(reversed(ways), reversed(history), strict=True):
        chosen.append(int(taken[at]))
        at -= int(_rounded(own.points[chosen[-1], HELD] / slot, up=up))
    return seconds, chosen[::-1]


def _in_slots(own: Ways, slot: float, *, up: bool) -> tuple[NDArray[Any], NDArray[Any]]:
    """The places of those of a block's ways that no other beats when bytes are slots, and these in slots."""
    points = own.points.copy()
    points[:, :SECONDS] = _rounded(points[:, :SECONDS] / slot, up=up)
    chosen = undominated(points)
    return chosen, points[chosen]


def _rounded(slots: Any, *, up: bool) -> Any:
    return np.ceil(slots) if up else np.floor(slots)
