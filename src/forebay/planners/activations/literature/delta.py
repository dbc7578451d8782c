"""``delta``: where there is no room, what is large and stale goes, and is swapped or made again, whichever is cheaper.

Tang, Wang, Zhang, Liu, Zhang, Qiao, Lai and Li, "DELTA: dynamically optimizing GPU memory beyond tensor recomputation",
2022 (arXiv 2203.15980). Three parts: a filter that picks what is to go by the least ``1 / (m(t) s(t))``, bytes and the
seconds since it was used last; a director that has it made again where that takes fewer seconds than the part of its
swap that nothing hides, and swaps it else; and a prefetcher that brings back what was swapped ahead of its use. The
filter is O(tensors) for each eviction.

Ours departs in four things, the first three as ``dtr`` does: the step is played to it before the run (``playing``);
what is made again is made once, with its whole block; inputs of blocks stay where they run again. And the part of a
swap that nothing hides is its copy out, behind those under way, for its room is wanted at once, and what that makes the
copy back late; where the copy back begins is the runtime's to find, as far ahead as there is room.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from forebay.planners.activations.literature.capuchin import leanest
from forebay.planners.activations.literature.moments import Idle
from forebay.planners.activations.literature.playing import Evicting, Neighbourhoods, played
from forebay.planners.bench import Bench
from forebay.planners.problem import Problem
from forebay.plans import Plan

__all__ = ["Delta", "delta"]


def delta(problem: Problem, bench: Bench | None = None) -> Plan:
    """Raises ``DoesNotFit``, and ``ConfigError`` without a batch."""
    return played(problem, bench, "delta", Delta, leanest)


@final
class Delta(Evicting):
    """Evicts what is large and stale; the link is busy with what was swapped until ``_busy`` (seconds)."""

    def __init__(self, idle: Sequence[Idle], allowed: int, around: Neighbourhoods) -> None:
        super().__init__(idle, allowed, around)
        self._busy = 0.0

    def may_evict(self, one: Idle) -> bool:
        return one.movable or super().may_evict(one)

    def make_room(self, number: int) -> None:
        while self.held + self.nbytes[number] > self.allowed:
            victim = self.cheapest(1 / (self.nbytes * self.stale))
            if victim is None:
                return
            again = self._is_made_again(victim)
            if not again:
                self._busy = self._out_at(victim)
            self.evict(victim, again=again)

    def _is_made_again(self, number: int) -> bool:
        one = self.idle[number]
        if not one.movable or one.rerun_seconds is None:
            return not one.movable
        # The room is wanted now, so that nothing hides the copy out; the copy back may have to wait for it, too.
        out = self._out_at(number)
        exposed = out - self.now + max(0.0, out + one.kept.back_seconds - one.asked)
        return bool(self.again_seconds[number] < exposed)

    def _out_at(self, number: int) -> float:
        """When its copy would be out, behind those that are under way."""
        return max(self.now, self._busy) + self.idle[number].kept.out_seconds
