"""``coop``: where there is no room, the cheapest tensors go that are neighbours in memory.

Zhang, Ma, Liu and Yuan, "Coop: memory is not a commodity", NeurIPS 2023. What ``dtr`` evicts lies anywhere, and what is
asked for wants neighbouring addresses: so more has to go than its bytes. Here a window slides over the addresses, and
of all windows that are large enough the one goes whose tensors cost the least together by the heuristic of ``dtr``.
What is cheap to make again a byte is placed from one end of memory and what is dear from the other, so that cheap
windows are long. O(tensors) for each window.

Ours departs in three things beside those of ``dtr``. Cheap is what takes fewer seconds a byte than the median of what
the step saves. Parameters, updated in place in the paper so that they stay where they are, are not in the memory that
is played. And where things are in it decides what is evicted, and no more: a run has addresses of its own
(``docs/fragmentation.md``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np

from forebay.planners.activations.literature.moments import Idle
from forebay.planners.activations.literature.playing import Evicting, Neighbourhoods, played
from forebay.planners.activations.literature.pool import Pool
from forebay.planners.bench import Bench
from forebay.planners.problem import Problem
from forebay.plans import Plan

__all__ = ["Coop", "coop"]


def coop(problem: Problem, bench: Bench | None = None) -> Plan:
    """Raises ``DoesNotFit``, and ``ConfigError`` without a batch."""
    return played(problem, bench, "coop", Coop)


@final
class Coop(Evicting):
    """Evicts the window that costs the least, and where none is large enough all that may go. What finds no addresses
    then is there without any."""

    def __init__(self, idle: Sequence[Idle], allowed: int, around: Neighbourhoods) -> None:
        super().__init__(idle, allowed, around)
        self.pool = Pool(allowed)
        density = self.again_seconds / np.maximum(self.nbytes, 1)
        self._dear = density > np.median(density) if len(idle) else density

    def make_room(self, number: int) -> None:
        nbytes, high = self.idle[number].nbytes, bool(self._dear[number])
        if not nbytes or self.pool.place(number, nbytes, high=high):
            return
        able = self.evictable
        costs = np.where(able, self.costs(self.nbytes), np.inf)
        window = self.pool.window(nbytes, costs.tolist())
        for victim in np.flatnonzero(able).tolist() if window is None else window:
            self.pool.release(victim)
            self.evict(victim)
        self.pool.place(number, nbytes, high=high)
