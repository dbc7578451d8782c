"""The exact search of ``canonical`` on a part of a table, some nodes at a time. No torch."""

from __future__ import annotations

from typing import final

import numpy as np
from numpy.typing import NDArray

from forebay.planners.layout.canonical import FRAME, explore
from forebay.planners.layout.placing import COUNTERS, NODES, Outcome, State, Task
from forebay.planners.layout.table import Column, Table

__all__ = ["Search", "task_of"]


def task_of(table: Table) -> Task:
    """The buffers of ``table``, all of one rank."""
    start, stop = table.sections
    count, sections = len(table), int(stop.max())
    together = (start[:, None] < stop) & (start < stop[:, None])
    np.fill_diagonal(together, False)
    at = np.arange(sections)[:, None]
    alike = np.stack([start, stop, table.size, table.alignment], axis=1)
    twin = np.unique(alike, axis=0, return_inverse=True)[1].reshape(-1)
    return Task(
        start,
        stop,
        table.size,
        table.alignment,
        np.zeros(count, np.int64),
        twin.astype(np.int64),
        *_listed(together),
        *_listed((start <= at) & (at < stop)),
        fullest=True,
    )


def _listed(chosen: NDArray[np.bool_]) -> tuple[Column, Column]:
    """The columns that each row has chosen, one row behind the other, and before them where each begins and the last
    ends."""
    at = np.zeros(len(chosen) + 1, np.int64)
    np.cumsum(chosen.sum(axis=1), out=at[1:])
    return at, np.nonzero(chosen)[1].astype(np.int64)


@final
class Search:
    """A search for a layout of ``table`` within ``capacity`` bytes that prefers what is early in ``order``, and before
    that what is in the fullest section, if that is ``task.fullest``; ``task`` is that of the table (``task_of``)."""

    def __init__(self, table: Table, task: Task, capacity: int, order: Column) -> None:
        place = np.empty(len(table), np.int64)
        place[order] = np.arange(len(table))
        self._table, self._task = table, task._replace(place=place)
        self._capacity = _reachable(table, capacity)
        self._state = _begun(self._task, order)

    @property
    def offsets(self) -> Column:
        """The addresses that it has found (bytes)."""
        return self._state.offsets

    @property
    def nodes(self) -> int:
        """Buffers that were placed so far, those included that were taken back."""
        return int(self._state.counters[NODES])

    def advance(self, nodes: int) -> Outcome:
        """Goes on for at most ``nodes`` nodes: ``FOUND``, ``NONE`` (there is no layout) or ``PAUSED``."""
        if self._table.peak > self._capacity:
            return Outcome.NONE
        until = self.nodes + nodes
        while True:
            outcome = Outcome(explore(self._task, self._state, self._capacity, until - self.nodes))
            if outcome is not Outcome.CRAMPED:
                return outcome
            self._state = _lengthened(self._state)


def _reachable(table: Table, capacity: int) -> int:
    """The most of ``capacity`` that any layout can use: where all sizes are multiples of something, and that is one of
    all alignments, so are all addresses of a canonical layout."""
    return capacity // table.unit * table.unit if table.aligned else capacity


def _begun(task: Task, order: Column) -> State:
    """The state in which nothing is placed yet."""
    count, sections = len(order), len(task.members_at) - 1
    total, spans = np.zeros(sections + 1, np.int64), np.zeros(sections + 1, np.int64)
    np.add.at(total, task.start, task.size)
    np.subtract.at(total, task.stop, task.size)
    np.add.at(spans, task.start, 1)
    np.subtract.at(spans, task.stop - 1, 1)
    counters = np.zeros(COUNTERS, np.int64)
    frames = np.zeros((2 * count + 2, FRAME), np.int64)
    lists = np.zeros(4 * count + 4, np.int64)
    candidates = np.zeros(8 * (count + sections) + 8, np.int64)
    lists[:count], candidates[:count] = order, order
    # The first frame: any buffer may come first, at address 0.
    counters[:4] = 1, 0, count, count
    frames[0] = 1, 0, count, 0, sections, 0, -1, 0, count, 0, 0, count
    return State(
        offsets=np.full(count, -1, np.int64),
        lowest=np.zeros(count, np.int64),
        rank=task.place.copy(),
        floor=np.zeros(sections, np.int64),
        total=np.cumsum(total)[:sections],
        spans=np.cumsum(spans)[:sections],
        stamps=np.zeros(sections, np.int64),
        queue=np.zeros(count, np.int64),
        counters=counters,
        candidates=candidates,
        lists=lists,
        trail=np.zeros((8 * (count + sections) + 8, 3), np.int64),
        frames=frames,
    )


def _lengthened(state: State) -> State:
    """The same with stacks of twice the length."""
    return state._replace(
        candidates=np.concatenate([state.candidates, np.zeros_like(state.candidates)]),
        lists=np.concatenate([state.lists, np.zeros_like(state.lists)]),
        trail=np.concatenate([state.trail, np.zeros_like(state.trail)]),
        frames=np.concatenate([state.frames, np.zeros_like(state.frames)]),
    )
