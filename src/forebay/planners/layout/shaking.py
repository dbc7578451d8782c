"""Local search over the order in which buffers are placed, compiled. No torch."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.kernels.jit import compiled, part
from forebay.planners.layout.draws import draw
from forebay.planners.layout.fits import ANY, fit
from forebay.planners.layout.table import Column, Lives

__all__ = ["HISTORY", "shake"]

HISTORY = 64
"""Rounds after which a candidate must be no worse than what was accepted then (Burke and Bykov, "The late acceptance
hill-climbing heuristic", EJOR 2017)."""


@part
def _excess(size: Column, offsets: Column, target: int, above: Column) -> tuple[int, int]:
    """How many buffers end above the target, and by how many bytes in all; their rows go into ``above``."""
    count, total = 0, 0
    for row in range(len(size)):
        over = offsets[row] + size[row] - target
        if over > 0:
            above[count] = row
            count += 1
            total += over
    return count, total


@compiled
def shake(
    order: Column,
    lives: Lives,
    best: bool,
    target: int,
    rounds: int,
    state: NDArray[np.uint64],
    history: Column,
    offsets: Column,
) -> Any:
    """Improves ``order``, in place, for at most ``rounds`` rounds or until all buffers end at ``target`` or below.

    A round moves one buffer to an earlier place, mostly one that ends too high, and keeps that if the bytes by which
    buffers end too high are no more than before, or than ``history`` has from some rounds ago. ``offsets`` become those
    of the lowest layout that was seen, and its height is returned; at the start they are those of ``order``. ``state``
    decides what is drawn.
    """
    count = len(order)
    height: Any = np.int64(0)
    for row in range(count):
        height = max(height, offsets[row] + lives.size[row])
    above, trial, places = np.empty(count, np.int64), np.empty(count, np.int64), offsets.copy()
    tried = offsets.copy()
    many, current = _excess(lives.size, places, target, above)
    for turn in range(rounds):
        if many == 0:
            break
        row = above[draw(state) % many]
        if draw(state) % 4 == 0:  # something else, so that not always the same few move
            row = order[draw(state) % count]
        at = 0
        while order[at] != row:
            at += 1
        to = draw(state) % (at + 1) if at else draw(state) % count
        trial[:] = order
        step = 1 if to > at else -1
        for index in range(at, to, step):
            trial[index] = trial[index + step]
        trial[to] = row
        reached = fit(trial, lives, best, ANY, tried)
        _, cost = _excess(lives.size, tried, target, above)
        kept = turn % len(history)
        if cost <= current or cost <= history[kept]:
            order[:] = trial
            places[:] = tried
            current = cost
            if reached < height:
                height = reached
                offsets[:] = tried
        history[kept] = min(history[kept], current)
        many, _ = _excess(lives.size, places, target, above)
    return height
