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
would stay beaten whatever follows. That is exact while there are at most ``MOST`` states a block; of more, one is kept
in each cell of a grid, the fastest in it, and the one that holds the least.

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

MOST = 4096
"""States a block that are kept as they are."""

GRID = 12
"""Cells along each axis where there are more."""

HELD, OUT, BACK, TIME = range(4)


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
    for options, link in zip(steps, links, strict=True):
        reached, parents, choices = [], [], []
        for place, step in enumerate(options):
            after, fits = _after(states, step, link, room, rate)
            reached.append(after[fits])
            parents.append(np.flatnonzero(fits))
            choices.append(np.full(len(parents[-1]), place))
        points = np.concatenate(reached)
        if not len(points):
            return None
        kept = _undominated(points)
        states = points[kept]
        history.append((np.concatenate(parents)[kept], np.concatenate(choices)[kept]))
    at = int(np.argmin(states[:, TIME] + states[:, OUT] + states[:, BACK]))
    chosen = []
    for parent, choice in reversed(history):
        chosen.append(int(choice[at]))
        at = int(parent[at])
    return chosen[::-1]


def seconds_of(steps: Sequence[Step], links: Sequence[Link], room: float, rate: float = 0.0) -> float | None:
    """Seconds that one chain of choices adds, by the account above; None if it does not fit into ``room`` bytes."""
    states: NDArray[Any] = np.zeros((1, 4))
    for step, link in zip(steps, links, strict=True):
        states, fits = _after(states, step, link, room, rate)
        if not fits[0]:
            return None
    return float(states[0, TIME] + states[0, OUT] + states[0, BACK])


def _after(states: NDArray[Any], step: Step, link: Link, room: float, rate: float) -> tuple[NDArray[Any], NDArray[Any]]:
    """The states after ``step``, and which of them fit."""
    after = states.copy()
    after[:, HELD] += step.held
    after[:, OUT] = np.maximum(0.0, states[:, OUT] - link.forward) + step.out
    after[:, BACK] = np.maximum(0.0, states[:, BACK] - link.backward - step.seconds) + step.back
    after[:, TIME] += step.seconds
    if rate:
        # Compute waits until what is on its way out leaves enough room.
        wait = np.maximum(0.0, after[:, OUT] - np.maximum(0.0, room - after[:, HELD]) / rate)
        after[:, OUT] -= wait
        after[:, TIME] += wait
    return after, after[:, HELD] + step.workspace <= room


def _undominated(points: NDArray[Any]) -> NDArray[Any]:
    """Places of the states that are kept."""
    points_, first = np.unique(points, axis=0, return_index=True)
    if not points_[:, [OUT, BACK]].any():
        # Sorted by bytes: a state is beaten if one with fewer is as fast.
        before = np.minimum.accumulate(np.r_[np.inf, points_[:-1, TIME]])
        beats = points_[:, TIME] < before
        points_, first = points_[beats], first[beats]
    if len(points_) <= MOST:
        return np.sort(first)
    spans = np.maximum(points_[:, :TIME].max(axis=0), 1e-300)
    cells = np.ceil(points_[:, :TIME] / spans * GRID).astype(int)
    order = np.lexsort((points_[:, TIME], *cells.T))
    cells = cells[order]
    begins = np.r_[True, (cells[1:] != cells[:-1]).any(axis=1)]
    return np.unique(np.r_[first[order[begins]], first[np.argmin(points_[:, HELD])]])
