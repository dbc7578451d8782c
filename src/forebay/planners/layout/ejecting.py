"""Local search over layouts that leave some buffers out, compiled. No torch.

All that has an address fits below a target; what has none is in a pool. A buffer of the pool goes into a gap; where
there is none, to the address at which those that are in its way count the least, and these go into the pool and look
for gaps of their own. What finds no gap counts more from then on, so that the search is driven to other places
(Nagata and Braysy, "A powerful route minimization heuristic for the vehicle routing problem with time windows",
Operations Research Letters 2009: ejection pools with penalty counters).
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from forebay.kernels.jit import compiled, inlined
from forebay.planners.layout.draws import draw
from forebay.planners.layout.table import Column, Lives

__all__ = ["OUT", "Pool", "eject"]

OUT: Final = -1
"""The address of a buffer in the pool."""

TRIED: Final = 64
"""Addresses that are compared at most, for a buffer that finds no gap."""


class Pool(NamedTuple):
    """Addresses so far (``OUT``: none), those that have one in the order of them, those that have none, how many there
    are of each (``counts``), and what each buffer counts."""

    offsets: Column
    there: Column
    out: Column
    counts: Column
    weight: NDArray[np.float64]


@inlined
def _meeting(lives: Lives, pool: Pool, row: int, met: Column) -> Any:
    """Writes those that have an address and are live together with ``row`` into ``met``, by address; how many."""
    start, end, count = lives.lower[row], lives.upper[row], 0
    for index in range(pool.counts[0]):
        other = pool.there[index]
        if lives.lower[other] < end and start < lives.upper[other]:
            met[count] = other
            count += 1
    return count


@inlined
def _gap(lives: Lives, pool: Pool, row: int, target: int, met: Column, count: int, how: int) -> Any:
    """An address in a gap that holds ``row`` below ``target``, or ``OUT``: ``how`` 0 for the gap that it fills best, 1
    for the lowest, 2 for the highest. Of two sides of a gap it takes the lower, but for the highest."""
    size, step = lives.size[row], lives.alignment[row]
    top, found, least = np.int64(0), np.int64(OUT), np.int64(1 << 62)
    for index in range(count + 1):
        address = target if index == count else pool.offsets[met[index]]
        here = top if step == 1 else (top + step - 1) // step * step
        room = address - here
        if room >= size:
            if how == 2:
                found = address - size
                found = found if step == 1 else found // step * step
            elif how == 1:
                return here
            elif room - size < least:
                found, least = here, room - size
        if index < count:
            top = max(top, address + lives.size[met[index]])
    return found


@inlined
def _put(pool: Pool, row: int, address: int) -> None:
    slot = pool.counts[0]
    while slot > 0 and pool.offsets[pool.there[slot - 1]] > address:
        pool.there[slot] = pool.there[slot - 1]
        slot -= 1
    pool.there[slot] = row
    pool.offsets[row] = address
    pool.counts[0] += 1


@inlined
def _take(pool: Pool, row: int) -> None:
    slot, last = 0, pool.counts[0] - 1
    while pool.there[slot] != row:
        slot += 1
    while slot < last:
        pool.there[slot] = pool.there[slot + 1]
        slot += 1
    pool.counts[0] = last
    pool.offsets[row] = OUT


@inlined
def _cheapest(
    lives: Lives, pool: Pool, row: int, target: int, met: Column, count: int, state: NDArray[np.uint64]
) -> Any:
    """The address for ``row`` at which those in its way count the least."""
    size, step = lives.size[row], lives.alignment[row]
    found, least = np.int64(0), 1e300
    tries = min(TRIED, 2 * count + 1)
    for turn in range(tries):
        which = turn if tries < TRIED else draw(state) % (2 * count + 1)
        if which == 0:
            place = np.int64(0)
        elif which % 2:
            place = pool.offsets[met[which // 2]] - size
        else:
            place = pool.offsets[met[which // 2 - 1]] + lives.size[met[which // 2 - 1]]
        place = place if step == 1 else (place + step - 1) // step * step
        if place < 0 or place + size > target:
            continue
        cost = 0.0
        for index in range(count):
            other = met[index]
            address = pool.offsets[other]
            if address >= place + size:
                break
            if address + lives.size[other] > place:
                cost += pool.weight[other]
                if cost >= least:
                    break
        cost *= 1.0 + 0.1 * draw(state) / 4294967296.0
        if cost < least:
            found, least = place, cost
    return found


@inlined
def _oust(lives: Lives, pool: Pool, row: int, place: int, met: Column, count: int, gone: Column) -> Any:
    """Puts ``row`` at ``place``, and writes those that were in its way into ``gone``, what counts the most first: the
    others find a gap later too. Returns how many they are."""
    going = 0
    for index in range(count):
        other = met[index]
        if pool.offsets[other] < place + lives.size[row] and place < pool.offsets[other] + lives.size[other]:
            slot = going
            while slot > 0 and pool.weight[gone[slot - 1]] < pool.weight[other]:
                gone[slot] = gone[slot - 1]
                slot -= 1
            gone[slot] = other
            going += 1
    for index in range(going):
        _take(pool, gone[index])
    _put(pool, row, place)
    return going


@compiled
def eject(
    lives: Lives, pool: Pool, target: int, rounds: int, shakes: int, more: float, state: NDArray[np.uint64]
) -> int:
    """At most ``rounds`` buffers of the pool find an address; after each that others had to go for, ``shakes`` of those
    that are there move to another gap. Returns how many are left in the pool."""
    met = np.empty(len(lives.size), np.int64)
    gone = np.empty(len(lives.size), np.int64)
    counts = pool.counts
    for _ in range(rounds):
        if counts[1] == 0:
            break
        at = draw(state) % counts[1]
        row = pool.out[at]
        pool.out[at] = pool.out[counts[1] - 1]
        counts[1] -= 1
        count = _meeting(lives, pool, row, met)
        place = _gap(lives, pool, row, target, met, count, 0)
        if place >= 0:
            _put(pool, row, place)
            continue
        pool.weight[row] += more
        place = _cheapest(lives, pool, row, target, met, count, state)
        for index in range(_oust(lives, pool, row, place, met, count, gone)):
            one = gone[index]
            count = _meeting(lives, pool, one, met)
            place = _gap(lives, pool, one, target, met, count, 0)
            if place >= 0:
                _put(pool, one, place)
            else:
                pool.out[counts[1]] = one
                counts[1] += 1
        for _ in range(shakes):
            one = pool.there[draw(state) % counts[0]]
            before = pool.offsets[one]
            _take(pool, one)
            count = _meeting(lives, pool, one, met)
            place = _gap(lives, pool, one, target, met, count, draw(state) % 3)
            _put(pool, one, place if place >= 0 else before)
    left: int = counts[1]
    return left
