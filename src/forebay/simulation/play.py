"""Plays a program against a clock. No torch.

A discrete-event simulation in which things flow: every lane runs one action at a time, in the order of the program,
as soon as what the action waits for is done; while several lanes run, each moves on at the share of its rate that
``sharing`` gives it. The shares change only when something starts or ends, so that the clock jumps from one such
instant to the next. With six lanes at most, looking at all of them is faster than keeping a heap whose entries go
stale whenever the shares change.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from operator import attrgetter
from typing import final

from forebay.errors import PlanInvalid
from forebay.machine import Machine
from forebay.memory import Tier
from forebay.program import Action, Outline, Program, Sketch, Verb
from forebay.simulation.account import DeviceAccount, standing_usages, with_compute
from forebay.simulation.costs import Costs
from forebay.simulation.sharing import LANES, Sharing
from forebay.timeline import Event, Lane, Timeline
from forebay.trace import Trace

__all__ = ["pace", "play"]

COMPUTE, H2D, D2H, UPDATE = map(LANES.index, (Lane.COMPUTE, Lane.H2D, Lane.D2H, Lane.UPDATE))


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
    account = DeviceAccount(program.standing.get(Tier.DEVICE, {}))
    clock = _played(program, costs, _Books(program, account))
    return Timeline(
        events=clock.events(),
        tiers=(account.usage(), *standing_usages(program)),
        step_seconds=_step_seconds(program, clock.end, settled),
        counters={"fetches": sum(a.verb is Verb.FETCH for a in program.actions), "stalls": len(clock.stalls)},
    )


def pace(
    program: Program | Sketch, costs: Costs, *, settled: bool = False, times: Sequence[float] = ()
) -> tuple[float, ...]:
    """The ``step_seconds`` of ``play`` alone, for who compares many programs: no event is made and no byte counted.
    ``costs`` are those of the trace that ``program`` was lowered from. ``times`` says how often in a row each action
    is done (empty: each once), or which part of it."""
    return _step_seconds(program, _played(program, costs, None, times).end, settled)


def _played(program: Program | Sketch, costs: Costs, books: _Books | None, times: Sequence[float] = ()) -> _Clock:
    if isinstance(program, Program):  # a sketch comes from the lowering
        _refuse_unplayable(program)
    clock = _Clock(program, costs, Sharing(costs.machine), books, times)
    clock.run()
    return clock


@final
class _Books:
    """The account of the device while a program is played."""

    def __init__(self, program: Program, account: DeviceAccount) -> None:
        self.account = account
        self._actions = program.actions
        self._with = with_compute(program.actions)
        bound = self._with
        self._bound = bound.behind.keys() | bound.holder.keys() | bound.holds.keys() | bound.takes.keys()

    def ended(self, index: int, end: list[float]) -> bool:
        """Action ``index`` has ended: its bytes are booked, and those of transfers that only waited for it. ``end`` are
        the instants at which actions have ended (infinite: not yet). Returns whether any were."""
        if index not in self._bound:
            changes = self._actions[index].changes
            if changes:
                self.account.apply(changes)
            return bool(changes)
        apply, actions, bound = self.account.apply, self._actions, self._with
        if not bound.behind.get(index) and end[bound.holder.get(index, index)] < inf:
            apply(actions[index].changes)
        for offload in bound.holds.get(index, ()):
            if end[offload] < inf:
                apply(actions[offload].changes)
        for reload in bound.takes.get(index, ()):
            if max(end[earlier] for earlier in bound.behind[reload]) < inf:
                apply(actions[reload].changes)
                self.account.mark(None)  # with the next one, something may go
        return True

    def begin(self, index: int) -> None:
        """Compute ``index`` starts."""
        self.account.begin(self._actions[index])

    def mark(self, computing: int) -> None:
        """All that ends at this instant has been booked; action ``computing`` goes on (below 0: nothing computes)."""
        self.account.mark(self._actions[computing] if computing >= 0 else None)


@final
class _Clock:
    """The state of a run. ``start`` and ``end`` are the seconds of each action, ``stalls`` intervals of compute."""

    def __init__(
        self, program: Program | Sketch, costs: Costs, sharing: Sharing, books: _Books | None, times: Sequence[float]
    ) -> None:
        actions: Sequence[Action | Outline] = program.actions
        self.start = [inf] * len(actions)
        self.end = [inf] * len(actions)
        self.stalls: list[tuple[float, float]] = []
        self._actions = actions
        self._books = books
        # Hooks and lanes where parameters come and go. What only runs again, or whose activations move, pays for no
        # watch: the byte ledger rests, once the first steps of a shape are over, in all but one step in 16.
        watched = costs.machine.device_kind == "cpu" and bool(program.slots)
        self._seconds = [costs.action(a, watched=watched) for a in actions]
        # Bytes/s of each action alone; the last is that of a lane that runs none.
        self._rates = [a.nbytes / s if s else 0.0 for a, s in zip(actions, self._seconds, strict=True)] + [0.0]
        if times:  # more bytes at the same rate
            self._seconds = [s * count for s, count in zip(self._seconds, times, strict=True)]
        self._sharing = sharing
        self._queues: list[list[int]] = [[] for _ in LANES]
        fastest = [0.0] * len(LANES)
        place = {lane: i for i, lane in enumerate(LANES)}
        for index, action in enumerate(actions):
            lane = place[action.lane]
            self._queues[lane].append(index)
            if self._rates[index] > fastest[lane]:
                fastest[lane] = self._rates[index]
        for queue in self._queues:
            queue.reverse()  # so that the next action of a lane is popped off its end
        self._crowds = sharing.may_crowd(fastest)
        # The lanes that have anything to do. Of each lane: the action that it runs (-1: none), when that will end if
        # nothing changes, its share.
        self._lanes = [lane for lane, queue in enumerate(self._queues) if queue]
        self._running = [-1] * len(LANES)
        self._finish = [inf] * len(LANES)
        self._share = [1.0] * len(LANES)
        # By action: the idle lanes whose next one was seen to wait for it. And the idle lanes that wait for none.
        self._waiting: dict[int, list[int]] = {}
        self._ready = self._lanes
        self._busy = 0
        self._begun: list[int] = []  # lanes that have begun something since shares were given last, which were these
        self._shares: list[float] = []
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
        """Starts what the idle lanes can start at ``now``, in the order of the lanes."""
        end, running, actions = self.end, self._running, self._actions
        ready, self._ready = self._ready, []
        for lane in sorted(ready) if len(ready) > 1 else ready:
            queue = self._queues[lane]
            if not queue:
                continue
            index = queue[-1]
            for earlier in actions[index].after:
                if end[earlier] > now:
                    self._waiting.setdefault(earlier, []).append(lane)
                    break
            else:
                queue.pop()
                running[lane] = index
                self.start[index] = now
                self._finish[lane] = now + self._seconds[index]
                self._share[lane] = 1.0
                self._busy |= 1 << lane
                self._begun.append(lane)
                if lane == COMPUTE:
                    self._compute(index, now)

    def _compute(self, index: int, now: float) -> None:
        """Compute ``index`` begins."""
        if self._books is not None:
            self._books.begin(index)
        if now > self._compute_free:
            self.stalls.append((self._compute_free, now))

    def _end_due(self, now: float) -> None:
        """Ends what is done at ``now``."""
        end, finish, running, books = self.end, self._finish, self._running, self._books
        booked = False
        while now in finish:  # mostly one lane's
            lane = finish.index(now)
            index = running[lane]
            end[index] = now
            running[lane] = -1
            finish[lane] = inf
            self._busy &= ~(1 << lane)
            self._ready.append(lane)
            if index in self._waiting:
                self._ready += self._waiting.pop(index)
            if lane == COMPUTE:
                self._compute_free = now
            if books is not None and books.ended(index, end):
                booked = True
        if booked and books is not None:
            books.mark(running[COMPUTE])

    def _reshare(self, now: float) -> None:
        """Gives every running lane the share that it has from ``now`` on, and so another end."""
        running, old, finish = self._running, self._share, self._finish
        if self._crowds and running[UPDATE] >= 0:
            rates = self._rates
            shares = self._sharing.crowded(self._busy, rates[running[H2D]], rates[running[D2H]], rates[running[UPDATE]])
        else:
            shares = self._sharing.shares(self._busy)
        # Where shares are as they were, those that go on have theirs.
        for lane in self._begun if shares is self._shares else self._lanes:
            share = shares[lane]
            if share != old[lane] and running[lane] >= 0:
                finish[lane] = now + (finish[lane] - now) * old[lane] / share
                old[lane] = share
        self._shares = shares
        self._begun.clear()

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


def _step_seconds(program: Program | Sketch, end: list[float], settled: bool) -> tuple[float, ...]:
    """Seconds from the end of each step call to the end of the next."""
    waited = {Lane.COMPUTE} | ({Lane.UPDATE, Lane.DISK_WRITE} if settled else set())
    calls = [0.0] * program.steps
    actions: Sequence[Action | Outline] = program.actions
    for action, done in zip(actions, end, strict=True):
        if action.lane in waited or (settled and action.verb is Verb.STORE):
            calls[action.step] = max(calls[action.step], done)
    seconds, before = [], 0.0
    for call in calls:
        call = max(call, before)
        seconds.append(call - before)
        before = call
    return tuple(seconds)
