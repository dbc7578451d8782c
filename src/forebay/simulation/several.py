"""Several programs against one clock: on devices beside each other in one host, or in turns on one device. No torch.

A *place* does one thing at a time. A lane that the programs share is one place for all of them: of the actions that are
next in their programs and wait for nothing, it does the one that was ready first, and of those that were ready at the
same instant that of the program whose turn is the longest ago. A lane that they do not share is a place for each.

One device, several models (``alternating``)
    All lanes are shared: while one model waits for its next block, the device computes for another (Nagrecha and Kumar,
    "Hydra", VLDB 2022: shard alternator parallelism with double buffering).

Several devices, one model (``side_by_side``)
    The host is shared: its updates and its disk. So is the channel on which the links of all devices to the host end:
    copies of the same direction that run at the same time share it equally. ``in_turns`` they do not run at the
    same time, and each has the whole channel (Lin et al., "Tensor movement orchestration in multi-GPU
    training systems", HPCA 2023: swap commands are orchestrated to avoid contention). Gradients are exchanged before a
    step is updated: no update of a step begins before all devices have computed it. What the exchange itself takes is
    not priced: it has a link of its own, or none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import final

from forebay.errors import ConfigError
from forebay.lowering import lower
from forebay.plans import Plan, Update
from forebay.program import Action, Program, Verb
from forebay.simulation.costs import Costs
from forebay.simulation.play import step_seconds_of
from forebay.simulation.score import Score
from forebay.simulation.sharing import LANES
from forebay.timeline import Lane

__all__ = [
    "HOST_LANES",
    "PLACES",
    "Act",
    "Rules",
    "SeveralForecast",
    "alternating",
    "play_together",
    "run_together",
    "side_by_side",
]

HOST_LANES = frozenset({Lane.UPDATE, Lane.DISK_READ, Lane.DISK_WRITE, Lane.STORAGE_UPDATE})
LINKS = frozenset({Lane.H2D, Lane.D2H})
_H2D, _D2H, _UPDATE = map(LANES.index, (Lane.H2D, Lane.D2H, Lane.UPDATE))

PLACES = (*LANES, Lane.PEER_OUT, Lane.PEER_IN)
"""The lanes of one device among several: those of a device alone, and its links to the others, which share nothing."""

Act = tuple[int, int]
"""An action: its program, and its number there."""


@dataclass(frozen=True)
class SeveralForecast:
    """``seconds`` until the last of all programs is done; ``steps`` are those of every step, by program. ``busy`` are
    seconds in which anything ran on a lane, whosever, by lane, and ``moved`` the bytes of all that did."""

    seconds: float
    steps: tuple[tuple[float, ...], ...]
    busy: dict[Lane, float]
    moved: dict[Lane, int]

    @property
    def step_seconds(self) -> tuple[float, ...]:
        """Seconds of the last step of each. Others may be done by then: see ``steps``."""
        return tuple(own[-1] for own in self.steps)

    @property
    def moved_a_step(self) -> dict[Lane, int]:
        """Bytes of all programs in a step of each, by lane."""
        return {lane: nbytes // len(self.steps[0]) for lane, nbytes in self.moved.items()}


@dataclass(frozen=True)
class Rules:
    """Which lanes the programs ``share``; bytes/s of the ``channel`` that h2d lanes of several devices have together,
    and d2h lanes too (None: as many as they can take); whether a step is ``synchronised``: updated when all have
    computed it. ``roots``: by program, the root complex that its links end on, where there are several (none: one for
    all); each has a channel of its own. Raises ``ConfigError`` for a channel of nothing."""

    share: frozenset[Lane]
    channel: float | None = None
    synchronised: bool = False
    roots: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.channel is not None and self.channel <= 0:
            raise ConfigError(f"a channel moves more than 0 bytes/s, got {self.channel}")


def alternating(
    plans: Sequence[Plan], costs: Sequence[Costs], steps: int, *, micro_batches: int = 1
) -> SeveralForecast:
    """``steps`` steps of each of several models on one device, each by its plan and in a thread of its own; ``costs``
    are those of its trace. A step has ``micro_batches`` passes. What they take of each tier is the sum of what each
    takes alone. Raises ``ConfigError`` for models on several machines, and what ``lower`` raises."""
    programs = [
        lower(own.trace, plan, steps=steps, micro_batches=micro_batches) for plan, own in zip(plans, costs, strict=True)
    ]
    _expect_one_machine(programs, costs)
    scores = [
        Score.of(program, own, settled=not plan.streaming.overlap_update).in_threads(program.actions, own.machine)
        for program, plan, own in zip(programs, plans, costs, strict=True)
    ]
    return play_together(programs, scores, Rules(frozenset(LANES)), {})


def side_by_side(
    plans: Sequence[Plan],
    costs: Costs,
    steps: int,
    *,
    channel: float,
    in_turns: bool,
    roots: tuple[int, ...] = (),
    micro_batches: int = 1,
) -> SeveralForecast:
    """``steps`` steps of one model on as many devices as there are plans for it, each with ``micro_batches`` of its
    own. ``channel`` are the bytes/s of all their copies in one direction together, or of those of the devices that are
    on one of ``roots`` (by device; none: there is one). Raises what ``alternating`` raises, and ``ConfigError`` for
    turns on several root complexes."""
    if in_turns and len(set(roots)) > 1:
        raise ConfigError("devices take turns on one root complex, not on several")
    if any(plan.updated(Update.BACKWARD) for plan in plans):
        raise ConfigError("gradients that are used up in backward cannot be exchanged; plan with update='step'")
    programs = [lower(costs.trace, plan, steps=steps, micro_batches=micro_batches) for plan in plans]
    settled = [not plan.streaming.overlap_update for plan in plans]
    share = HOST_LANES | LINKS if in_turns else HOST_LANES
    return run_together(programs, [costs] * len(plans), settled, Rules(share, channel, synchronised=True, roots=roots))


def run_together(
    programs: Sequence[Program], costs: Sequence[Costs], settled: Sequence[bool], rules: Rules
) -> SeveralForecast:
    """Plays all programs at once. ``settled``: whether each waits for its updates at the end of a step. A program alone
    takes what ``play`` says. Raises ``ConfigError`` for programs on several machines."""
    _expect_one_machine(programs, costs)
    scores = [Score.of(program, own, settled=s) for program, own, s in zip(programs, costs, settled, strict=True)]
    return play_together(programs, scores, rules, {})


def _expect_one_machine(programs: Sequence[Program], costs: Sequence[Costs]) -> None:
    if len({c.machine.name for c in costs}) > 1 or not programs:
        raise ConfigError("programs that run together are one or more, on one machine")


def play_together(
    programs: Sequence[Program], scores: Sequence[Score], rules: Rules, across: Mapping[Act, Sequence[Act]]
) -> SeveralForecast:
    """The same of programs that have their scores. ``across``: what an action waits for in other programs."""
    clock = _Clock(programs, scores, rules, across)
    clock.run()
    steps = tuple(step_seconds_of(score, end) for score, end in zip(scores, clock.end, strict=True))
    return SeveralForecast(
        seconds=max(sum(own) for own in steps),
        steps=steps,
        busy={lane: clock.busy[place] for place, lane in enumerate(PLACES)},
        moved={lane: sum(a.nbytes for p in programs for a in p.actions if a.lane is lane) for lane in PLACES},
    )


@final
@dataclass(eq=False, slots=True)
class _Place:
    """One thing at a time on ``lane``: the queues of its programs, each with its next action last; the action that runs
    (a program and its index), when that will end if nothing changes, the share at which it runs; whose turn was
    when, and since when each next action has been the next."""

    lane: int
    queues: dict[int, list[int]]
    running: tuple[int, int] | None = None
    finish: float = inf
    share: float = 1.0
    served: dict[int, int] = field(default_factory=dict)
    next_since: dict[int, float] = field(default_factory=dict)

    @property
    def owner(self) -> int | None:
        """The program that it works for."""
        return None if self.running is None else self.running[0]


@final
class _Clock:
    """``end`` are the seconds at which each program's actions have ended, ``busy`` those of each lane."""

    def __init__(
        self,
        programs: Sequence[Program],
        scores: Sequence[Score],
        rules: Rules,
        across: Mapping[Act, Sequence[Act]],
    ) -> None:
        self._programs = programs
        self._rules = rules
        self._across = across
        self.end = [[inf] * len(program.actions) for program in programs]
        self.busy = [0.0] * len(PLACES)
        self._sharing = scores[0].sharing
        self._scores = scores
        self._places = self._made_places()
        self._turn = 0
        # Of each step: computations, of all programs, that have yet to end. Only where a step is synchronised.
        self._left: dict[int, int] = {}
        for program in programs if rules.synchronised else ():
            for action in program.actions:
                if action.verb is Verb.COMPUTE:
                    self._left[action.step] = self._left.get(action.step, 0) + 1
        self._freed: dict[int, float] = {}

    def _made_places(self) -> list[_Place]:
        places = []
        for number, lane in enumerate(PLACES):
            queues = {
                owner: [i for i, action in enumerate(program.actions) if action.lane is lane][::-1]
                for owner, program in enumerate(self._programs)
            }
            if lane in self._rules.share:
                places.append(_Place(number, queues))
            else:
                places += [_Place(number, {owner: queue}) for owner, queue in queues.items()]
        return [place for place in places if any(place.queues.values())]

    def run(self) -> None:
        """Plays everything."""
        now = 0.0
        while True:
            for place in self._places:
                self._start(place, now)
            running = [place for place in self._places if place.running is not None]
            if not running:
                if any(queue for place in self._places for queue in place.queues.values()):
                    raise ConfigError("the programs wait for each other: updates of a step for what comes after them")
                return
            self._reshare(running, now)
            before, now = now, min(place.finish for place in running)
            for lane in {place.lane for place in running}:
                self.busy[lane] += now - before
            for place in running:
                if place.finish == now:
                    self._finish(place, now)

    def _start(self, place: _Place, now: float) -> None:
        """Begins what an idle place does next, if there is anything that waits for nothing."""
        if place.running is not None:
            return
        ready = []
        for owner, queue in place.queues.items():
            since = self._ready(owner, queue[-1]) if queue else inf
            if since <= now:
                since = max(since, place.next_since.get(owner, 0.0))
                ready.append((since, place.served.get(owner, -1), owner))
        if not ready:
            return
        _, _, owner = min(ready)
        index = place.queues[owner].pop()
        self._turn += 1
        place.served[owner] = self._turn
        place.running, place.share = (owner, index), 1.0
        place.finish = now + self._scores[owner].seconds[index]

    def _ready(self, owner: int, index: int) -> float:
        """Since when the next action of a program waits for nothing; infinite while it does."""
        action, ends = self._programs[owner].actions[index], self.end[owner]
        since = max((ends[earlier] for earlier in action.after), default=0.0)
        for other, earlier in self._across.get((owner, index), ()):
            since = max(since, self.end[other][earlier])
        if self._rules.synchronised and _changes_parameters(action):
            since = max(since, inf if self._left.get(action.step) else self._freed.get(action.step, 0.0))
        return since

    def _finish(self, place: _Place, now: float) -> None:
        if place.running is None:
            return
        owner, index = place.running
        self.end[owner][index] = now
        place.running, place.finish = None, inf
        place.next_since[owner] = now
        action = self._programs[owner].actions[index]
        if action.verb is Verb.COMPUTE and action.step in self._left:
            self._left[action.step] -= 1
            self._freed[action.step] = now

    def _reshare(self, running: Sequence[_Place], now: float) -> None:
        """Gives everything that runs the share that it has from ``now`` on, and so another end."""
        rates = [0.0] * len(PLACES)
        ends: dict[tuple[int, int], float] = {}  # of what ends on a root complex, by lane
        for place in running:
            rate, end = self._rate(place), (place.lane, self._root(place))
            rates[place.lane] += rate
            ends[end] = ends.get(end, 0.0) + rate
        busy = _busy_by_owner(running)
        for place in running:
            shares = self._sharing.crowded(busy[place.owner], rates[_H2D], rates[_D2H], rates[_UPDATE])
            share = shares[place.lane] if place.lane < len(LANES) else 1.0
            if place.lane in (_H2D, _D2H) and self._rules.channel is not None:
                # Equal shares of the channel: nobody gets more of it than there is.
                asked = ends[place.lane, self._root(place)]
                share = min(share, self._rules.channel / asked) if asked else share
            if share != place.share:
                place.finish = now + (place.finish - now) * place.share / share
                place.share = share

    def _root(self, place: _Place) -> int:
        """The root complex of what a place does."""
        return self._rules.roots[place.running[0]] if self._rules.roots and place.running is not None else 0

    def _rate(self, place: _Place) -> float:
        """Bytes/s of what a place does, alone."""
        if place.running is None:
            return 0.0
        owner, index = place.running
        return self._scores[owner].rates[index]


def _busy_by_owner(running: Sequence[_Place]) -> dict[int | None, int]:
    """By program, the lanes that run on its device, or on what all share."""
    shared, own = 0, dict[int | None, int]()
    for place in running:
        bit = 1 << place.lane if place.lane < len(LANES) else 0
        shared |= bit if len(place.queues) > 1 else 0
        own[place.owner] = own.get(place.owner, 0) | bit
    return {owner: busy | shared for owner, busy in own.items()}


def _changes_parameters(action: Action) -> bool:
    """Whether it is part of an update, which comes after the exchange of gradients."""
    return action.verb in (Verb.UPDATE, Verb.LOAD)
