"""Which blocks are updated ahead of their step, while backward still runs, into a second copy at home.

An update that runs under the next forward holds up the fetch of its block; one that has run under backward does not.
Those that are taken, more and more of them, are spread over the model as evenly as their number allows: updates under
backward then have the landings of those between them to catch up in, and so has the forward, for the ones that it
waits for. Were the last ones taken, updates would be behind at the end of backward, and none left to do in the second
half of forward (``test_they_are_spread_over_the_model``). It costs a second copy of parameters and states in the tiers
where they live; the update itself moves no more bytes. On a full host states of more blocks go to the disk, if there is
one, and make the room. The simulation says whether that pays.

Lian et al., "SuperOffload" (ASPLOS 2026), call a step that is made before it is known to be wanted speculation, then
validation. Ours differs in what it takes for granted and in keeping the old copy (``runtime.speculation``).

More blocks are tried as long as the step gains, in steps that do not depend on the room: more room adds choices at the
end and takes none away, so that no plan is slower for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from math import ceil

from forebay.errors import DoesNotFit
from forebay.memory import Tier
from forebay.model import Block
from forebay.planners.bench import Bench
from forebay.planners.homes import at_home, at_home_anew, more_on_disk, on_host
from forebay.planners.parts import KEPT, RESIDENT, Draft, Level, repeated_size
from forebay.planners.shapes import SHARED, around, fewest_recomputed, filled, usual_window, wide
from forebay.plans import Update
from forebay.program import Outline, Verb
from forebay.timeline import Lane

__all__ = [
    "FEW_RUNGS",
    "GAIN",
    "MORE_GAIN",
    "ahead",
    "alike",
    "candidates",
    "fastest_ahead",
    "fits",
    "judged",
    "placed_ahead",
    "second_copies",
    "unhindered",
    "usually",
]

GAIN = 0.01
"""Second copies that save less than this share of a step are not worth their bytes."""

MORE_GAIN = 0.002
"""Nor are more of them that save less than this share beside fewer."""

SAME = MORE_GAIN / 2
"""Steps that differ by no more than this share are the same."""

WORSE = 0.05
"""Where a step is slower by more than this share than with fewer, no more are tried."""

RUNGS = 8
"""Of all blocks that are updated on the host, one part in so many more is tried at a time."""

FEW_RUNGS = 4
"""The same where there is time for few."""

LONG_RUNGS = 8
"""The same for long steps (``Bench.is_long``), from as many as backward has time for (``_usual``); in the end half of
that."""

DISK_RUNGS = 3
"""Of those that have all on disk, where second copies take no host memory."""

OTHERS = 3
"""Drafts behind the fastest one that are tried with second copies too: they may gain more."""

PROMISING = 6
"""Drafts of which it is asked what they take if no update is in their way."""

LARGE_SLOTS = (3, 2)
"""Slots for what streams where only what has a size of its own stays."""

SPENT = 0.5
"""Of what a search may simulate, so much may go to those."""


def ahead(bench: Bench, draft: Draft, *, rungs: int | None = None) -> Draft:
    """``draft`` with the updates ahead of their step that make it faster; without a trace, as it is. ``rungs``: of so
    many numbers of them, sought from the middle (None: more and more of them). Of a long step neither: of a few numbers
    around the one that backward has time for."""
    able = candidates(bench, draft)
    enough = bench.seconds(draft) * (1 - GAIN) if able else 0.0
    if not able or bench.best_rates.step(draft) > enough or (not bench.is_long and unhindered(bench, draft) > enough):
        return draft
    homes = {p.block: p for p in draft.placements}
    # Where the host has no room for the second copies of some, those of others may still go to disk.
    on_disk = tuple(b for b in able if homes[b].parameters is Tier.DISK and homes[b].states is Tier.DISK)
    found = [draft]
    if able != on_disk and bench.is_long:
        found.append(_from_the_usual(bench, draft, able))
    elif able != on_disk and rungs is not None:
        found.append(_from_the_middle(bench, draft, list(_choices(bench, draft, able, rungs)), rungs))
    elif able != on_disk:
        found.append(_climbed(bench, draft, _choices(bench, draft, able, RUNGS)))
    found += _choices(bench, draft, on_disk, DISK_RUNGS)
    best = min(found, key=bench.seconds)
    return best if bench.seconds(best) < enough else draft


def usually(bench: Bench, draft: Draft) -> Draft:
    """``draft`` as it is compared with others before it is known which updates run ahead of their step. Of a long step,
    for which few drafts are simulated, as many as backward has time for, if there is room for the second copies: with
    none the next forward waits for updates whatever else is decided."""
    able = candidates(bench, draft) if bench.is_long and not draft.updated(Update.AHEAD) else ()
    more = placed_ahead(bench, draft, able, _usual(bench, draft, len(able))) if able else None
    return more or draft


def judged(bench: Bench, draft: Draft) -> float:
    """Seconds of a step of ``draft`` as it is usually."""
    return bench.seconds(usually(bench, draft))


def _usual(bench: Bench, draft: Draft, able: int) -> int:
    """How many of so many that are ``able`` the host updates while backward lasts. With more of them it is behind when
    forward begins, which waits for the first blocks then, whose gradients came last; with fewer forward waits for all
    the others."""
    lanes, forward = bench.best_rates.lanes(draft), bench.best_rates.forward
    updates = lanes[Lane.UPDATE]
    step = max(seconds for lane, seconds in lanes.items() if lane is not Lane.UPDATE)
    backward = step * (1 - forward / lanes[Lane.COMPUTE]) if lanes[Lane.COMPUTE] else 0.0
    return max(1, round(able * backward / max(step, updates))) if step else able


def unhindered(bench: Bench, draft: Draft) -> float:
    """What a step of ``draft`` takes if its updates on the host take no time, nor the disk for anything but
    activations: no update that runs earlier is worth more than that. (Parameters that a fetch reads from disk are in
    this too, so where there are many the bound is loose.)"""
    return bench.eased(draft, _without_updates)


def _without_updates(action: Outline) -> float:
    of_updates = action.lane is Lane.UPDATE or (action.tensor < 0 and action.verb in (Verb.READ, Verb.WRITE))
    return 0.0 if of_updates else 1.0


def _from_the_middle(bench: Bench, draft: Draft, choices: Sequence[Draft], rungs: int) -> Draft:
    """The one of ``choices`` that is worth it, sought from the middle of the ``rungs`` on: where half of the blocks are
    too few, a quarter is too."""
    start = min(rungs // 2, len(choices)) - 1
    best = _climbed(bench, draft, choices[max(0, start) :])
    for fewer in reversed(choices[: max(0, start)]):
        if best not in (draft, choices[start]):
            break  # more of them were worth it
        seconds, known = bench.seconds(fewer), bench.seconds(best)
        if seconds < known * (1 - MORE_GAIN) or (best != draft and known >= seconds * (1 - MORE_GAIN)):
            best = fewer
    return best


def _from_the_usual(bench: Bench, draft: Draft, able: Sequence[str]) -> Draft:
    """The fastest of ``draft`` and of those with about as many updates ahead of their step as it has, or as backward
    has time for, where it has none."""
    best, count, tried = draft, len(draft.updated(Update.AHEAD)), set[int]()

    def attempt(number: int) -> bool:
        """Whether so many are better than all before."""
        nonlocal best, count
        more = placed_ahead(bench, draft, able, number) if 0 < number <= len(able) and number not in tried else None
        tried.add(number)
        if more is None or bench.seconds(more) >= bench.seconds(best) * (1 - MORE_GAIN):
            return False
        best, count = more, number
        return True

    if not count:
        count = _usual(bench, draft, len(able))
        while count > 1 and placed_ahead(bench, draft, able, count) is None:
            count //= 2  # there is no room for so many
        attempt(count)
    for rungs in (LONG_RUNGS, 2 * LONG_RUNGS):
        stride = ceil(len(able) / rungs)
        for way in (stride, -stride):
            while attempt(count + way):
                pass
    return best


def _climbed(bench: Bench, draft: Draft, choices: Iterable[Draft]) -> Draft:
    """The last of ``choices``, more and more updates ahead of their step, that is worth it."""
    best = draft
    floor = unhindered(bench, draft)
    for more in choices:
        if bench.seconds(best) * (1 - MORE_GAIN) <= floor:
            break  # no update is in its way any more
        seconds, before = bench.seconds(more), bench.seconds(best)
        if seconds < before * (1 - MORE_GAIN):
            best = more
        elif seconds > before * (1 + WORSE):
            break  # backward has no time for so many, and the next forward has nothing left to do beside
    return best


def fastest_ahead(bench: Bench, best: Draft, may_take: Callable[[Draft], bool], others: Sequence[Draft] = ()) -> Draft:
    """``ahead`` of the fastest draft, ``best``, or of another one that ``may_take`` accepts and that gains more: one of
    ``others``; with more on disk, where a second copy takes no host memory; nearly as fast as ``best``; or with next
    to nothing that stays, of which simulations are spent in any case."""
    chosen = ahead(bench, best)
    if bench.is_long:
        return chosen  # what it was compared with had updates ahead of their step too
    tried = [best]
    near = chain(more_on_disk(bench, best), _promising(bench, best), bench.fastest(1 + OTHERS))
    for drafts, rungs in ((others, None), (near, FEW_RUNGS), (_lean(bench), RUNGS)):
        began = bench.simulated, bench.actions
        for other in drafts:
            if bench.spent(*began, SPENT):
                break
            enough = bench.seconds(chosen) * (1 - MORE_GAIN)
            if bench.best_rates.step(other) >= enough or not fits(bench, other) or unhindered(bench, other) >= enough:
                continue
            if not any(alike(bench, other, one, unhindered) for one in tried):
                tried.append(other)
                more = ahead(bench, other, rungs=rungs)
                if bench.seconds(more) < enough and may_take(more):
                    chosen = more
    return chosen


def _lean(bench: Bench) -> Iterator[Draft]:
    """Nothing stays but blocks of a size of their own (an embedding, a head), or nothing at all where there is no room
    for these, and the fewest blocks run again: where updates are out of the way, a block that stays gains next to
    nothing, and one that need not run again gains all of its computation. Then the same with what there is room for
    beside that, since fewer updates are in the way."""
    blocks = [block for block in bench.model.blocks if not block.held]
    repeated = repeated_size(blocks) if blocks else 0
    large = [block for block in blocks if block.nbytes > repeated]
    found = list(_around(bench, large)) or list(_around(bench, []))
    yield from found
    for lean in found:
        full = at_home_anew(bench, filled(bench, on_host(bench, lean), SHARED))
        if full is not None:
            yield full


def _around(bench: Bench, staying: Sequence[Block]) -> Iterator[Draft]:
    """All but ``staying`` streams, and the fewest blocks run again that need to."""
    for slots in LARGE_SLOTS:
        make = partial(around, bench, staying, RESIDENT, slots)
        level = fewest_recomputed(bench, make, (KEPT, Level(bench.recomputable)))
        with suppress(DoesNotFit):
            if level is not None:
                yield at_home(bench, wide(bench, make(level), usual_window(bench)))


def alike(bench: Bench, one: Draft, other: Draft, least: Callable[[Bench, Draft], float]) -> bool:
    """Whether two drafts take the same, now and with ``least`` (seconds with something out of the way), but for what is
    no gain: a block in a slot that it alone needs or in one of its own, say. What helps one helps the other as much."""
    pairs = ((each(bench, one), each(bench, other)) for each in (Bench.seconds, least))
    return all(abs(a - b) <= SAME * max(a, b) for a, b in pairs)


def _promising(bench: Bench, best: Draft) -> list[Draft]:
    """Of the drafts that were simulated those whose step is the shortest half-way to what it would be if no update were
    in its way, where that would be shorter than the one of ``best``. What the search took for the fastest may have as
    many blocks on the device as the host's updates ask for, and compute all the more again."""
    enough = bench.seconds(best) * (1 - GAIN)
    able = [
        draft for draft in bench.fastest(bench.simulated) if bench.best_rates.step(draft) < enough and draft != best
    ]
    least = {draft: unhindered(bench, draft) for draft in sorted(able, key=bench.best_rates.step)[:PROMISING]}
    able = [draft for draft in least if least[draft] < enough]
    return sorted(able, key=lambda draft: least[draft] + bench.seconds(draft))[:OTHERS]


def candidates(bench: Bench, draft: Draft) -> tuple[str, ...]:
    """The blocks of ``draft`` that could be updated ahead of their step, those first whose gradients land first.

    Where updates and compute share the cores, an update is no faster under backward than after it: only blocks that
    have to wait for the disk gain anything there.
    """
    if bench.liveness is None:
        return ()
    index, landed = bench.liveness.index, dict[str, int]()
    for done in (done for visit in index.completed for done in visit):
        block = index.blocks[done.parameter]
        landed[block] = max(landed.get(block, 0), done.op)
    able = (Update.STEP, Update.AHEAD)
    placements = bench.in_backward(draft).placements
    hosted = [p for p in placements if not p.resident and p.block in landed and p.update in able]
    if not bench.problem.overlap_update:
        hosted = [p for p in hosted if p.on_disk]
    return tuple(sorted((p.block for p in hosted), key=lambda block: landed[block]))


def second_copies(bench: Bench, draft: Draft) -> dict[Tier, int]:
    """Bytes of the second copies under ``draft``, by tier; those of ``pinned`` are on the host too."""
    once, twice = bench.arenas(draft.updating(Update.AHEAD, ())), bench.arenas(draft)
    return {
        Tier.HOST: twice.host - once.host,
        Tier.PINNED: bench.pinned(twice) - bench.pinned(once),
        Tier.DISK: twice.disk - once.disk,
    }


def _choices(bench: Bench, draft: Draft, able: Sequence[str], rungs: int) -> Iterator[Draft]:
    """``draft`` with updates of more and more of ``able`` ahead of their step, one part in ``rungs`` at a time, as far
    as there is room."""
    for count in dict.fromkeys(ceil(rung * len(able) / rungs) for rung in range(1, 1 + rungs)):
        more = placed_ahead(bench, draft, able, count)
        if more is None:
            return
        yield more


def placed_ahead(bench: Bench, draft: Draft, able: Sequence[str], count: int) -> Draft | None:
    """``draft`` with ``count`` of ``able``, evenly spread, updated ahead of their step, and with more on disk where the
    host has no room for their second copies; None where that does not help."""
    draft = draft.updating(Update.AHEAD, _spread(able, count))
    if _fits_at_home(bench, draft):
        return draft
    if bench.problem.limit(Tier.DISK) and bench.arenas(draft).host > bench.problem.limit(Tier.HOST):
        settled = at_home_anew(bench, draft)
        return settled if settled is not None and _fits_at_home(bench, settled) else None
    return None


def _spread(able: Sequence[str], count: int) -> frozenset[str]:
    """``count`` of ``able``, evenly, the first one among them."""
    return frozenset(able[number * len(able) // count] for number in range(count))


def fits(bench: Bench, draft: Draft) -> bool:
    """Whether every tier has room, and nothing loses its page-locked memory to second copies or to states that move."""
    return bench.fits_device(draft) and _fits_at_home(bench, draft)


def _fits_at_home(bench: Bench, draft: Draft) -> bool:
    """``fits`` without the device."""
    sizes, problem = bench.arenas(draft), bench.problem
    if sizes.host > problem.limit(Tier.HOST) or sizes.disk > problem.limit(Tier.DISK):
        return False
    return bench.pageable(sizes) <= bench.pageable(bench.arenas(draft.plain))
