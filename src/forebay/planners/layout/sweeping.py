"""A search that goes through time with many partial layouts at a time, compiled. No torch.

Buffers find addresses in the order in which they come, each at one of the two ends of a gap. A partial layout is then
no more than what lies where among those that are still live: of two that agree about that one is kept, whatever was
before. That is what the searches that grow from below (``canonical``, ``beam``) cannot see, and the other way round.

How good a partial layout is, is in how few pieces the free memory of later sections is, as far as those that have an
address tell: a buffer that touches a neighbour for all of its life leaves no gap between them (the touching perimeter
of Lodi, Martello and Vigo, "Heuristic and metaheuristic approaches for a class of two-dimensional bin packing
problems", INFORMS Journal on Computing 1999). What has no chance is forgotten: in each of the next sections those in
wait need their bytes, of which a gap holds no more than the largest sum of some of their sizes.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from forebay.kernels.jit import compiled, inlined
from forebay.planners.layout.draws import draw
from forebay.planners.layout.partial import seen_before, sort_by
from forebay.planners.layout.table import Column

__all__ = [
    "FEWEST",
    "WAITING",
    "Course",
    "Fronts",
    "Needs",
    "Offers",
    "choose",
    "look_ahead",
    "offer",
    "room_for_needs",
]

WAITING: Final = -1
"""The address of a buffer that has none yet."""

FEWEST: Final = 64
"""Addresses for a buffer that are looked at in one partial layout, at most."""

SUMS: Final = 2048
"""Sums of sizes that are told apart in a section, at most: where there are more, a gap is taken to hold what it has."""

ENDLESS: Final = 1 << 60


class Course(NamedTuple):
    """What is swept: of each buffer the first section and the one after the last, and its bytes; the ``order`` in which
    buffers come, those of earlier sections first; and the bytes that there are."""

    start: Column
    stop: Column
    size: Column
    order: Column
    capacity: int


class Fronts(NamedTuple):
    """Partial layouts, one a row: addresses, and how good each is (the less the better)."""

    offsets: NDArray[np.int64]
    score: NDArray[np.float64]


class Offers(NamedTuple):
    """Addresses for the next buffer: in which partial layout, where, and how good that would be."""

    parent: Column
    place: Column
    score: NDArray[np.float64]


class Needs(NamedTuple):
    """What those in wait need in each of the next sections: ``nbytes`` in all, the ``least`` and the ``most`` of one of
    them, and in ascending order the first ``known`` of ``sums``, which some of them can have together (-1: there are
    more than are told apart). ``spare`` is for work, as long as a row of ``sums``."""

    nbytes: Column
    least: Column
    most: Column
    known: Column
    sums: NDArray[np.int64]
    spare: Column


def room_for_needs(ahead: int) -> Needs:
    """Needs of ``ahead`` sections, not filled yet."""
    least, most, nbytes, known = (np.zeros(ahead, np.int64) for _ in range(4))
    return Needs(nbytes, least, most, known, np.zeros((ahead, SUMS), np.int64), np.zeros(SUMS, np.int64))


@inlined
def _add(sums: Column, count: int, size: int, capacity: int, spare: Column) -> Any:
    """``sums`` with each of them plus ``size``, where that is no more than the capacity; how many there are then, -1 if
    they are too many."""
    low, high, made = 0, 0, 0
    while high < count:
        if low < count and sums[low] <= sums[high] + size:
            value = sums[low]
            low += 1
        else:
            value = sums[high] + size
            high += 1
        if value > capacity:
            break
        if made == 0 or spare[made - 1] != value:
            if made == len(spare):
                return -1
            spare[made] = value
            made += 1
    sums[:made] = spare[:made]
    return made


@compiled
def look_ahead(course: Course, placed: int, needs: Needs) -> None:
    """Fills ``needs`` for the section in which the last of the first ``placed`` buffers comes, and for those after."""
    section = course.start[course.order[placed - 1]]
    for ahead in range(len(needs.nbytes)):
        sums, count = needs.sums[ahead], 1
        nbytes, least, most = 0, ENDLESS, 0
        sums[0] = 0
        for index in range(placed, len(course.order)):
            row = course.order[index]
            if course.start[row] > section + ahead:
                break
            if course.stop[row] > section + ahead:
                size = course.size[row]
                nbytes, least, most = nbytes + size, min(least, size), max(most, size)
                if count >= 0:
                    count = _add(sums, count, size, course.capacity, needs.spare)
        needs.nbytes[ahead], needs.least[ahead], needs.most[ahead], needs.known[ahead] = nbytes, least, most, count


@inlined
def _live(course: Course, placed: int, section: int, rows: Column) -> Any:
    """Writes those of the first ``placed`` that are live in ``section`` into ``rows``; how many."""
    count = 0
    for index in range(placed):
        row = course.order[index]
        if course.stop[row] > section:
            rows[count] = row
            count += 1
    return count


@compiled
def offer(
    course: Course, placed: int, fronts: Fronts, count: int, noise: float, state: NDArray[np.uint64], offers: Offers
) -> int:
    """Writes the addresses that the next buffer can have in the first ``count`` of ``fronts``; how many. Scores are
    made worse at random by up to ``noise``."""
    row = course.order[placed]
    section, stop, size = course.start[row], course.stop[row], course.size[row]
    rows, made = np.empty(placed, np.int64), 0
    among = _live(course, placed, section, rows)
    for index in range(count):
        offsets, most = fronts.offsets[index], made + FEWEST
        sort_by(rows, among, offsets)
        bottom, below = 0, ENDLESS  # the wall below stays for ever
        for at in range(among + 1):
            top = offsets[rows[at]] if at < among else course.capacity
            above = course.stop[rows[at]] if at < among else ENDLESS
            for side in range(2):
                place = bottom if side == 0 else top - size
                if top - bottom < size or (side == 1 and place == bottom) or made == most:
                    continue
                alone_below = max(0, stop - max(section, below if place == bottom else section))
                alone_above = max(0, stop - max(section, above if place + size == top else section))
                score = fronts.score[index] + alone_below + alone_above - (stop - section)
                offers.parent[made], offers.place[made] = index, place
                offers.score[made] = score + noise * draw(state) / 4294967296.0
                made += 1
            if at < among:
                bottom, below = top + course.size[rows[at]], above
    return made


@inlined
def _held(needs: Needs, ahead: int, gap: int) -> Any:
    """The most bytes of a gap that those in wait can fill, as far as it is known."""
    count = needs.known[ahead]
    if gap < needs.least[ahead] or count < 0:
        return gap if count < 0 and gap >= needs.least[ahead] else 0
    low, high = 0, count
    while high - low > 1:
        middle = (low + high) // 2
        if needs.sums[ahead, middle] <= gap:
            low = middle
        else:
            high = middle
    return needs.sums[ahead, low]


@inlined
def _hopeful(course: Course, needs: Needs, section: int, rows: Column, count: int, offsets: Column) -> bool:
    """Whether there is room for those in wait in each of the next sections, between those ``rows`` that are live then,
    which are in the order of their addresses."""
    for ahead in range(len(needs.nbytes)):
        if needs.nbytes[ahead] == 0:
            continue
        bottom, held, widest = 0, 0, 0
        for at in range(count + 1):
            if at < count and course.stop[rows[at]] <= section + ahead:
                continue
            top = offsets[rows[at]] if at < count else course.capacity
            held += _held(needs, ahead, top - bottom)
            widest = max(widest, top - bottom)
            if at < count:
                bottom = top + course.size[rows[at]]
        if held < needs.nbytes[ahead] or widest < needs.most[ahead]:
            return False
    return True


@inlined
def _key(rows: Column, count: int, offsets: Column, marks: NDArray[np.uint64]) -> Any:
    """A number, not 0, that is equal for those that agree about who is where."""
    key = np.uint64(1)
    for at in range(count):
        row = rows[at]
        key ^= (np.uint64(offsets[row]) + marks[row]) * (marks[row] | np.uint64(1))
    return key if key != 0 else np.uint64(1)


@compiled
def choose(
    course: Course,
    placed: int,
    fronts: Fronts,
    offers: Offers,
    made: int,
    needs: Needs,
    marks: NDArray[np.uint64],
    into: Fronts,
) -> int:
    """Makes the best of the ``made`` offers that have a chance the rows of ``into``, as many as it has; how many.
    ``needs`` are those behind the buffer that is placed, ``marks`` has a random number for each buffer."""
    row, kept = course.order[placed], 0
    section = course.start[row]
    rows = np.empty(placed + 1, np.int64)
    among = _live(course, placed + 1, section, rows)
    seen = np.zeros(4 * len(into.score) + 1, np.uint64)
    for index in np.argsort(offers.score[:made]):
        if kept == len(into.score):
            break
        offsets = fronts.offsets[offers.parent[index]]
        offsets[row] = offers.place[index]
        sort_by(rows, among, offsets)
        if _hopeful(course, needs, section, rows, among, offsets) and not seen_before(
            seen, _key(rows, among, offsets, marks)
        ):
            into.offsets[kept] = offsets
            into.score[kept] = offers.score[index]
            kept += 1
    return kept
