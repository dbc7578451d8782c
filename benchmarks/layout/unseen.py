"""Instances that no search here was made with: forty sets of buffers of which a layout is known, in eight styles.

Those of ``instances`` are cut from a rectangle in one way. A search that was made with them may know that way; so here
are others: without a byte or a moment to spare, cut straight only, losing more, at powers of two, into few sizes, a few
long lives with many short ones between them, and boxes that grew from points until they touched, which no cut takes
apart.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from itertools import pairwise
from types import MappingProxyType

from benchmarks.layout.instances import CAPACITY, GRAIN, Kind, Piece, instance
from forebay.buffers import Buffer, BufferSet

__all__ = ["SEEDS", "STYLES", "unseen"]

SEEDS = range(1000, 1005)
"""Of each style: far from those that tests and searches were made with."""

GRID = CAPACITY // GRAIN
"""Places in time, and in memory."""

Style = Callable[[random.Random, int], BufferSet]
"""A set of about so many buffers."""


def unseen(style: str, seed: int) -> BufferSet:
    """The instance of a style of ``STYLES``, of 120 to 450 buffers, the same for the same seed."""
    draw = random.Random(f"{style} {seed}")
    return STYLES[style](draw, draw.randint(120, 450))


def _cut(**kind: float) -> Style:
    return lambda draw, count: instance(draw.randrange(1 << 30), Kind(count=count, **kind))  # type: ignore[arg-type]


def _powers(draw: random.Random, count: int) -> BufferSet:
    """Halves of halves in memory, anywhere in time."""
    pieces: list[Piece] = [(0, GRID, 0, GRID)]
    while len(pieces) < count:
        start, end, low, high = pieces.pop(_large(pieces, draw))
        if end - start >= 2 and (high - low < 2 or draw.random() < 0.5):
            at = draw.randint(start + 1, end - 1)
            pieces += [(start, at, low, high), (at, end, low, high)]
        else:
            middle = (low + high) // 2
            pieces += [(start, end, low, middle), (start, end, middle, high)]
    return _set(pieces, draw)


def _equal(draw: random.Random, count: int) -> BufferSet:
    """Sizes of one, two or three sixty-fourths: each lane of memory is used by one after the other, and lanes that are
    free at the same time are joined."""
    lanes, lane = 64, GRID // 64
    free = [0] * lanes
    pieces: list[Piece] = []
    life = lanes * GRID * 2 // count
    while min(free) < GRID:
        low = min(range(lanes), key=lambda at: (free[at], at))
        wide = 1
        while wide < draw.randint(1, 3) and low + wide < lanes and free[low + wide] == free[low]:
            wide += 1
        end = min(GRID, free[low] + draw.randint(1, life))
        end = GRID if GRID - end < 4 else end // 4 * 4 or 4
        end = max(end, min(GRID, free[low] + 4))
        pieces.append((free[low], end, low * lane, (low + wide) * lane))
        free[low : low + wide] = [end] * wide
    return _set(pieces, draw)


def _few_long(draw: random.Random, count: int) -> BufferSet:
    """A fifth of the memory in stripes that live most of the time, and many short ones between them."""
    pieces: list[Piece] = []
    bands = draw.randint(5, 9)
    cuts = [0, *sorted(draw.sample(range(40, GRID - 40, 8), bands - 1)), GRID]
    for low, high in pairwise(cuts):
        thick = max(1, (high - low) // 5)
        first = draw.randint(0, GRID // 4)
        last = draw.randint(3 * GRID // 4, GRID)
        pieces.append((first, last, low, low + thick))
        own = max(2, (count - bands) * (high - low) // GRID)
        band: list[Piece] = [(0, GRID, low + thick, high)]
        while len(band) < own:
            start, end, bottom, top = band.pop(_large(band, draw))
            if end - start >= 2 and (top - bottom < 8 or draw.random() < 0.7):
                at = draw.randint(start + 1, end - 1)
                band += [(start, at, bottom, top), (at, end, bottom, top)]
            else:
                middle = draw.randint(bottom + 1, top - 1)
                band += [(start, end, bottom, middle), (start, end, middle, top)]
        pieces += band
    return _set(pieces, draw)


def _grown(draw: random.Random, count: int) -> BufferSet:
    """Boxes that grow from points, each side by a part of the room that it has, and in the end by all of it."""
    boxes: list[list[int]] = []
    while len(boxes) < count:
        t, m = draw.randrange(GRID), draw.randrange(GRID)
        if all(not (a <= t < b and c <= m < d) for a, b, c, d in boxes):
            boxes.append([t, t + 1, m, m + 1])
    for share in (0.1, 0.2, 0.4, 1.0):
        draw.shuffle(boxes)
        for box in boxes:
            for side in draw.sample(range(4), 4):
                box[side] += int(share * _room(box, side, boxes)) * (1 if side % 2 else -1)
    return _set([(a, b, c, d) for a, b, c, d in boxes], draw)


def _room(box: list[int], side: int, boxes: list[list[int]]) -> int:
    """How far ``side`` of ``box`` (start, end, low, high) can move out before it meets another box or the wall."""
    across = (2, 3) if side < 2 else (0, 1)
    own, other = side, side + 1 if side % 2 == 0 else side - 1
    room = GRID - box[own] if side % 2 else box[own]
    for one in boxes:
        if one is not box and one[across[0]] < box[across[1]] and box[across[0]] < one[across[1]]:
            away = one[other] - box[own] if side % 2 else box[own] - one[other]
            if away >= 0:
                room = min(room, away)
    return room


def _large(pieces: list[Piece], draw: random.Random) -> int:
    """The place of one of the large pieces."""
    return max(
        (draw.randrange(len(pieces)) for _ in range(6)),
        key=lambda at: (pieces[at][1] - pieces[at][0]) * (pieces[at][3] - pieces[at][2]),
    )


def _set(pieces: list[Piece], draw: random.Random) -> BufferSet:
    """Pieces in grains of time and memory as buffers in any order."""
    draw.shuffle(pieces)
    return BufferSet(
        tuple(
            Buffer(str(n), GRAIN * start, GRAIN * end, GRAIN * (high - low))
            for n, (start, end, low, high) in enumerate(pieces)
        ),
        CAPACITY,
    )


STYLES: Mapping[str, Style] = MappingProxyType(
    {
        "cut": _cut(),
        "straight": _cut(pinwheel=0.0),
        "full": _cut(slack=0.0),
        "loose": _cut(slack=0.08),
        "powers": _powers,
        "equal": _equal,
        "few-long": _few_long,
        "grown": _grown,
    }
)
"""By name."""
