"""Plays a program against a clock. No torch.

A discrete-event simulation in which things flow: every lane runs one action at a time, in the order of the program,
as soon as what the action waits for is done; while several lanes run, each moves on at the share of its rate that
``sharing`` gives it. The shares change only when something starts or ends, so that the clock jumps from one such
instant to the next. With six lanes at most, looking at all of them is faster than keeping a heap whose entries go
stale whenever the shares change.
"""

from __future__ import annotations

from math import inf
from operator import attrgetter
from typing import final

from forebay.errors import PlanInvalid
from forebay.machine import Machine
from forebay.memory import Tier
from forebay.program import Action, Program, Verb
from forebay.simulation.account import DeviceAccount, standing_usages, with_compute
from forebay.simulation.costs import Costs
from forebay.simulation.sharing import LANES, Sharing
from forebay.timeline import Event, Lane, Timeline
from forebay.trace import Trace

__all__ = ["play"]

COMPUTE, UPDATE = LANES.index(Lane.COMPUTE), LANES.index(Lane.UPDATE)


def play(
    program: Program, trace: Trace, machine: Machine, *, costs: Costs | None = None, settled: bool = False
) -> Timeline:
    """What happens when ``machine`` runs ``program``, which was lowered from ``trace``.

    The timeline has one event for each action, and a ``STALL`` wherever compute waits. ``step_seconds`` are those
    that the runtime measures: a step lasts from the end of the step before it (the first: from the start) to the
    end of the optimizer's step call, which waits for compute, and with ``settled`` (updates that do not overlap) for
    every update and every write to disk too. ``costs`` are those of the trace on the machine, if the caller has
    them. The accounts of the tiers have no limit.

    Raises ``PlanInvalid`` for an action that waits for one after it or runs on no lane, ``ConfigError`` for a disk
    that is not there.
    """
    costs = costs or Costs(trace, machine)
    _refuse_unplayable(program)
    clock = _Clock(program, costs, Sharing(machine))
    clock.run()
    return Timeline(
        events=clock.events(),
        tiers=(clock.account.usage(), *standing_usages(program)),
        step_seconds=_step_seconds(program, clock.end, settled),
        counters={"fetches": sum(a.verb is Verb.FETCH for a in program.actions), "stalls": len(clock.stalls)},
    )


@final
class _Clock:
    """The state of a run. ``start`` and ``end`` are the seconds of each action, ``stalls`` intervals of compute."""

    def __init__(self, program: Program, costs: Costs, sharing: Sharing) -> None:
        actions = program.actions
        self.account = DeviceAccount(program.standing.get(Tier.DEVICE, {}))
        self.start = [inf] * len(actions)
        self.end = [inf] * len(actions)
        self.stalls: list[tuple[float, float]] = []
        self._actions = actions
        self._with = with_compute(actions)
        treated = (Verb.OFFLOAD, Verb.ENCODE)
        moving = bool(program.slots) or any(a.recomputed or a.verb in treated for a in actions)
        watched = costs.machine.device_kind == "cpu" and moving
        self._seconds = [costs.action(a, watched=watched) for a in actions]
        # Bytes/s of each action alone; the last is that of a lane that runs none.
        self._rates = [a.nbytes / s if s else 0.0 for a, s in zip(actions, self._seconds, strict=True)] + [0.0]
        self._sharing = sharing
        # Reversed, so that the next action of a lane is popped off its end.
        self._queues: list[list[int]] = [[] for _ in LANES]
        place = {lane: i for i, lane in enumerate(LANES)}
        for index in range(len(actions) - 1, -1, -1):
            self._queues[place[actions[index].lane]].append(index)
        fastest = [0.0] * len(LANES)
        for action, rate in zip(actions, self._rates, strict=False):
            lane = place[action.lane]
            fastest[lane] = max(fastest[lane], rate)
        self._crowds = sharing.may_crowd(fastest)
        # Of each lane: the action that it runs (-1: none), when that will end if nothing changes, its share.
        self._running = [-1] * len(LANES)
        self._finish = [inf] * len(LANES)
        self._share = [1.0] * len(LANES)
        self._busy = 0
        self._compute_free = 0.0

    def run(self) -> None:
        """Plays all actions."""
        now = 0.0
        while True:
            self._start_ready(now)
            if not self._busy:
                return  # every action waits for earlier ones only: what starts nothing has nothing left
            self._reshare(now)
            now = min(self._finish)
            # All that ends now, before anything starts: bytes freed at an instant are free for what begins then.
            self._end_due(now)

    def _start_ready(self, now: float) -> None:
        """Starts what the idle lanes can start at ``now``."""
        end, actions = self.end, self._actions
        for lane, queue in enumerate(self._queues):
            if not queue or self._busy >> lane & 1:
                continue
            index = queue[-1]
            action = actions[index]
            for earlier in action.after:
                if end[earlier] > now:
                    break
            else:
                queue.pop()
                self._begin(lane, index, action, now)

    def _begin(self, lane: int, index: int, action: Action, now: float) -> None:
        self.start[index] = now
        self._running[lane] = index
        self._finish[lane] = now + self._seconds[index]
        self._share[lane] = 1.0
        self._busy |= 1 << lane
        if lane == COMPUTE:
            self.account.begin(action)
            if now > self._compute_free:
                self.stalls.append((self._compute_free, now))

    def _end_due(self, now: float) -> None:
        """Ends what is done at ``now``."""
        account, finish = self.account, self._finish
        for lane, index in enumerate(self._running):
            if finish[lane] > now:
                continue
            self.end[index] = now
            self._running[lane] = -1
            finish[lane] = inf
            self._busy &= ~(1 << lane)
            if lane == COMPUTE:
                self._compute_free = now
            self._apply(index)
        computing = self._running[COMPUTE]
        account.mark(self._actions[computing] if computing >= 0 else None)

    def _apply(self, index: int) -> None:
        """Action ``index`` has ended: its bytes are booked, and those of transfers that only waited for it."""
        apply, actions, bound = self.account.apply, self._actions, self._with
        if not bound.behind.get(index) and self.end[bound.holder.get(index, index)] < inf:
            apply(actions[index].changes)
        for offload in bound.holds.get(index, ()):
            if self.end[offload] < inf:
                apply(actions[offload].changes)
        for reload in bound.takes.get(index, ()):
            if max(self.end[earlier] for earlier in bound.behind[reload]) < inf:
                apply(actions[reload].changes)
                self.account.mark(None)  # with the next one, something may go

    def _reshare(self, now: float) -> None:
        """Gives every running lane the share that it has from ``now`` on, and so another end."""
        if self._crowds and self._running[UPDATE] >= 0:
            rates = self._rates
            shares = self._sharing.crowded(self._busy, [rates[index] for index in self._running])
        else:
            shares = self._sharing.shares(self._busy)
        old, finish = self._share, self._finish
        for lane, index in enumerate(self._running):
            share = shares[lane]
            if index >= 0 and share != old[lane]:
                finish[lane] = now + (finish[lane] - now) * old[lane] / share
                old[lane] = share

    def events(self) -> tuple[Event, ...]:
        """The actions and the stalls, in order of their start."""
        played = [
            Event(a.lane, start, end, a.nbytes, a.what)
            for a, start, end in zip(self._actions, self.start, self.end, strict=True)
        ]
        played.extend(Event(Lane.STALL, start, end) for start, end in self.stalls)
        # Stable: what starts together stays in the order of the program, in a lane above all.
        played.sort(key=attrgetter("start"))
        return tuple(played)


def _refuse_unplayable(program: Program) -> None:
    """Raises ``PlanInvalid`` for what could never run: it would be left out without a word."""
    for index, action in enumerate(program.actions):
        if action.lane is Lane.STALL:
            raise PlanInvalid(f"action {index} ({action.what}) is on the stall lane", action=index, subject=action.what)
        for earlier in action.after:
            if not 0 <= earlier < index:
                raise PlanInvalid(
                    f"action {index} ({action.what}) waits for action {earlier}, which is not before it",
                    action=index,
                    subject=action.what,
                )


def _step_seconds(program: Program, end: list[float], settled: bool) -> tuple[float, ...]:
    """Seconds from the end of each step call to the end of the next."""
    waited = {Lane.COMPUTE} | ({Lane.UPDATE, Lane.DISK_WRITE} if settled else set())
    calls = [0.0] * program.steps
    for action, done in zip(program.actions, end, strict=True):
        if action.lane in waited:
            calls[action.step] = max(calls[action.step], done)
    seconds, before = [], 0.0
    for call in calls:
        call = max(call, before)
        seconds.append(call - before)
        before = call
    return tuple(seconds)
