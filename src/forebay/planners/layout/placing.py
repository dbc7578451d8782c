"""A partial layout that grows from below, and what placing one buffer more means for those in wait, compiled. No
torch.

The inference of the exact search (``canonical``). What is changed is noted on a trail, and can be taken back.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from forebay.kernels.jit import inlined

__all__ = [
    "CANDIDATES",
    "COUNTERS",
    "LISTS",
    "MODE",
    "NODES",
    "NOWHERE",
    "RANKED",
    "TOP",
    "TRAIL",
    "Outcome",
    "Row",
    "State",
    "Task",
    "hopeless",
    "note",
    "overfull",
    "put",
    "undo",
    "wasteful",
]

Row = NDArray[np.int64]


class Outcome(IntEnum):
    """How a search stands after some nodes; ``CRAMPED``: a stack is to be made longer before it can go on."""

    FOUND = 0
    NONE = 1
    PAUSED = 2
    CRAMPED = 3


class Task(NamedTuple):
    """What is searched: of each buffer its sections, bytes, alignment, place in an order and twins (a number that is
    equal for those that are alike), those that it is live together with (``links`` from ``links_at`` on), and of each
    section those that are live in it. ``fullest``: whether those in the fullest section come first, by what waits,
    where a part is entered."""

    start: Row
    stop: Row
    size: Row
    alignment: Row
    place: Row
    twin: Row
    links_at: Row
    links: Row
    members_at: Row
    members: Row
    fullest: bool


class State(NamedTuple):
    """How far it is. ``offsets`` are below 0 for what waits, ``lowest`` is the least address that it can have.
    ``floor`` is the least that any of them can have in a section, ``total`` are their bytes and ``spans`` how many of
    them go on into the next section. ``rank`` says whose turn it is first. ``stamps`` marks sections, ``queue`` is room
    for the buffers of one; ``trail`` has what was changed, to be undone in reverse order."""

    offsets: Row
    lowest: Row
    rank: Row
    floor: Row
    total: Row
    spans: Row
    stamps: Row
    queue: Row
    counters: Row
    candidates: Row
    lists: Row
    trail: NDArray[np.int64]
    frames: NDArray[np.int64]


# Counters.
TOP: Final = 0
TRAIL: Final = 1
CANDIDATES: Final = 2
LISTS: Final = 3
MODE: Final = 4
NODES: Final = 5
STAMP: Final = 6
COUNTERS: Final = 7

# What a row of the trail is about.
PLACED: Final = 0
FLOOR: Final = 1
LOWEST: Final = 2
RANKED: Final = 3

NOWHERE: Final = 1 << 62


@inlined
def note(state: State, what: int, index: int, before: int) -> None:
    at = state.counters[TRAIL]
    state.trail[at, 0], state.trail[at, 1], state.trail[at, 2] = what, index, before
    state.counters[TRAIL] = at + 1


@inlined
def undo(task: Task, state: State, mark: int) -> None:
    """Takes back all that the trail has from ``mark`` on."""
    for at in range(state.counters[TRAIL] - 1, mark - 1, -1):
        what, index, before = state.trail[at, 0], state.trail[at, 1], state.trail[at, 2]
        if what == FLOOR:
            state.floor[index] = before
        elif what == LOWEST:
            state.lowest[index] = before
        elif what == RANKED:
            state.rank[index] = before
        else:
            state.offsets[index] = -1
            for section in range(task.start[index], task.stop[index]):
                state.total[section] += task.size[index]
                if section + 1 < task.stop[index]:
                    state.spans[section] += 1
    state.counters[TRAIL] = mark


@inlined
def _lift(task: Task, state: State, section: int) -> None:
    """No floor is below the lowest place that a buffer in wait can have."""
    least = NOWHERE
    for at in range(task.members_at[section], task.members_at[section + 1]):
        other = task.members[at]
        if state.offsets[other] < 0:
            least = min(least, state.lowest[other])
    if least != NOWHERE and state.floor[section] < least:
        note(state, FLOOR, section, state.floor[section])
        state.floor[section] = least


@inlined
def put(task: Task, state: State, row: int) -> bool:
    """Puts ``row`` where it can be lowest, and works out what that means for those in wait. Returns whether any of them
    meets it."""
    offset = state.lowest[row]
    top = offset + task.size[row]
    state.offsets[row] = offset
    note(state, PLACED, row, 0)
    for section in range(task.start[row], task.stop[row]):
        note(state, FLOOR, section, state.floor[section])
        state.floor[section] = top
        state.total[section] -= task.size[row]
        if section + 1 < task.stop[row]:
            state.spans[section] -= 1
    state.counters[STAMP] += 1
    first, end = task.start[row], task.stop[row]
    met = False
    for at in range(task.links_at[row], task.links_at[row + 1]):
        other = task.links[at]
        if state.offsets[other] >= 0:
            continue
        met = True
        if state.lowest[other] < top:
            note(state, LOWEST, other, state.lowest[other])
            step = task.alignment[other]
            state.lowest[other] = (top + step - 1) // step * step
            for section in range(task.start[other], task.stop[other]):
                state.stamps[section] = state.counters[STAMP]
            first, end = min(first, task.start[other]), max(end, task.stop[other])
    for section in range(first, end):
        if state.stamps[section] == state.counters[STAMP]:
            _lift(task, state, section)
    return met


@inlined
def overfull(task: Task, state: State, row: int, capacity: int) -> bool:
    """Whether what waits in one of the sections of ``row`` has no room above the place of that: most of what cannot be
    next is told by this, before anything is changed."""
    for section in range(task.start[row], task.stop[row]):
        if state.lowest[row] + state.total[section] > capacity:
            return True
    return False


@inlined
def hopeless(state: State, first: int, end: int, offset: int, capacity: int) -> bool:
    """Whether what waits in one of the sections has no room above its floor."""
    for section in range(first, end):  # noqa: SIM110 (numba compiles no generator)
        if max(offset, state.floor[section]) + state.total[section] > capacity:
            return True
    return False


@inlined
def wasteful(task: Task, state: State, first: int, end: int, offset: int, capacity: int) -> bool:
    """Whether those in wait in one of the sections where some had to go up now reach too high even where each comes as
    soon as it can: none of those that can only come above some address fills the room below that."""
    for section in range(first, end):
        if state.stamps[section] != state.counters[STAMP]:
            continue
        floor, waiting = max(offset, state.floor[section]), 0
        for at in range(task.members_at[section], task.members_at[section + 1]):
            one = task.members[at]
            if state.offsets[one] >= 0 or state.lowest[one] <= floor:
                continue
            index = waiting  # the highest first
            while index > 0 and state.lowest[state.queue[index - 1]] < state.lowest[one]:
                state.queue[index] = state.queue[index - 1]
                index -= 1
            state.queue[index] = one
            waiting += 1
        above = 0
        for index in range(waiting):
            one = state.queue[index]
            above += task.size[one]
            if state.lowest[one] + above > capacity:
                return True
    return False
