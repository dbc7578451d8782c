"""Exact search over canonical layouts, compiled. No torch.

A layout is canonical if every buffer lies as low as those below it allow, and they are placed in the order of their
addresses, and of their ranks where these are equal. If any layout fits into a capacity, a canonical one does, so that
only those are searched, depth first (Moffitt, "MiniMalloc: A lightweight memory allocator for hardware-accelerated
machine learning", ASPLOS 2023; sections 4 and 5). What prunes:

canonical    no buffer goes below the one before it
dominance    no buffer goes as high as the end of another one that could be put below it first
sections     what waits in a section has to fit above its floor: the top of what is there, the lowest place that any
             buffer in wait can have, and the address of the buffer before
waste        that again for those that can only come above some address, and that address
overhead     a buffer that nobody in wait meets is put where it is: if that does not help, nothing does instead
twins        of buffers that are alike in all but their id the first has been tried for all
parts        where no buffer in wait spans two neighbouring sections, what lies before and what lies after are searched
             one by one; if one of them has no layout, nothing but what was placed before can help

The search is a loop over frames on a stack of its own, so that it can be stopped after some nodes and go on later.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from forebay.kernels.jit import compiled, inlined
from forebay.planners.layout.placing import (
    CANDIDATES,
    LISTS,
    MODE,
    NODES,
    NOWHERE,
    RANKED,
    TOP,
    TRAIL,
    Row,
    State,
    Task,
    hopeless,
    note,
    overfull,
    put,
    undo,
    wasteful,
)

__all__ = ["FRAME", "explore"]

# Columns of a frame: either a choice of the next buffer, or parts one after the other (in CHOICE: 0). Both have the
# buffers in question, as a piece of the lists, and candidates (buffers, or sections at which parts begin).
CHOICE: Final = 0
LIST_FROM: Final = 1
LIST_TO: Final = 2
FIRST: Final = 3
END: Final = 4
OFFSET: Final = 5
RANK: Final = 6
FROM: Final = 7
TO: Final = 8
NEXT: Final = 9
MARK: Final = 10
LISTED: Final = 11
FRAME: Final = 12

# Modes.
TRY: Final = 0
PART: Final = 1
DONE: Final = 2
FAILED: Final = 3


@inlined
def _enter(
    task: Task, state: State, list_from: int, list_to: int, first: int, end: int, offset: int, rank: int
) -> bool:
    """A frame for the choice among buffers of a list that wait, after one of ``rank`` was placed at ``offset``. Returns
    False, and makes none, if nobody waits."""
    counters, lists, candidates = state.counters, state.lists, state.candidates
    least = NOWHERE
    for at in range(list_from, list_to):
        row = lists[at]
        if state.offsets[row] < 0:
            least = min(least, state.lowest[row] + task.size[row])
    if least == NOWHERE:
        return False
    begin = counters[CANDIDATES]
    stop = begin
    for at in range(list_from, list_to):
        row = lists[at]
        place = state.lowest[row]
        if state.offsets[row] >= 0 or place >= least:
            continue
        if place < offset or (place == offset and state.rank[row] < rank):
            continue
        # Lists are in the order of ranks: so are candidates of the same place.
        index = stop
        while index > begin and state.lowest[candidates[index - 1]] > place:
            candidates[index] = candidates[index - 1]
            index -= 1
        candidates[index] = row
        stop += 1
    _push(state, True, list_from, list_to, first, end, begin, stop)
    frame = state.frames[counters[TOP] - 1]
    frame[OFFSET], frame[RANK] = offset, rank
    return True


@inlined
def _push(
    state: State, choice: bool, list_from: int, list_to: int, first: int, end: int, begin: int, stop: int
) -> None:
    counters = state.counters
    frame = state.frames[counters[TOP]]
    counters[TOP] += 1
    frame[CHOICE] = choice
    frame[LIST_FROM], frame[LIST_TO], frame[FIRST], frame[END] = list_from, list_to, first, end
    frame[FROM], frame[TO], frame[NEXT] = begin, stop, begin
    frame[MARK], frame[LISTED] = counters[TRAIL], counters[LISTS]
    counters[CANDIDATES] = stop


@inlined
def _next(task: Task, state: State, frame: Row) -> int:
    """The next candidate of a frame that has not been tried in the shape of a twin; -1: there is none."""
    while frame[NEXT] < frame[TO]:
        at = frame[NEXT]
        frame[NEXT] += 1
        row: int = state.candidates[at]
        again = False
        for earlier in range(frame[FROM], at):
            again = again or task.twin[state.candidates[earlier]] == task.twin[row]
        if not again:
            return row
    return -1


@inlined
def _split(task: Task, state: State, frame: Row, row: int) -> bool:
    """After ``row`` was placed: if it was the last to hold sections together, a frame for the parts, and True."""
    candidates, counters = state.candidates, state.counters
    begin = counters[CANDIDATES]
    stop = begin + 1
    candidates[begin] = frame[FIRST]
    for section in range(task.start[row], task.stop[row] - 1):
        if state.spans[section] == 0:
            candidates[stop] = section + 1
            stop += 1
    if stop == begin + 1:
        return False
    _push(state, False, frame[LIST_FROM], frame[LIST_TO], frame[FIRST], frame[END], begin, stop)
    return True


@inlined
def _rank(task: Task, state: State, begin: int, stop: int) -> None:
    """Ranks the buffers of a list anew, and sorts it: where it is ``task.fullest`` that come first, those that are in
    the fullest section, counting what waits; of these the first in the order. What was placed may have made another
    section the fullest."""
    rows = state.lists[begin:stop].copy()
    keys = np.empty(stop - begin, np.int64)
    for index in range(stop - begin):
        row, most = rows[index], 0
        if task.fullest:
            for section in range(task.start[row], task.stop[row]):
                most = max(most, state.total[section])
        keys[index] = -most * len(task.size) + task.place[row]
    order = np.argsort(keys)
    for index in range(stop - begin):
        row = rows[order[index]]
        state.lists[begin + index] = row
        note(state, RANKED, row, state.rank[row])
        state.rank[row] = index


@inlined
def _part(task: Task, state: State, frame: Row) -> bool:
    """Enters the next part of a frame in which somebody waits. Returns False if there is none."""
    counters, lists = state.counters, state.lists
    while frame[NEXT] < frame[TO]:
        at = frame[NEXT]
        frame[NEXT] += 1
        first = state.candidates[at]
        end = state.candidates[at + 1] if at + 1 < frame[TO] else frame[END]
        counters[LISTS], counters[CANDIDATES] = frame[LISTED], frame[TO]
        stop = counters[LISTS]
        for index in range(frame[LIST_FROM], frame[LIST_TO]):
            row = lists[index]
            if state.offsets[row] < 0 and task.start[row] < end and first < task.stop[row]:
                lists[stop] = row
                stop += 1
        begin = counters[LISTS]
        counters[LISTS] = stop
        _rank(task, state, begin, stop)
        if _enter(task, state, begin, stop, first, end, 0, -1):
            return True
    return False


@inlined
def _try(task: Task, state: State, frame: Row, capacity: int) -> int:
    """Tries the next candidate of a frame. Returns the mode in which to go on."""
    counters = state.counters
    undo(task, state, frame[MARK])
    counters[CANDIDATES], counters[LISTS] = frame[TO], frame[LISTED]
    row = _next(task, state, frame)
    if row < 0:
        counters[TOP] -= 1
        return FAILED
    if overfull(task, state, row, capacity):
        return TRY
    counters[NODES] += 1
    if not put(task, state, row):
        frame[NEXT] = frame[TO]
    offset = state.offsets[row]
    first, end = frame[FIRST], frame[END]
    if hopeless(state, first, end, offset, capacity) or wasteful(task, state, first, end, offset, capacity):
        return TRY
    if _split(task, state, frame, row):
        return PART
    waits = _enter(task, state, frame[LIST_FROM], frame[LIST_TO], frame[FIRST], frame[END], offset, state.rank[row])
    return TRY if waits else DONE


@inlined
def _cramped(task: Task, state: State) -> bool:
    """Whether one more turn could go over the end of a stack."""
    counters, buffers, sections = state.counters, len(task.size), len(state.floor)
    cramped: bool = (
        counters[TOP] + 2 > len(state.frames)
        or counters[TRAIL] + 2 * buffers + 2 * sections + 2 > len(state.trail)
        or counters[CANDIDATES] + buffers + sections + 2 > len(state.candidates)
        or counters[LISTS] + buffers + 2 > len(state.lists)
    )
    return cramped


@compiled
def explore(task: Task, state: State, capacity: int, nodes: int) -> int:
    """Goes on searching for at most ``nodes`` nodes more; see ``Outcome``. A new state has a frame for the choice of
    the first buffer. Where it has found a layout, ``state.offsets`` are that."""
    counters = state.counters
    until = counters[NODES] + nodes
    mode = counters[MODE]
    while True:
        top = counters[TOP] - 1
        counters[MODE] = mode
        if top < 0:
            return 0 if mode == DONE else 1
        frame = state.frames[top]
        if mode in (DONE, FAILED):
            if frame[CHOICE]:
                if mode == FAILED:
                    mode = TRY
                else:
                    counters[TOP] = top
            elif mode == DONE:
                mode = PART
            else:
                counters[TOP] = top
        elif counters[NODES] >= until:
            return 2
        elif _cramped(task, state):
            return 3
        elif mode == TRY:
            mode = _try(task, state, frame, capacity)
        elif _part(task, state, frame):
            mode = TRY
        else:
            counters[TOP] = top
            mode = DONE
