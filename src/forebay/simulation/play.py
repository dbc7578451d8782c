"""Plays a program against a clock: what happens when, and how many bytes are where. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from operator import attrgetter
from typing import final

from forebay.errors import PlanInvalid
from forebay.memory import Tier
from forebay.program import Program, Sketch, Verb
from forebay.simulation.account import DeviceAccount, standing_usages, with_compute
from forebay.simulation.clock import COMPUTE, Clock, Witness
from forebay.simulation.costs import Costs
from forebay.simulation.score import Score
from forebay.timeline import Event, Lane, Level, Timeline, typical_seconds

__all__ = ["pace", "play", "settled_seconds", "step_seconds_of"]


def play(program: Program, costs: Costs, *, settled: bool = False, levels: bool = False) -> Timeline:
    """What happens when the machine of ``costs`` runs ``program``, which was lowered from their trace.

    The timeline has one event for each action, and a ``STALL`` wherever compute waits. ``step_seconds`` are those
    that the runtime measures: a step lasts from the end of the step before it (the first: from the start) to the
    end of the optimizer's step call, which waits for compute, and with ``settled`` (updates that do not overlap) for
    every update and every write to disk too. The accounts of the tiers have no limit. ``levels``: what the device
    holds over time is noted too.

    Raises ``PlanInvalid`` for an action that waits for one after it or runs on no lane, ``ConfigError`` for a disk
    that is not there.
    """
    _refuse_unplayable(program)
    score = Score.of(program, costs, settled=settled)
    account = DeviceAccount(program.standing.get(Tier.DEVICE, {}))
    books = _Books(program, account, levels=levels)
    clock = Clock(score, books)
    clock.run()
    stalls = _stalls(score.queues[COMPUTE], clock)
    return Timeline(
        events=_events(program, clock, stalls),
        tiers=(account.usage(), *standing_usages(program)),
        step_seconds=step_seconds_of(score, clock.end),
        counters={"fetches": sum(a.verb is Verb.FETCH for a in program.actions), "stalls": len(stalls)},
        levels=tuple(books.levels),
    )


def pace(score: Score) -> tuple[float, ...]:
    """The ``step_seconds`` of ``play`` alone, for who compares many programs: no event is made and no byte counted."""
    clock = Clock(score)
    clock.run()
    return step_seconds_of(score, clock.end)


def settled_seconds(step_seconds: Sequence[float], program: Program | Sketch) -> float:
    """Seconds of a step that is like all that would follow: the mean of the last round of ``program``."""
    return typical_seconds(step_seconds[-program.round :], program.round)


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


@final
class _Books(Witness):
    """The account of the device while a program is played."""

    def __init__(self, program: Program, account: DeviceAccount, *, levels: bool) -> None:
        self.account = account
        self.levels: list[Level] = []
        """What the device holds whenever it has changed, if that is to be noted."""
        self._notes = levels
        self._now = 0.0
        self._actions = program.actions
        self._with = with_compute(program.actions)
        bound = self._with
        self._bound = bound.behind.keys() | bound.holder.keys() | bound.holds.keys() | bound.takes.keys()
        self._booked = False  # whether anything was at this instant

    def begin(self, index: int) -> None:
        self.account.begin(self._actions[index])

    def ended(self, index: int, end: list[float]) -> None:
        """Books the bytes of action ``index``, and those of transfers that only waited for it."""
        self._now = end[index]
        if index not in self._bound:
            changes = self._actions[index].changes
            if changes:
                self.account.apply(changes)
                self._booked = True
            return
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
        self._booked = True

    def mark(self, computing: int) -> None:
        if self._booked:
            self.account.mark(self._actions[computing] if computing >= 0 else None)
            self._booked = False
            if self._notes:
                self.levels.append(Level(self._now, Tier.DEVICE, *self.account.level()))


def _stalls(computed: Sequence[int], clock: Clock) -> list[tuple[float, float]]:
    """Where compute, which are the actions ``computed`` in order, waits: from when until when."""
    stalls, free = [], 0.0
    for index in computed:
        if free < clock.start[index] < inf:
            stalls.append((free, clock.start[index]))
        free = clock.end[index]
    return stalls


def _events(program: Program, clock: Clock, stalls: Sequence[tuple[float, float]]) -> tuple[Event, ...]:
    """The actions and the stalls, in order of their start."""
    played = [
        Event(a.lane, start, end, a.nbytes, a.what)
        for a, start, end in zip(program.actions, clock.start, clock.end, strict=True)
    ]
    played.extend(Event(Lane.STALL, start, end) for start, end in stalls)
    # Stable: what starts together stays in the order of the program, in a lane above all.
    played.sort(key=attrgetter("start"))
    return tuple(played)


def step_seconds_of(score: Score, end: Sequence[float]) -> tuple[float, ...]:
    """Seconds from the end of each step call to the end of the next, where actions have ended at ``end``."""
    seconds, before = [], 0.0
    for waited in score.calls:
        call = max((end[index] for index in waited), default=before)
        call = max(call, before)
        seconds.append(call - before)
        before = call
    return tuple(seconds)
