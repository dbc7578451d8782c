"""A search that goes on with many partial layouts at a time, compiled. No torch.

Layouts grow from below, one buffer at a time, as in the exact search (``canonical``): every buffer lies as low as it
can, and none goes as high as the end of another that could be put below it first. Of all partial layouts of as many
buffers the best are kept, the others are forgotten: it finds a layout or it does not, and proves nothing. Of those that
hold the same buffers one is kept.

How good one is, is the room that it has wasted: in each section, bytes below the lowest place that any buffer in wait
can have there that are nobody's, as a share of the bytes that may be nobody's in the end; over all sections, by the
area (bytes times life) that has found a place. (Libralesso and Fontan, "An anytime tree search algorithm for the 2018
ROADEF/EURO challenge glass cutting problem", EJOR 2021, order by waste over area.)
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from forebay.kernels.jit import compiled, inlined
from forebay.planners.layout.partial import seen_before, sort_by
from forebay.planners.layout.placing import Task
from forebay.planners.layout.table import Column

__all__ = ["FEWEST", "Children", "Level", "grow", "keep"]

FEWEST: Final = 64
"""Children of a partial layout that are looked at, at most."""

NOWHERE: Final = 1 << 62


class Level(NamedTuple):
    """Partial layouts, one a row: the floor of each section (below it nobody in wait can lie), who waits, the address
    of the last one placed, a key of the set that has found a place, and its area."""

    floors: NDArray[np.int64]
    waiting: NDArray[np.uint8]
    at: Column
    keys: NDArray[np.uint64]
    area: NDArray[np.float64]


class Children(NamedTuple):
    """What partial layouts become with one buffer more: whose child it is, the buffer, its address, and how good it
    is (the less the better)."""

    parent: Column
    row: Column
    place: Column
    score: NDArray[np.float64]


@inlined
def _lowest(task: Task, floors: Column, waiting: NDArray[np.uint8], lowest: Column) -> None:
    """The lowest address of each buffer in wait."""
    for row in range(len(task.size)):
        if waiting[row]:
            top = 0
            for section in range(task.start[row], task.stop[row]):
                top = max(top, floors[section])
            step = task.alignment[row]
            lowest[row] = top if step == 1 else (top + step - 1) // step * step


@inlined
def _lift(task: Task, floors: Column, waiting: NDArray[np.uint8], lowest: Column, least: Column) -> None:
    """No floor is below the lowest address that a buffer in wait can have there."""
    least[:] = NOWHERE
    for row in range(len(task.size)):
        if waiting[row]:
            for section in range(task.start[row], task.stop[row]):
                least[section] = min(least[section], lowest[row])
    for section in range(len(floors)):
        if least[section] < NOWHERE:
            floors[section] = max(floors[section], least[section])


@inlined
def _wasted(
    task: Task,
    floors: Column,
    waiting: NDArray[np.uint8],
    lowest: Column,
    order: Column,
    slack: Column,
    at: int,
    capacity: int,
    grain: int,
    reached: Column,
) -> Any:
    """The shares of what may be wasted that are wasted, over all sections; infinite where it is more than that.

    In a section those in wait reach highest where each comes as soon as it can, the lowest first: what is between
    them then is wasted in any order.
    """
    reached[:] = floors
    for index in range(len(order)):
        row = order[index]
        if waiting[row]:
            place = max(lowest[row], at)
            for section in range(task.start[row], task.stop[row]):
                reached[section] = max(reached[section], place) + task.size[row]
    found = 0.0
    for section in range(len(floors)):
        room = capacity - reached[section]
        if room < 0:
            return np.inf
        found += (slack[section] - room) / (slack[section] + grain)
    return found


@inlined
def _put(task: Task, row: int, place: int, floors: Column) -> None:
    for section in range(task.start[row], task.stop[row]):
        floors[section] = place + task.size[row]


@compiled
def grow(
    task: Task,
    level: Level,
    count: int,
    areas: NDArray[np.float64],
    slack: Column,
    capacity: int,
    calm: float,
    grain: int,
    children: Children,
) -> int:
    """Writes the children of the first ``count`` of ``level`` that have a chance into ``children``; returns how many.
    ``slack`` are the bytes that may be nobody's in each section, ``areas`` those of the buffers; the more ``calm``, the
    more counts area, and the less waste; ``grain`` bytes count beside what a section may waste."""
    buffers, sections = len(task.size), level.floors.shape[1]
    lowest, reached, least = np.empty(buffers, np.int64), np.empty(sections, np.int64), np.empty(sections, np.int64)
    before, order = np.arange(buffers), np.arange(buffers)
    places, floors = np.empty(buffers, np.int64), np.empty(sections, np.int64)
    made = 0
    for index in range(count):
        waiting, at = level.waiting[index], level.at[index]
        _lowest(task, level.floors[index], waiting, places)
        sort_by(before, buffers, places)
        end = NOWHERE
        for row in range(buffers):
            if waiting[row]:
                end = min(end, places[row] + task.size[row])
        own = 0
        for row in range(buffers):
            place = places[row]
            if not waiting[row] or place >= end or place < at or own == FEWEST:
                continue
            own += 1
            floors[:] = level.floors[index]
            _put(task, row, place, floors)
            waiting[row] = 0
            _lowest(task, floors, waiting, lowest)
            _lift(task, floors, waiting, lowest, least)
            order[:] = before
            sort_by(order, buffers, lowest)
            wasted = _wasted(task, floors, waiting, lowest, order, slack, place, capacity, grain, reached)
            waiting[row] = 1
            if wasted < np.inf:
                children.parent[made], children.row[made], children.place[made] = index, row, place
                children.score[made] = (calm * sections + wasted) / (level.area[index] + areas[row])
                made += 1
    return made


@compiled
def keep(
    task: Task,
    level: Level,
    children: Children,
    made: int,
    marks: NDArray[np.uint64],
    areas: NDArray[np.float64],
    chosen: Column,
    into: Level,
) -> int:
    """Makes the best of the ``made`` children the rows of ``into``, as many as it has, and writes which they are into
    ``chosen``. Returns how many. ``marks`` has a random number for each buffer."""
    sections, kept = level.floors.shape[1], 0
    seen = np.zeros(4 * len(into.at) + 1, np.uint64)
    lowest, least = np.empty(len(task.size), np.int64), np.empty(sections, np.int64)
    for index in np.argsort(children.score[:made]):
        if kept == len(into.at):
            break
        parent, row = children.parent[index], children.row[index]
        key = level.keys[parent] ^ marks[row]
        if seen_before(seen, key):
            continue
        into.floors[kept] = level.floors[parent]
        into.waiting[kept] = level.waiting[parent]
        into.waiting[kept, row] = 0
        _put(task, row, children.place[index], into.floors[kept])
        _lowest(task, into.floors[kept], into.waiting[kept], lowest)
        _lift(task, into.floors[kept], into.waiting[kept], lowest, least)
        into.at[kept], into.keys[kept] = children.place[index], key
        into.area[kept] = level.area[parent] + areas[row]
        chosen[kept] = index
        kept += 1
    return kept
