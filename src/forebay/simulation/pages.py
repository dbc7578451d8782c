"""What expandable segments of PyTorch's allocator take of a card beyond what a step has live on it. No torch.

Their pages are mapped and given back whole: between what stays there are bytes that are nobody's. How many follows from
the order of requests and their sizes, so that a plan's step says it, played to the model of that allocator
(``allocators.expandable``, which is exact for what was recorded on a card). What is under way to the host or back comes
and goes as transfers do, and is none of what is played.
"""

from __future__ import annotations

from typing import final

import numpy as np

from forebay.lowering import Liveness, StepLives, step_lives
from forebay.lowering.columns import Column
from forebay.memory import PAGES
from forebay.plans import Plan
from forebay.simulation.allocators import ExpandableAllocator
from forebay.slabs import device_slabs
from forebay.trace import Trace
from forebay.units import MiB

__all__ = ["Played"]

STEPS = 2
"""Steps that are played: from the second on, a step finds what the one before has left."""

EXACT = 2 * MiB
"""Bytes within which it is found how many are needed: a page of small requests."""


@final
class Played:
    """The step of ``plan`` for ``trace``, a card's, played to expandable segments with what stands there for good.
    ``liveness`` is that of the trace, if the caller has it."""

    def __init__(self, trace: Trace, plan: Plan, *, liveness: Liveness | None = None) -> None:
        self._standing = [trace.model.buffer_nbytes, trace.input_nbytes, *[(trace.workspace_nbytes - PAGES) // 2] * 2]
        self._standing += [slab.nbytes for slab in device_slabs(trace.model, plan, trace.state_names)]
        resident = {p.block for p in plan.placements if p.resident}
        if plan.accumulates:
            # There from the first pass on, and the next ones are added to them.
            staying = (p for b in trace.model.blocks if b.name in resident for p in b.parameters if p.trainable)
            self._standing += [p.nbytes for p in staying]
            resident = set()
        lives = step_lives(trace, plan.recompute, plan.activations, resident, liveness)
        self._events, self._nbytes = _events(lives), lives.nbytes.tolist()
        change = np.where(self._events < 0, -lives.nbytes[-1 - self._events], lives.nbytes[self._events])
        self.live = sum(self._standing) + int(np.cumsum(change).max(initial=0))

    def needed(self, most: int) -> int:
        """Bytes beyond what is live, ``most`` at least, with which no request finds the card full."""
        if self._fits(most):
            return most
        low, high = most, max(2 * most, EXACT)
        while not self._fits(high):
            low, high = high, 2 * high
        while high - low > EXACT:
            middle = (low + high) // 2
            low, high = (low, middle) if self._fits(middle) else (middle, high)
        return high

    def _fits(self, beyond: int) -> bool:
        allocator = ExpandableAllocator(self.live + beyond)
        for number, nbytes in enumerate(self._standing, len(self._nbytes)):
            allocator.allocate(number, nbytes, 0)
        for _ in range(STEPS):
            for event in self._events.tolist():
                if event < 0:
                    allocator.free(-1 - event)
                else:
                    allocator.allocate(event, self._nbytes[event], 0)
            if allocator.out_of_memory:
                return False
        return True


def _events(lives: StepLives) -> Column:
    """What is made and given back, in order, as in a ``Recording``: at one position what has ended goes before what
    begins comes."""
    numbers = np.arange(len(lives.nbytes))
    at = np.concatenate([lives.starts, lives.ends + 1])
    event = np.concatenate([numbers, -1 - numbers])
    return np.asarray(event[np.lexsort((event, event >= 0, at))])
