"""From what a policy decides about activations to a plan: where parameters are, what fits, what a refusal says.

The papers keep parameters, gradients and states on the device. So does a plan here where the device has room for them
beside the activations that the policy needs at the least. Else there are two ways, of which the faster is taken: as
many blocks stay as there is room for beside those activations, and the others stream; or every block streams, through
as many slots as there is room for, and what the policy leaves keeps blocks on the device. What a policy decides is
the same function of the room that is left to activations in each case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from typing import final

from forebay.errors import DoesNotFit
from forebay.memory import Tier
from forebay.planners.activations.choosing import narrow
from forebay.planners.activations.literature.branching import Found
from forebay.planners.activations.literature.layers import Choice, Layer, layers_of, level_with
from forebay.planners.activations.menu import Option
from forebay.planners.auto import proven
from forebay.planners.bench import Bench
from forebay.planners.homes import at_home
from forebay.planners.nearest import refused
from forebay.planners.parts import KEPT, Draft, Level, all_resident
from forebay.planners.refusals import device_too_small
from forebay.planners.shapes import Filling, filled, options, streamed_through, usual_window
from forebay.planners.states.drafting import cannot_serve, expect_trace, finished
from forebay.planners.states.housing import Refusal, least_refused
from forebay.plans import Plan

__all__ = ["Answer", "Room", "always", "chosen", "placed", "searched", "widest", "within"]

TRIES = 8
"""How often a method is asked, with more or less room by its own account ..."""

CLOSE = 0.01
"""... unless that is known to so large a share of what is held with everything kept."""

PARTS = (1, 2, 4, 8)
"""Parts of what moves that may be under way at once, the most that there is room for."""


@dataclass(frozen=True)
class Answer:
    """What a policy decides: a level, and why in words. ``widens``: as much may be under way as there is room for."""

    level: Level
    said: tuple[str, ...] = ()
    widens: bool = True


@final
class Room:
    """What the device has room for with parameters, gradients and states placed in one way.

    ``layers`` are the blocks that something can be said about, in the order of the forward. ``fills``: what is left
    keeps blocks on the device. ``goes_on``: the next room may be better, and is tried as well.
    """

    def __init__(
        self,
        bench: Bench,
        layers: Sequence[Layer],
        make: Callable[[Level], Draft],
        *,
        fills: bool = False,
        goes_on: bool = False,
    ) -> None:
        self.bench = bench
        self.layers = tuple(layers)
        self.goes_on = goes_on
        self._make = make
        self._fills = fills

    def fits(self, level: Level) -> bool:
        """Whether the device has room for ``level``."""
        return self.bench.fits_device(self._make(level))

    def over(self, level: Level) -> int:
        """Bytes that the device lacks for ``level``; less than 0: bytes that are left."""
        return self.bench.device(self._make(level)) - self.bench.problem.limit(Tier.DEVICE)

    def seconds(self, level: Level) -> float:
        """Seconds of a simulated step."""
        return self.bench.seconds(self._make(level))

    def level(self, choice: Choice, window: int | None = None) -> Level:
        """What a plan says of ``choice`` (``layers.level_with``)."""
        return level_with(self.bench, choice, window)

    def draft(self, level: Level) -> Draft:
        """All of it, with as many blocks on the device as there is room for."""
        draft = self._make(level)
        return filled(self.bench, draft, Filling()) if self._fills else draft

    def least(self, level: Level) -> Draft:
        """What needs the least of the device with ``level``."""
        return self._make(narrow(level))


_Ways = tuple[Draft, Iterator[Draft], tuple[str, ...]]
"""The first draft in a room, those that are tried where the checker refuses it, and why in words."""

Decide = Callable[[Room], Answer | None]
"""A policy: what it does with a room, None where nothing that it can do fits."""


def placed(
    bench: Bench,
    policy: str,
    asks: str,
    decide: Decide,
    leanest: Callable[[tuple[Layer, ...]], Choice],
    then: Callable[[Draft], Draft] | None = None,
) -> Plan:
    """The plan of ``policy``, which ``asks`` for something that only a batch tells. ``leanest`` is what it can do that
    needs the least of the device. ``then``: what is done to the draft before homes are found. Raises ``DoesNotFit``,
    ``CannotServe`` where there is no block to decide about, and ``ConfigError`` without a batch."""
    expect_trace(bench, policy, asks)
    layers = layers_of(bench)
    if not layers:
        why = "decides about blocks that are one module each and run once in a step, and this model has none"
        raise cannot_serve(policy, why, "auto or keep")
    last = level_with(bench, leanest(layers))
    rooms = tuple(_rooms(bench, layers, last))
    found, refusals = list[_Ways](), list[Refusal]()
    for room in rooms:
        answer = decide(room) if room.fits(narrow(last)) or room.fits(KEPT) else None
        ways = _drafts(bench, room, _as_narrow_as_need_be(room, answer, last), then, refusals)
        found += [(first, ways, answer.said if answer else ()) for first in islice(ways, 1)]
        if room.goes_on:
            continue
        # The faster room first: a proof takes longer than a simulation, and one is enough.
        for first, more, said in sorted(found, key=lambda way: bench.seconds(way[0])) if len(found) > 1 else found:
            draft = next((one for one in chain((first,), more) if proven(bench, one)), None)
            if draft is not None:
                return finished(bench, policy, draft, *said)
        found = []
    if refusals:
        raise refused(bench, *least_refused(bench, refusals))
    least = min((room.least(last) for room in rooms), key=bench.device)
    raise refused(bench, device_too_small(bench, least), least)


def _drafts(
    bench: Bench,
    room: Room,
    levels: Iterator[Level],
    then: Callable[[Draft], Draft] | None,
    refusals: list[Refusal],
) -> Iterator[Draft]:
    """A draft with homes for each of ``levels`` that has them, when it is asked for; all others add to ``refusals``."""
    for level in levels:
        draft = room.draft(level)
        draft = then(draft) if then else draft
        try:
            yield at_home(bench, draft)
        except DoesNotFit as error:
            refusals.append((error, draft))


def _as_narrow_as_need_be(room: Room, answer: Answer | None, last: Level) -> Iterator[Level]:
    """What was decided, with as much under way as there is room for; with what it says; with one tensor after the
    other; the least that would do. Each only where it fits. The checker may refuse one for another: it is stricter than
    the bench about what is under way at once."""
    decided = (*_wider(room, answer), answer.level, narrow(answer.level)) if answer else ()
    for level in dict.fromkeys((*decided, narrow(last))):
        if room.fits(level):
            yield level


def widest(room: Room, answer: Answer) -> Level:
    """What was decided, with as much under way as there is room for."""
    return next(_wider(room, answer), answer.level)


def _wider(room: Room, answer: Answer) -> Iterator[Level]:
    """The widest window that fits and is wider than what the answer has."""
    level = answer.level
    for part in PARTS if answer.widens else ():
        wide = replace(level, window=level.moved // part)
        if wide.window > level.window and room.fits(wide):
            yield wide
            break


def _rooms(bench: Bench, layers: Sequence[Layer], last: Level) -> Iterator[Room]:
    """Everything on the device; as many blocks there as ``last`` leaves room for; all streaming, through the most slots
    first."""
    yield Room(bench, layers, partial(all_resident, bench.model))
    choices = options(bench)
    for slots in choices:
        least = streamed_through(bench, slots, usual_window(bench), narrow(last))
        if bench.fits_device(least):
            base = filled(bench, least, Filling())
            yield Room(bench, layers, base.at, goes_on=True)
            break
    for slots in choices:
        yield Room(bench, layers, partial(streamed_through, bench, slots, usual_window(bench)), fills=True)


def always(make: Callable[[tuple[Layer, ...]], Choice]) -> Decide:
    """The policy that does the same whatever there is room for."""

    def decide(room: Room) -> Answer | None:
        level = room.level(make(room.layers))
        return Answer(level) if room.fits(level) else None

    return decide


def within(room: Room, solve: Callable[[int], Choice | None], held: int) -> tuple[Choice | None, int]:
    """The best that ``solve`` finds and that fits, and what it was told: the bytes that activations may take by its own
    account, by which ``held`` are what all of them take if everything is kept, which does not fit. None if it finds
    nothing.

    What is on the device at its fullest is the bench's to know, and it may be more or less than by the method's own
    account. So that account is given the most room, by bisection, with which its answer fits.
    """
    low, high = 0, held
    best: Choice | None = None
    told = allowed = held - room.over(KEPT)
    for _ in range(TRIES):
        choice = solve(allowed)
        if choice is not None and not room.fits(room.level(choice)):
            high = allowed
        else:
            low = allowed
        if choice is not None and low == allowed:
            best, told = choice, allowed
        if high - low <= CLOSE * held:
            break
        allowed = (low + high) // 2
    return best, told


def searched(
    room: Room, solve: Callable[[int, int], tuple[Choice, Found] | None], held: int, nodes: int
) -> tuple[Choice, Found] | None:
    """``within`` for an integer programme: the room by its own account is found with rounded relaxations, and searched
    in at most ``nodes`` of them. ``solve`` is told of bytes and relaxations. None if nothing fits."""
    found: dict[int, tuple[Choice, Found]] = {}

    def rounding(allowed: int) -> Choice | None:
        answer = solve(allowed, 1)
        if answer is None:
            return None
        found[allowed] = answer
        return answer[0]

    choice, allowed = within(room, rounding, held)
    if choice is None:
        return None
    best = solve(allowed, nodes)
    return best if best is not None and room.fits(room.level(best[0])) else found[allowed]


def chosen(layers: Sequence[Layer], options: Sequence[Option]) -> Choice:
    """By the names of ``layers``."""
    return {layer.name: option for layer, option in zip(layers, options, strict=True)}
