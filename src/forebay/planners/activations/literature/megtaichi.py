"""``megtaichi``: what has free neighbours in memory goes first, and what is left is moved together.

Hu, Xiao, Deng, Li, Zhang, Zhang, Meng, Sun and Tan, "MegTaichi: dynamic tensor-based memory management optimization for
DNN training", ICS 2022. Tensors are evicted by the least ``(c(t) + sum of c over its evicted neighbourhood) b^n /
((m(t) + f(t)) s(t))``: as in ``dtr``, with the free bytes ``f`` on either side of it, with which it would be one piece,
and a factor for each of the ``n`` times that it was made again (as MegEngine's interpreter has it). Where there are
bytes enough and no piece of memory that is large enough, what is there is moved together. O(tensors) for each eviction.

Ours departs in two things beside those of ``dtr``. Nothing is made again twice, so that ``n`` is 0. And memory here
decides what is evicted, and no more: a run has addresses of its own (``docs/fragmentation.md``), and nothing is moved
in it. The paper's partition of the model over devices is not here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from forebay.planners.activations.literature.moments import Idle
from forebay.planners.activations.literature.playing import Evicting, Neighbourhoods, played
from forebay.planners.activations.literature.pool import Pool
from forebay.planners.bench import Bench
from forebay.planners.problem import Problem
from forebay.plans import Plan

__all__ = ["MegTaichi", "megtaichi"]


def megtaichi(problem: Problem, bench: Bench | None = None) -> Plan:
    """Raises ``DoesNotFit``, and ``ConfigError`` without a batch."""
    return played(problem, bench, "megtaichi", MegTaichi)


@final
class MegTaichi(Evicting):
    """Evicts what makes the most of free neighbours. What finds no addresses whatever goes is there without any."""

    def __init__(self, idle: Sequence[Idle], allowed: int, around: Neighbourhoods) -> None:
        super().__init__(idle, allowed, around)
        self.pool = Pool(allowed)

    def make_room(self, number: int) -> None:
        nbytes = self.idle[number].nbytes
        while nbytes and not self.pool.place(number, nbytes):
            if self.pool.free >= nbytes:
                self.pool.compact()
                continue
            victim = self.cheapest(self.costs(self.nbytes + self.pool.beside(len(self.idle))))
            if victim is None:
                return
            self.pool.release(victim)
            self.evict(victim)
