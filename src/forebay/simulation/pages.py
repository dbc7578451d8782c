"""What expandable segments of PyTorch's allocator take of a card beyond what a step has live on it. No torch.

Their pages are mapped and given back whole: between what stays there are bytes that are nobody's. How many follows from
the order of requests and their sizes, so that a plan's step says it, played to the model of that allocator
(``allocators.expandable``, which is exact for what was recorded on a card). What is under way to the host or back comes
and goes as transfers do, and is none of what is played.
"""

from __future__ import annotations

from itertools import accumulate
from typing import final

from forebay.lowering import Liveness, step_lives
from forebay.memory import PAGES
from forebay.plans import Plan
from forebay.recording import events_of
from forebay.simulation.allocators import ExpandableAllocator, least
from forebay.slabs import device_slabs
from forebay.trace import Trace

__all__ = ["Played"]

STEPS = 2
"""Steps that are played: from the second on, a step finds what the one before has left."""


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
        self._events, self._nbytes = events_of(lives.starts, lives.ends + 1), lives.nbytes.tolist()
        changes = (self._nbytes[event] if event >= 0 else -self._nbytes[-1 - event] for event in self._events)
        self.live = sum(self._standing) + max(accumulate(changes), default=0)

    def needed(self, room: int) -> int:
        """Bytes beyond what is live, ``room`` at least, with which no request finds the card full."""
        return least(self._fits, room)

    def _fits(self, beyond: int) -> bool:
        allocator = ExpandableAllocator(self.live + beyond)
        for number, nbytes in enumerate(self._standing, len(self._nbytes)):
            allocator.allocate(number, nbytes, 0)
        for _ in range(STEPS):
            for event in self._events:
                if event < 0:
                    allocator.free(-1 - event)
                else:
                    allocator.allocate(event, self._nbytes[event], 0)
                    if allocator.out_of_memory:
                        return False
        return not allocator.out_of_memory
