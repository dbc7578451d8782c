"""The dynamic programme over a chain of blocks: one choice for each, in the least time that the device has room for.

State: what is decided for the blocks up to some block, by the bytes that they hold until their backward, by how far the
link is behind in forward and in backward, and by the seconds so far. Transition: the next block takes one of its
choices. With ``held`` bytes and ``workspace`` of a choice, a chain fits into M bytes if for every block b

    held(1) + ... + held(b) + workspace(b) <= M,  held(1) + ... + held(b) + bytes that still wait to leave <= M,

which is what is there when b goes backward, and when it has gone forward; for the second, compute waits for the link as
long as need be. Forward is as long as compute, with those waits, and what the link is behind at its end, ``q``;
backward as long as compute and what the link was behind, ``e``:

    q(b) = max(0, q(b - 1) - forward(b)) + out(b),        e(b) = max(0, e(b - 1) - backward(b)) + back(b),

for copies that follow each other, out as soon as a block has computed, back from the turn on in reverse order. Of equal
states one is kept, and where nothing moves only those that no other beats in both bytes and seconds: what is dropped
would stay beaten whatever follows. That is exact while there are at most ``MOST`` states a block, and ``SLOTS`` where
nothing moves; of more, one is kept in each cell of a grid, the fastest in it, and the one that holds the least.

A segment is one block: rotor's recursion over (start, end, memory) is over segments of several, which a plan cannot
say. With segments of one block every checkpoint is held until its backward, and what is left of the recursion is one
pass over the chain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["MOST", "Link", "Step", "best_chain", "seconds_of"]

MOST = 2048
"""States a block that are kept as they are."""

GRID = 12
"""Cells along each axis where there are more."""

SLOTS = 500
"""Slots of memory, of each of which the fastest state is kept where nothing moves and there are more: as many as the
paper of ``rotor`` takes, and finds to give up less than 1 %."""

HELD, OUT, BACK, TIME = range(4)

WEIGHTS = np.sqrt([2.0, 3.0, 5.0, 7.0])
"""Of the four figures of a state in a sum that tells states apart."""


@dataclass(frozen=True, slots=True)
class Step:
    """One choice of a block: bytes held and of workspace, seconds that it adds to compute, and seconds of what leaves
    and of what comes back on the link."""

    held: float
    workspace: float
    seconds: float
    out: float = 0.0
    back: float = 0.0


@dataclass(frozen=True, slots=True)
class Link:
    """What a block computes, forward and backward, while the link moves what others left behind (seconds)."""

    forward: float
    backward: float


def best_chain(
    steps: Sequence[Sequence[Step]], links: Sequence[Link], room: float, rate: float = 0.0
) -> list[int] | None:
    """For each block the place of its choice in the fastest chain that fits into ``room`` bytes; None if none does.
    ``rate``: bytes/s at which what leaves does."""
    states: NDArray[Any] = np.zeros((1, 4))
    history = []
    tables: dict[int, NDArray[Any]] = {}
    for options, link in zip(steps, links, strict=True):
        # Blocks that are alike have the same options: one table serves all of them.
        if id(options) not in tables:
            tables[id(options)] = _table(options)
        after, fits = _after(states, tables[id(options)], link, room, rate)
        places = np.flatnonzero(fits)
        if not len(places):
            return None
        points = after.reshape(-1, 4)[places]
        kept = _undominated(points)
        choices, parents = np.divmod(places[kept], len(states))
        states = points[kept]
        history.append((parents, choices))
    at = int(np.argmin(states[:, TIME] + states[:, OUT] + states[:, BACK]))
    chosen = []
    for parents, choices in reversed(history):
        chosen.append(int(choices[at]))
        at = int(parents[at])
    return chosen[::-1]


def seconds_of(steps: Sequence[Step], links: Sequence[Link], room: float, rate: float = 0.0) -> float | None:
    """Seconds that one chain of choices adds, by the account above; None if it does not fit into ``room`` bytes."""
    states: NDArray[Any] = np.zeros((1, 4))
    for step, link in zip(steps, links, strict=True):
        after, fits = _after(states, _table([step]), link, room, rate)
        if not fits[0, 0]:
            return None
        states = after[0]
    return float(states[0, TIME] + states[0, OUT] + states[0, BACK])


def _table(options: Sequence[Step]) -> NDArray[Any]:
    """The figures of ``options``, a column for each, in rows of one entry an option."""
    rows = [(step.held, step.workspace, step.seconds, step.out, step.back) for step in options]
    return np.array(rows, dtype=float).reshape(-1, 5).T[:, :, None]


def _after(
    states: NDArray[Any], table: NDArray[Any], link: Link, room: float, rate: float
) -> tuple[NDArray[Any], NDArray[Any]]:
    """The states after each of the options of ``table``, by option and state, and which of them fit."""
    own, workspace, seconds, leaves, comes = table
    held = states[:, HELD] + own
    out = np.maximum(0.0, states[:, OUT] - link.forward) + leaves
    back = np.maximum(0.0, states[:, BACK] - link.backward - seconds) + comes
    time = states[:, TIME] + seconds
    if rate:
        # Compute waits until what is on its way out leaves enough room.
        wait = np.maximum(0.0, out - np.maximum(0.0, room - held) / rate)
        out -= wait
        time = time + wait
    return np.stack([held, out, back, time], axis=-1), held + workspace <= room


def _undominated(points: NDArray[Any]) -> NDArray[Any]:
    """Places of the states that are kept."""
    if not points[:, [OUT, BACK]].any():
        return _fastest(points)
    # Equal states have equal sums of their figures, each in parts of its largest and with a weight of its own.
    _, first = np.unique(points / _spans(points) @ WEIGHTS, return_index=True)
    if len(first) <= MOST:
        return np.sort(first)
    thinned: NDArray[Any] = first[_thinned(points[first])]
    return thinned


def _fastest(points: NDArray[Any]) -> NDArray[Any]:
    """Where nothing moves: a state is beaten if one with fewer bytes is as fast."""
    order = np.lexsort((points[:, TIME], points[:, HELD]))
    times = points[order, TIME]
    order = order[times < np.minimum.accumulate(np.r_[np.inf, times[:-1]])]
    if len(order) > SLOTS:
        # The last in each slot is the fastest in it; the first of all holds the least.
        held = points[order, HELD]
        slots = np.ceil((held - held[0]) / (held[-1] - held[0]) * SLOTS).astype(int)
        order = order[np.r_[slots[1:] != slots[:-1], True]]
    return np.sort(order)


def _thinned(points: NDArray[Any]) -> NDArray[Any]:
    """Places of the fastest in each cell of the grid, of the one that holds the least, and of those that nothing beats
    while the link is behind with nothing: what moves is never to be worse than if nothing could."""
    cells = np.ceil(points[:, :TIME] / _spans(points)[:TIME] * GRID).astype(int)
    keys = cells @ (GRID + 1) ** np.arange(TIME)
    order = np.lexsort((points[:, HELD], points[:, TIME], keys))
    keys = keys[order]
    idle = np.flatnonzero(~points[:, [OUT, BACK]].any(axis=1))
    least = np.argmin(points[:, HELD])
    kept: NDArray[Any] = np.r_[order[np.r_[True, keys[1:] != keys[:-1]]], idle[_fastest(points[idle])], least]
    return np.unique(kept)


def _spans(points: NDArray[Any]) -> NDArray[Any]:
    """The largest of each figure."""
    spans: NDArray[Any] = np.maximum(points.max(axis=0), 1e-300)
    return spans
