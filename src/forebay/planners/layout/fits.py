"""Placing buffers one after the other, compiled. No torch.

``fit`` takes them in an order and puts each into a gap among those that are there already and live at the same time.
``stack`` takes the lowest place that any buffer can have, so that memory fills from below as a skyline rises. ``flow``
takes them as time goes, like an allocator that does not know what comes.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from forebay.kernels.jit import compiled, part
from forebay.planners.layout.table import Column, Lives

__all__ = ["ANY", "BEST", "FIRST", "fit", "flow", "stack"]

FIRST, BEST = False, True
"""Which gap a buffer gets: the lowest that holds it, or the one that it fills best."""

ANY: Final = 1 << 62
"""A limit that no layout reaches."""


@part
def _aligned(address: int, alignment: int) -> int:
    return address if alignment == 1 else (address + alignment - 1) // alignment * alignment


@compiled
def fit(order: Column, lives: Lives, best: bool, limit: int, offsets: Column) -> int:
    """Places the buffers of ``order`` and writes their addresses into ``offsets``. Returns the height (bytes). Once
    that is ``limit`` or more the others get no address: the layout is too high already.

    Best fit by lists as in Pisarchyk and Lee, "Efficient memory management for deep neural net inference" (2020),
    algorithm 3. What is there is kept in the order of its address, so that the gaps come one after the other.
    """
    count = len(order)
    there = np.empty(count, np.int64)  # by address
    height = 0
    for placed in range(count):
        row = order[placed]
        start, end, nbytes, step = lives.lower[row], lives.upper[row], lives.size[row], lives.alignment[row]
        top, found, least = 0, -1, np.int64(1 << 62)
        for index in range(placed):
            other = there[index]
            if lives.lower[other] >= end or start >= lives.upper[other]:
                continue
            address = offsets[other]
            here = _aligned(top, step)
            room = address - here
            if room >= nbytes and room - nbytes < least:
                found, least = here, room - nbytes
                if not best or least == 0:
                    break
            top = max(top, address + lives.size[other])
        if found < 0:
            found = _aligned(top, step)
        offsets[row] = found
        height = max(height, found + nbytes)
        if height >= limit:
            break
        slot = placed
        while slot > 0 and offsets[there[slot - 1]] > found:
            there[slot] = there[slot - 1]
            slot -= 1
        there[slot] = row
    return height


@compiled
def stack(rank: Column, lives: Lives, offsets: Column) -> int:
    """Places all buffers, lowest place first and of equal places the one of the least ``rank``, and writes their
    addresses into ``offsets``. Returns the height (bytes)."""
    count = len(rank)
    lowest = np.zeros(count, np.int64)
    waiting = np.argsort(rank)
    height = 0
    for left in range(count, 0, -1):
        place = 0
        for index in range(1, left):
            if lowest[waiting[index]] < lowest[waiting[place]]:
                place = index
        row = waiting[place]
        for index in range(place, left - 1):
            waiting[index] = waiting[index + 1]
        start, end = lives.lower[row], lives.upper[row]
        offsets[row] = lowest[row]
        top = lowest[row] + lives.size[row]
        height = max(height, top)
        for index in range(left - 1):
            other = waiting[index]
            if lives.lower[other] < end and start < lives.upper[other] and lowest[other] < top:
                lowest[other] = _aligned(top, lives.alignment[other])
    return height


@compiled
def flow(events: Column, lives: Lives, offsets: Column) -> int:
    """Places buffers as time goes, each into the gap between those that are live then that it fills best, and writes
    their addresses into ``offsets``. Returns the height (bytes).

    ``events`` are in the order of time: a row where that buffer begins, and -1 - row where it ends. It takes no more
    time than there are events times buffers live at once, where the others take the square of all.
    """
    there = np.empty(len(lives.size), np.int64)  # by address
    count, height = 0, 0
    for event in events:
        if event < 0:
            slot = 0
            while there[slot] != -1 - event:
                slot += 1
            count -= 1
            for index in range(slot, count):
                there[index] = there[index + 1]
            continue
        nbytes, step = lives.size[event], lives.alignment[event]
        top, slot, found, least = 0, count, -1, np.int64(1 << 62)
        for index in range(count):
            address = offsets[there[index]]
            here = _aligned(top, step)
            room = address - here
            if room >= nbytes and room - nbytes < least:
                slot, found, least = index, here, room - nbytes
            top = address + lives.size[there[index]]
        if found < 0:
            found = _aligned(top, step)
        offsets[event] = found
        height = max(height, found + nbytes)
        for index in range(count, slot, -1):
            there[index] = there[index - 1]
        there[slot] = event
        count += 1
    return height
