"""A discrete-event clock in which things flow. No torch.

Every lane runs one action at a time, in the order of the program, as soon as what the action waits for is done; while
several lanes run, each moves on at the share of its rate that ``sharing`` gives it. The shares change only when
something starts or ends, so that the clock jumps from one such instant to the next. With so few lanes, looking
at all of them is faster than keeping a heap whose entries go stale whenever the shares change.

Lanes that share nothing (``Sharing.alone``; compute on a device with cores of its own, above all) need no clock: an
action of theirs ends so many seconds after the last of what it waits for has. They run ahead of the clock as far as
that is known.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import inf
from typing import final

from forebay.simulation.score import Score
from forebay.simulation.sharing import COPYING, LANES
from forebay.timeline import Lane

__all__ = ["Clock", "Witness"]

COMPUTE, H2D, D2H, UPDATE = map(LANES.index, (Lane.COMPUTE, Lane.H2D, Lane.D2H, Lane.UPDATE))


class Witness(ABC):
    """Is told of everything in the order of time."""

    @abstractmethod
    def begin(self, index: int) -> None:
        """Compute ``index`` starts."""

    @abstractmethod
    def ended(self, index: int, end: list[float]) -> None:
        """Action ``index`` has ended. ``end`` are the instants at which actions have ended (infinite: not yet)."""

    @abstractmethod
    def mark(self, computing: int) -> None:
        """All that ends at this instant has ended; compute ``computing`` goes on (below 0: nothing computes)."""


@final
class Clock:
    """One run of ``score``. ``start`` and ``end`` are the seconds of each action, infinite for what has not been."""

    def __init__(self, score: Score, witness: Witness | None = None) -> None:
        self.start = [inf] * len(score.seconds)
        self.end = [inf] * len(score.seconds)
        self._score = score
        self._witness = witness
        rates = score.rates
        fastest = [max(map(rates.__getitem__, queue), default=0.0) for queue in score.queues]
        self._crowds = score.sharing.may_crowd(fastest)
        # Who watches sees one thing after the other: then nothing runs ahead.
        self._alone = 0 if witness is not None else score.sharing.alone(crowds=self._crowds)
        self._queues = [list(reversed(queue)) for queue in score.queues]  # the next action of a lane is popped off
        # The lanes that have anything to do. Of each lane: the action that it runs (-1: none), when that will end if
        # nothing changes, or when the next one can start (infinite: nobody knows yet), its share. Of lanes that run
        # ahead: until when they have.
        self._lanes = [lane for lane, queue in enumerate(self._queues) if queue]
        self._running = [-1] * len(LANES)
        self._due = [inf] * len(LANES)
        self._share = [1.0] * len(LANES)
        self._busy = 0  # bits of lanes, without those that run ahead
        self._reached = [0.0] * len(LANES)
        # By action: the idle lanes whose next one was seen to wait for it. And the idle lanes that wait for none.
        self._waiting: dict[int, list[int]] = {}
        self._ready = list(self._lanes)
        # Lanes that have started something since shares were given last, which were these.
        self._begun: list[int] = []
        self._shares: list[float] = []

    def run(self) -> None:
        """Plays all actions. What waits for an action that never ends is never played."""
        due, now = self._due, 0.0
        while True:
            self._start_ready(now)
            self._reshare(now)
            now = min(due)
            if now == inf:
                return  # every action waits for earlier ones only: what starts nothing has nothing left
            self._end_due(now)

    def _start_ready(self, now: float) -> None:
        """Starts what the idle lanes can start at ``now``."""
        end, after, queues, alone = self.end, self._score.after, self._queues, self._alone
        copies = self._score.copies
        ready, self._ready = self._ready, []
        for lane in ready:  # grows on the way: lanes that run ahead say when more can start
            if alone >> lane & 1:
                self._run_ahead(lane, ready)
            elif queues[lane]:
                index, at = queues[lane][-1], now
                for earlier in after[index]:
                    if end[earlier] > at:
                        at = end[earlier]
                        if at == inf:
                            self._waiting.setdefault(earlier, []).append(lane)
                            break
                else:
                    self._due[lane] = at
                    if at == now:
                        queues[lane].pop()
                        self._running[lane], self.start[index] = index, now
                        self._due[lane], self._share[lane] = now + self._score.seconds[index], 1.0
                        self._busy |= 1 << (lane + COPYING if index in copies else lane)
                        self._begun.append(lane)
                        if self._witness is not None and lane == COMPUTE:
                            self._witness.begin(index)

    def _end_due(self, now: float) -> None:
        """Ends what is done at ``now``, all of it before anything starts: bytes freed at an instant are free for what
        begins then."""
        due, running, ready, witness = self._due, self._running, self._ready, self._witness
        while now in due:  # mostly one lane's
            lane = due.index(now)
            index, due[lane] = running[lane], inf
            ready.append(lane)
            if index >= 0:
                self.end[index], running[lane] = now, -1
                self._busy &= ~(1 << lane | 1 << lane + COPYING)
                if index in self._waiting:
                    ready += self._waiting.pop(index)
                if witness is not None:
                    witness.ended(index, self.end)
        if witness is not None:
            witness.mark(running[COMPUTE])

    def _run_ahead(self, lane: int, ready: list[int]) -> None:
        """Plays what a lane that shares nothing has, as far as it is known when that can start. ``ready`` gets the
        lanes that have waited for it."""
        end, after, seconds, waiting = self.end, self._score.after, self._score.seconds, self._waiting
        queue, now = self._queues[lane], self._reached[lane]
        while queue:
            index, at = queue[-1], now
            for earlier in after[index]:
                if end[earlier] > at:
                    at = end[earlier]
                    if at == inf:
                        waiting.setdefault(earlier, []).append(lane)
                        self._reached[lane] = now
                        return
            queue.pop()
            self.start[index] = at
            end[index] = now = at + seconds[index]
            if index in waiting:
                ready += waiting.pop(index)

    def _reshare(self, now: float) -> None:
        """Gives every running lane the share that it has from ``now`` on, and so another end."""
        running, sharing = self._running, self._score.sharing
        if self._crowds and running[UPDATE] >= 0:
            rates = self._score.rates
            shares = sharing.crowded(self._busy, rates[running[H2D]], rates[running[D2H]], rates[running[UPDATE]])
        else:
            shares = sharing.shares(self._busy)
        # Where shares are as they were, those that go on have theirs.
        for lane in self._begun if shares is self._shares else self._lanes:
            share, old = shares[lane], self._share[lane]
            if share != old and running[lane] >= 0:
                self._due[lane] = now + (self._due[lane] - now) * old / share
                self._share[lane] = share
        self._shares = shares
        self._begun.clear()
