"""Buffers of which a layout is known: made by cutting a rectangle of time and memory into pieces.

Every piece is a buffer, its height the bytes and its width the life, so that the pieces as they were cut are a layout
within the capacity. ``tight`` pieces fill it to the last byte at all times. Others lose some of their bytes and of
their time afterwards, which leaves holes that a search can fall into: that is what makes the instances of minimalloc's
benchmark (``benchmarks/challenging`` of google/minimalloc) hard: hundreds of buffers, a capacity that is all but used
up at nearly every time, a few buffers that live from the first to the last.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from forebay.buffers import Buffer, BufferSet

__all__ = ["CAPACITY", "Kind", "instance", "random_buffers"]

CAPACITY = 1 << 20
"""Bytes of an instance, as in minimalloc's benchmark, and points in time."""

GRAIN = 1024
"""Cuts are at multiples of this, in both directions."""


TRIED = 6
"""Pieces of which the largest is cut."""


@dataclass(frozen=True)
class Kind:
    """How a rectangle is cut into about ``count`` pieces. ``through``: as many of them live all the time. ``pinwheel``:
    the share of cuts into five pieces around a middle, which no straight cut takes apart. ``slack``: the share of the
    bytes that pieces lose at most."""

    count: int = 250
    through: int = 8
    pinwheel: float = 0.3
    slack: float = 0.03


Piece = tuple[int, int, int, int]
"""From and to in time, from and to in memory."""


def instance(seed: int, kind: Kind = Kind(), capacity: int = CAPACITY) -> BufferSet:
    """A set of buffers that fits into ``capacity`` bytes, the same for the same seed."""
    draw = random.Random(seed)
    base = 0
    done: list[Piece] = []
    for _ in range(kind.through):
        height = GRAIN * draw.randint(1, max(1, capacity // GRAIN // 64))
        done.append((0, CAPACITY, base, base + height))
        base += height
    pieces: list[Piece] = [(0, CAPACITY, base, capacity)]
    while pieces and len(done) + len(pieces) < kind.count:
        # A large one, most of the time: sizes then differ as those of real buffers do.
        drawn = (draw.randrange(len(pieces)) for _ in range(TRIED))
        chosen = max(drawn, key=lambda at: (pieces[at][1] - pieces[at][0]) * (pieces[at][3] - pieces[at][2]))
        pieces[chosen], pieces[-1] = pieces[-1], pieces[chosen]
        cut = _cut(pieces.pop(), draw, kind.pinwheel)
        if len(cut) == 1:
            done += cut
        else:
            pieces += cut
    made = [_shrunk(piece, draw, kind.slack) for piece in (*done, *pieces)]
    draw.shuffle(made)
    buffers = tuple(Buffer(str(n), start, end, high - low) for n, (start, end, low, high) in enumerate(made))
    return BufferSet(buffers, capacity)


def _cut(piece: Piece, draw: random.Random, pinwheel: float) -> list[Piece]:
    start, end, low, high = piece
    times, heights = (end - start) // GRAIN, (high - low) // GRAIN
    if draw.random() < pinwheel and times >= 8 and heights >= 8:
        a, b = sorted(draw.sample(range(1, times), 2))
        c, d = sorted(draw.sample(range(1, heights), 2))
        t1, t2, m1, m2 = start + GRAIN * a, start + GRAIN * b, low + GRAIN * c, low + GRAIN * d
        return [
            (start, t2, low, m1),
            (t2, end, low, m2),
            (t1, end, m2, high),
            (start, t1, m1, high),
            (t1, t2, m1, m2),
        ]
    # Wide pieces are cut in time and high ones in memory, as a rule.
    if times >= 2 and (heights < 2 or draw.random() < times / (times + heights)):
        at = start + GRAIN * draw.randint(1, times - 1)
        return [(start, at, low, high), (at, end, low, high)]
    if heights >= 2:
        middle = low + GRAIN * draw.randint(1, heights - 1)
        return [(start, end, low, middle), (start, end, middle, high)]
    return [piece]


def _shrunk(piece: Piece, draw: random.Random, slack: float) -> Piece:
    start, end, low, high = piece
    lost = GRAIN * int((high - low) * draw.uniform(0, 2 * slack) / GRAIN)
    late = GRAIN * int((end - start) * draw.uniform(0, 2 * slack) / GRAIN)
    return start + late, end, low, max(high - lost, low + GRAIN)


def random_buffers(count: int, seed: int, times: int | None = None) -> BufferSet:
    """``count`` buffers of random sizes and lives, most of them short, without a capacity."""
    draw = random.Random(seed)
    span = times or 4 * count
    buffers = []
    for number in range(count):
        life = max(1, min(span - 1, int(draw.paretovariate(0.7) * 4)))
        start = draw.randint(0, span - life)
        buffers.append(Buffer(str(number), start, start + life, 512 * draw.randint(1, 1 << draw.randint(0, 16))))
    return BufferSet(tuple(buffers))
