"""``dtr``: where there is no room, what is stale, large and cheap to make again goes.

Kirisame, Lyubomirsky, Haan, Brennan, He, Roesch, Chen and Tatlock, "Dynamic tensor rematerialization", ICLR 2021,
section 4.1. Where an allocation finds no room, tensors are evicted by the least ``h(t) = (c(t) + sum of c over its
evicted neighbourhood) / (m(t) s(t))``: the seconds to make it and all that is evicted around it again, over its bytes
and the seconds since it was used last. Whoever reads what was evicted has it made again, with what that needs.
O(tensors) for each eviction.

Ours departs in four things. The step is played to it before the run, and what it evicts is the plan (``playing``); its
runtime decides anew in every step, also where one step takes another way than the next. What is evicted is made again
once, for its block's backward, with the whole block; there it is evicted again by nobody. Inputs of blocks stay,
because a block runs again from them. And the neighbourhood is the exact one, within a block; the paper's runtime takes
classes of tensors that have been evicted beside each other for it.
"""

from __future__ import annotations

from typing import final

from forebay.planners.activations.literature.playing import Evicting, played
from forebay.planners.bench import Bench
from forebay.planners.problem import Problem
from forebay.plans import Plan

__all__ = ["Dtr", "dtr"]


def dtr(problem: Problem, bench: Bench | None = None) -> Plan:
    """Raises ``DoesNotFit``, and ``ConfigError`` without a batch."""
    return played(problem, bench, "dtr", Dtr)


@final
class Dtr(Evicting):
    """Evicts by the least ``h``."""

    def make_room(self, number: int) -> None:
        while self.held + self.nbytes[number] > self.allowed:
            victim = self.cheapest(self.costs(self.nbytes))
            if victim is None:
                return
            self.evict(victim)
