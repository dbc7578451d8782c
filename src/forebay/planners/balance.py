"""How many blocks are updated ahead of their step and how many on the device, sought together.

``speculation`` finds the first number and ``device_updates`` then the second, each a part of all blocks at a time and
with the other as it is. The best of both lies between: an update that runs under backward has the host to itself for
as long, one on the device has neither the host's time nor a second copy, and with a few of these fewer of those are
wanted. So from what the two have found both numbers change by a few blocks and then by one, up, down and against each
other, as long as the step gains: a pattern search (Hooke and Jeeves, "'Direct search' solution of numerical and
statistical problems", JACM 8(2), 1961). With updates out of the way a block that stays gains less, and one that need
not run again gains all that it computes: so the same is sought with a few blocks fewer that stay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final, final

from forebay.planners.bench import Bench
from forebay.planners.device_updates import candidates as device_candidates
from forebay.planners.device_updates import placed_there
from forebay.planners.homes import at_home_anew
from forebay.planners.parts import (
    DEDICATED,
    HOSTED,
    KEPT,
    RESIDENT,
    Draft,
    Level,
    keep_order,
    repeated_size,
    slot_options,
)
from forebay.planners.shapes import fewest_recomputed, with_needed_slots
from forebay.planners.speculation import MORE_GAIN, candidates, fits, placed_ahead, unhindered
from forebay.plans import Update

__all__ = ["balanced", "numbers_of", "resettled", "with_numbers"]

FEW: Final = 2
"""Blocks by which a number changes at first; in the end by one."""

DIRECTIONS: Final = ((0, 1), (-1, 1), (-1, 0), (1, 0), (1, -1), (0, -1))
"""What is tried from where the search is: ahead of their step, on the device."""

LEAVING: Final = (0, -1, 1, 2, 4, 8, 16)
"""So many blocks fewer that stay are tried; with as many, more slots where there is one."""

STARTS: Final = ((1, 0), (0, 1), (1, 1), (2, 0), (0, 0))
"""And with them so many times as many more of each number, one after the other until a draft is near enough."""

NEAR: Final = 0.06
"""From a draft that is behind the best by more than this share nothing is sought."""

SPENT: Final = 1.5
"""Of what a search may simulate, so much may go to this one."""

SPENT_LAST: Final = 0.5
"""And so much to single blocks in the end, whatever the rest has left."""


def balanced(bench: Bench, best: Draft, may_take: Callable[[Draft], bool]) -> Draft:
    """``best``, or the fastest that is found around it and that ``may_take`` accepts; of a long step, as it is."""
    if bench.is_long or not candidates(bench, best):
        return best
    search = _Search(bench, may_take, SPENT)
    best = search.around(best, FEW)
    before: Draft | None = None
    while before != best:
        before = best
        for leaving in LEAVING:
            best = search.with_others(best, leaving)
    return _Search(bench, may_take, SPENT_LAST).around(best, 1)


@final
class _Search:
    """Searches that have simulations in common."""

    def __init__(self, bench: Bench, may_take: Callable[[Draft], bool], share: float) -> None:
        self._bench, self._may_take, self._share = bench, may_take, share
        self._began = bench.simulated, bench.actions
        self._seen: set[Draft] = set()

    def around(self, best: Draft, stride: int) -> Draft:
        """``best``, or the fastest with other numbers that is found from there on, by ``stride`` blocks at a time."""
        bench, start = self._bench, None
        while start != best and unhindered(bench, best.plain) < bench.seconds(best) * (1 - MORE_GAIN):
            start = best
            for ahead, there in DIRECTIONS:
                while (more := self._moved(best, stride * ahead, stride * there)) is not None:
                    best = more
        return best

    def with_others(self, best: Draft, leaving: int) -> Draft:
        """``best``, or the fastest that is found where ``leaving`` blocks fewer stay (less than 0: more)."""
        bench = self._bench
        other = resettled(bench, best, leaving)
        if other is None or unhindered(bench, other) >= bench.seconds(best) * (1 - MORE_GAIN):
            return best
        start = self._start(best, other, leaving)
        if start is None:
            return best
        found = self.around(start, FEW)
        gains = bench.seconds(found) < bench.seconds(best) * (1 - MORE_GAIN)
        return found if gains and self._may_take(found) else best

    def _start(self, best: Draft, other: Draft, leaving: int) -> Draft | None:
        """``other``, in which ``leaving`` blocks of ``best`` do not stay, with more of both than ``best`` has, near
        enough to go on from; None if none is."""
        bench, (ahead, there) = self._bench, numbers_of(best)
        enough = bench.seconds(best) * (1 + NEAR)
        for more_ahead, more_there in STARTS:
            start = with_numbers(bench, other, ahead + more_ahead * leaving, there + more_there * leaving)
            if start is not None and self._simulates(start) and bench.seconds(start) <= enough:
                return start
        return None

    def _moved(self, best: Draft, ahead: int, there: int) -> Draft | None:
        """``best`` with so many more of each; None if that has been seen, has no room or is no faster."""
        bench, (now_ahead, now_there) = self._bench, numbers_of(best)
        more = with_numbers(bench, best.plain, now_ahead + ahead, now_there + there)
        enough = bench.seconds(best) * (1 - MORE_GAIN)
        if more is None or bench.best_rates.step(more) >= enough or not self._simulates(more):
            return None
        return more if bench.seconds(more) < enough and self._may_take(more) else None

    def _simulates(self, draft: Draft) -> bool:
        """Whether ``draft`` is new, and simulations are left for it."""
        new = draft not in self._seen and not self._bench.spent(*self._began, self._share)
        self._seen.add(draft)
        return new


def numbers_of(draft: Draft) -> tuple[int, int]:
    """Blocks that are updated ahead of their step, and on the device."""
    return len(draft.updated(Update.AHEAD)), len(draft.updated(Update.DEVICE))


def with_numbers(bench: Bench, plain: Draft, ahead: int, there: int) -> Draft | None:
    """``plain`` with so many blocks updated ahead of their step and on the device; None where there are not as many, or
    no room."""
    more: Draft | None = plain
    if there:
        able = device_candidates(bench, plain)
        more = _with_a_window(bench, plain, able[:there]) if 0 < there <= len(able) else None
    if more is not None and ahead:
        able = candidates(bench, more)
        more = placed_ahead(bench, more, able, ahead) if 0 < ahead <= len(able) else None
    return more if more is not None and fits(bench, more) else None


def _with_a_window(bench: Bench, plain: Draft, names: Sequence[str]) -> Draft | None:
    """``plain`` with ``names`` updated on the device, where there is no room for that with fewer blocks in slots of
    their own; None if that is not enough."""
    slots = plain.streaming.slots
    able = {block.name for block in bench.model.blocks if slots and not block.held and block.nbytes <= min(slots)}
    homes = ((p.block, (p.parameters, p.gradients, p.states)) for p in plain.placements)
    own = [block for block, home in homes if home == DEDICATED and block in able]
    for kept in dict.fromkeys((len(own), len(own) // 2, 0)):
        base = plain
        for name in own[kept:]:
            base = base.placed(name, HOSTED)
        more = placed_there(bench, base, names)
        if more is not None:
            return more
    return None


def resettled(bench: Bench, draft: Draft, leaving: int) -> Draft | None:
    """``draft`` with ``leaving`` blocks fewer that stay, those that were given room last (less than 0: more, those that
    come next), and with as many fewer that run again as there is room for then; None where none is left. They share
    the slots, where there are some; from a single slot there are more where there is room."""
    slots = draft.streaming.slots
    repeated = repeated_size(bench.model.blocks)
    largest = max(slots, default=repeated)
    order = keep_order(bench.model, (repeated,), last_first=False)
    rest = [block.name for block in order if repeated < 2 * block.nbytes <= 2 * min(repeated, largest)]
    if rest and rest[0] not in draft.resident:
        rest.reverse()
    staying, others = ([n for n in rest if (n in draft.resident) == stays] for stays in (True, False))
    changing = staying[::-1][:leaving] if leaving > 0 else others[:-leaving]
    if len(changing) < abs(leaving):
        return None
    home = RESIDENT if leaving < 0 else HOSTED if slots else DEDICATED
    # Single ops that are kept or moved in blocks that run again are given up for whole blocks that need not.
    most = Level(draft.recompute) if draft.recompute else None
    plain = draft.plain
    for name in changing:
        plain = plain.placed(name, home)
    plain = with_needed_slots(bench, plain)
    if len(slots) == 1:
        plain = _with_more_slots(bench, plain, most)
    if plain == draft.plain or not bench.fits_device(plain if most is None else plain.at(most)):
        return None
    less = None if most is None else fewest_recomputed(bench, plain.at, (KEPT, most))
    return at_home_anew(bench, plain if less is None else plain.at(less))


def _with_more_slots(bench: Bench, plain: Draft, most: Level | None) -> Draft:
    """``plain`` with as many slots as there is room for, where all that ``most`` names runs again: through a single one
    no block is fetched ahead."""
    streaming = plain.streaming
    for slots in slot_options(bench.streamed(plain)):
        distance = max(streaming.prefetch_distance, len(slots) - 1)
        more = replace(plain, streaming=replace(streaming, slots=slots, prefetch_distance=distance))
        if bench.fits_device(more if most is None else more.at(most)):
            return more
    return plain
