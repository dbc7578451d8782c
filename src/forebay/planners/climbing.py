"""The end of ``auto``: what the searches found, changed a little at a time by chance, as long as the step gains.

The searches change a few numbers, of all blocks at once: how many stay, run again, are updated ahead of their step or
on the device, and how many slots there are. Each is sought with the others as they are, and which blocks are meant
follows from the number. Between two numbers lie many drafts, and two numbers at a time more. So single blocks are
changed here, and slots, and numbers, one to three of these at a time, as they come by; what is faster is gone on from
(first-choice hill climbing: Russell and Norvig, "Artificial intelligence: a modern approach", section 4.1). The draws
are the same in every run.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from random import Random
from typing import Final, final

from forebay.planners.balance import numbers_of, resettled, with_numbers
from forebay.planners.bench import Bench
from forebay.planners.device_updates import at_home_again, placed_there
from forebay.planners.device_updates import candidates as device_candidates
from forebay.planners.parts import Draft, Level, slot_options
from forebay.planners.speculation import SAME, candidates, fits
from forebay.plans import Update

__all__ = ["climbed"]

PATIENCE: Final = 40
"""Changes in a row that were simulated and gained nothing: then it is enough."""

DRAWN: Final = 30
"""Changes that are drawn for each of these, of which most have no room or cannot gain anything."""

SPENT: Final = 12.0
"""Of what a search may simulate, so many times as much may go to this one."""

TOGETHER: Final = (1, 1, 1, 2, 3)
"""Changes that are made at a time: one of these."""

FEW: Final = (-3, -2, -1, 0, 1, 2, 3)
"""By so much a number is changed."""


def climbed(bench: Bench, best: Draft, may_take: Callable[[Draft], bool]) -> Draft:
    """``best``, or the fastest that is found from there on and that ``may_take`` accepts; of a long step, as it is."""
    if bench.is_long or not candidates(bench, best):
        return best
    began, climb, seen, drawn, vain = (bench.simulated, bench.actions), _Changes(bench), {best}, 0, 0
    while vain < PATIENCE and drawn < DRAWN * PATIENCE and not bench.spent(*began, SPENT):
        enough = bench.seconds(best) * (1 - SAME)
        if bench.bound >= enough:
            break
        drawn += 1
        other = climb.of(best)
        if other is None or other in seen:
            continue
        seen.add(other)  # what has no room, or cannot gain anything, never will: the best one is only ever faster
        if not fits(bench, other) or bench.best_rates.step(other) >= enough:
            continue
        vain += 1
        if bench.seconds(other) < enough and may_take(other):
            best, drawn, vain = other, 0, 0
    return best


@final
class _Changes:
    """Changes of drafts, drawn one after the other. There are far fewer than draws: what takes long is kept."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._random = Random(0)
        self._made: dict[tuple[Hashable, ...], Draft | None] = {}

    def of(self, draft: Draft) -> Draft | None:
        """``draft`` with one change, or a few; None where one of them cannot be."""
        changed: Draft | None = draft
        for _ in range(self._random.choice(TOGETHER)):
            if changed is not None:
                changed = self._random.choice(_KINDS)(self, changed)
        return changed

    def _ahead(self, draft: Draft) -> Draft | None:
        """One block is updated ahead of its step that was not, or is not that was."""
        able = candidates(self._bench, draft)
        return self._made_ahead(draft, {self._random.choice(able)}) if able else None

    def _another_ahead(self, draft: Draft) -> Draft | None:
        """One block is updated ahead of its step instead of another."""
        chosen = self._one_of_each(candidates(self._bench, draft), draft.updated(Update.AHEAD))
        return self._made_ahead(draft, chosen) if chosen else None

    def _made_ahead(self, draft: Draft, changing: AbstractSet[str]) -> Draft:
        return draft.updating(Update.AHEAD, changing ^ set(draft.updated(Update.AHEAD)))

    def _on_device(self, draft: Draft) -> Draft | None:
        """One block is updated on the device that was not, or is not that was."""
        able = device_candidates(self._bench, draft)
        return self._made_there(draft, able, {self._random.choice(able)}) if able else None

    def _another_on_device(self, draft: Draft) -> Draft | None:
        """One block is updated on the device instead of another."""
        able = device_candidates(self._bench, draft)
        chosen = self._one_of_each(able, draft.updated(Update.DEVICE))
        return self._made_there(draft, able, chosen) if chosen else None

    def _made_there(self, draft: Draft, able: Sequence[str], changing: AbstractSet[str]) -> Draft | None:
        chosen = changing ^ set(draft.updated(Update.DEVICE))
        there = tuple(name for name in able if name in chosen)
        return self._once(placed_there, draft, there) if there else at_home_again(draft)

    def _one_of_each(self, able: Sequence[str], chosen: Sequence[str]) -> AbstractSet[str]:
        """One of ``chosen`` and one of the others that are ``able``; nothing where there is none of the one."""
        others = [name for name in able if name not in chosen]
        return {self._random.choice(chosen), self._random.choice(others)} if chosen and others else set()

    def _again(self, draft: Draft) -> Draft | None:
        """One block runs again that did not, or does not that did."""
        able = self._bench.recomputable
        if not able or draft.activations:
            return None
        chosen = {self._random.choice(able)} ^ set(draft.recompute)
        return draft.at(Level(tuple(name for name in able if name in chosen)))

    def _slots(self, draft: Draft) -> Draft | None:
        """One slot more, or one fewer."""
        options = slot_options(self._bench.streamed(draft))
        if draft.streaming.slots not in options:
            return None
        place = options.index(draft.streaming.slots) + self._random.choice((-1, 1))
        if not 0 <= place < len(options):
            return None
        slots = options[place]
        return replace(draft, streaming=replace(draft.streaming, slots=slots, prefetch_distance=max(1, len(slots) - 1)))

    def _numbers(self, draft: Draft) -> Draft | None:
        """A few more or fewer are updated ahead of their step, and on the device."""
        return self._with_numbers(draft.plain, draft)

    def _staying(self, draft: Draft) -> Draft | None:
        """A few more or fewer stay, and other numbers go with that."""
        return self._with_numbers(self._once(resettled, draft, self._random.choice(FEW)), draft)

    def _with_numbers(self, plain: Draft | None, draft: Draft) -> Draft | None:
        """``plain`` with a few more or fewer updates ahead of their step, and on the device, than ``draft`` has."""
        ahead, there = (max(0, number + self._random.choice(FEW)) for number in numbers_of(draft))
        return None if plain is None else self._once(with_numbers, plain, ahead, there)

    def _once(self, make: Callable[..., Draft | None], *of: Hashable) -> Draft | None:
        """What ``make`` makes ``of`` these on the bench, worked out the first time that it is asked for."""
        key = make, *of
        if key not in self._made:
            self._made[key] = make(self._bench, *of)
        return self._made[key]


# Not the methods of one that are bound: it would hold itself.
_KINDS: Final[tuple[Callable[[_Changes, Draft], Draft | None], ...]] = (
    _Changes._ahead,
    _Changes._on_device,
    _Changes._another_ahead,
    _Changes._another_on_device,
    _Changes._again,
    _Changes._slots,
    _Changes._numbers,
    _Changes._staying,
)
