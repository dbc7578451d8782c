"""Joining buffers to blocks of two, over and over, compiled. No torch.

Where hardly a byte is to spare, most buffers have a natural neighbour: one that begins where the other ends and has as
many bytes, or one that lives as long and can lie on top of it. A block of two wastes what the one has more than the
other in each section that it is live in, and no section may waste more than the capacity leaves: so those are joined
that waste the least of what is left.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from forebay.kernels.jit import compiled, inlined
from forebay.planners.layout.draws import draw
from forebay.planners.layout.table import Column

__all__ = ["Blocks", "Taste", "join"]

NEVER: Final = 1e300
"""What a pair counts that has no room."""

TIE: Final = 1e-9
"""What each pair counts at least, so that those that waste nothing are told apart at random too."""


class Blocks(NamedTuple):
    """Buffers, and behind them blocks of two: from which section up to which each is live, its bytes, and which two it
    is made of (for a buffer -1): ``upper`` lies on ``lower`` where it is ``stacked``, else they have one address, one
    after the other. ``whole`` are those that are in no other."""

    start: Column
    stop: Column
    size: Column
    lower: Column
    upper: Column
    stacked: NDArray[np.uint8]
    whole: NDArray[np.uint8]


class Taste(NamedTuple):
    """How pairs are told apart: ``grain`` bytes count beside the room of a section, so that the fullest ones do not
    decide alone; ``calm`` is how much the share of the whole ``area`` that a block takes counts beside its waste, so
    that small ones are joined first; ``noise`` the share by which scores are made worse at random."""

    grain: int
    calm: float
    area: float
    noise: float


@inlined
def _meet(blocks: Blocks, one: int, other: int) -> bool:
    return bool(blocks.start[one] < blocks.stop[other] and blocks.start[other] < blocks.stop[one])


@inlined
def _size(blocks: Blocks, one: int, other: int) -> Any:
    """The bytes of a block of the two."""
    if _meet(blocks, one, other):
        return blocks.size[one] + blocks.size[other]
    return max(blocks.size[one], blocks.size[other])


@inlined
def _spans(blocks: Blocks, one: int, other: int) -> Any:
    """The sections of a block of the two in three pieces, from the first section to the one after the last of each, and
    the bytes of the block that are neither's in each piece: it is the same in all sections of a piece."""
    first, second = (one, other) if blocks.start[one] <= blocks.start[other] else (other, one)
    start, stop, low, high = blocks.start[first], blocks.stop[first], blocks.start[second], blocks.stop[second]
    size = _size(blocks, one, other)
    if low < stop:  # they meet: those sections have nobody's bytes in which but one of the two is live
        last = size - (blocks.size[first] if stop > high else blocks.size[second])
        return start, low, size - blocks.size[first], low, low, 0, min(stop, high), max(stop, high), last
    return start, stop, size - blocks.size[first], stop, low, size, low, high, size - blocks.size[second]


@inlined
def _roomy(room: Column, first: int, last: int, wasted: int) -> bool:
    """Whether each of these sections has so many bytes to waste."""
    if wasted > 0:
        for section in range(first, last):
            if wasted > room[section]:
                return False
    return True


@inlined
def _score(
    blocks: Blocks,
    one: int,
    other: int,
    room: Column,
    shares: NDArray[np.float64],
    taste: Taste,
    enough: float,
    state: NDArray[np.uint64],
) -> Any:
    """How bad it is to join two: what that wastes, as a share of the room in each section, on average over those of the
    block; and its area. ``NEVER`` where there is no room, or it is no better than ``enough``. ``shares`` has what a
    byte counts in all sections before each."""
    a, b, wasted, c, d, between, e, f, after = _spans(blocks, one, other)
    share = wasted * (shares[b] - shares[a]) + between * (shares[d] - shares[c]) + after * (shares[f] - shares[e])
    size = _size(blocks, one, other)
    score = TIE + taste.calm * size * (f - a) / taste.area + share / (f - a)
    if score >= enough:
        return NEVER
    if not (_roomy(room, a, b, wasted) and _roomy(room, c, d, between) and _roomy(room, e, f, after)):
        return NEVER
    return score * (1.0 + taste.noise * draw(state) / 4294967296.0)


@inlined
def _count(room: Column, grain: int, first: int, shares: NDArray[np.float64]) -> None:
    """Sums up what a byte counts in the sections from ``first`` on."""
    for section in range(first, len(room)):
        shares[section + 1] = shares[section] + 1.0 / (room[section] + grain)


@inlined
def _seek(
    blocks: Blocks,
    one: int,
    made: int,
    room: Column,
    shares: NDArray[np.float64],
    taste: Taste,
    partner: Column,
    score: NDArray[np.float64],
    state: NDArray[np.uint64],
) -> None:
    """The best partner of a block, and its score."""
    partner[one], score[one] = -1, NEVER
    for other in range(made):
        if blocks.whole[other] and other != one:
            own = _score(blocks, one, other, room, shares, taste, score[one], state)
            if own < score[one]:
                partner[one], score[one] = other, own


@inlined
def _make(blocks: Blocks, one: int, other: int, made: int, room: Column) -> None:
    """Makes a block of the two, and takes what it wastes from the room."""
    a, b, wasted, c, d, between, e, f, after = _spans(blocks, one, other)
    room[a:b] -= wasted
    room[c:d] -= between
    room[e:f] -= after
    blocks.stacked[made] = _meet(blocks, one, other)
    blocks.start[made], blocks.stop[made], blocks.size[made] = a, f, _size(blocks, one, other)
    blocks.lower[made], blocks.upper[made] = one, other
    blocks.whole[one], blocks.whole[other], blocks.whole[made] = 0, 0, 1


@compiled
def join(blocks: Blocks, count: int, room: Column, fewest: int, taste: Taste, state: NDArray[np.uint64]) -> int:
    """Joins the first ``count`` of ``blocks`` until no more than ``fewest`` are whole, or no two have room; returns how
    many there are then, those in others included. ``room`` has the bytes of each section that may be nobody's: what
    blocks waste is taken from it."""
    partner, score = np.full(2 * count, -1, np.int64), np.full(2 * count, NEVER)
    shares = np.zeros(len(room) + 1)
    _count(room, taste.grain, 0, shares)
    for row in range(count):
        _seek(blocks, row, count, room, shares, taste, partner, score, state)
    made = count
    while 2 * count - made > fewest:
        one = -1
        for row in range(made):
            if blocks.whole[row] and partner[row] >= 0 and (one < 0 or score[row] < score[one]):
                one = row
        if one < 0:
            break
        other = partner[one]
        # Its partner may be in a block by now, and others may have taken the room.
        if not blocks.whole[other] or _score(blocks, one, other, room, shares, taste, NEVER, state) >= NEVER:
            _seek(blocks, one, made, room, shares, taste, partner, score, state)
            continue
        _make(blocks, one, other, made, room)
        _count(room, taste.grain, blocks.start[made], shares)
        made += 1
        _seek(blocks, made - 1, made, room, shares, taste, partner, score, state)
        for row in range(made - 1):
            if blocks.whole[row]:
                own = _score(blocks, row, made - 1, room, shares, taste, score[row], state)
                if own < score[row]:
                    partner[row], score[row] = made - 1, own
    return made
