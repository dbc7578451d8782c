"""Shapes: drafts that fit on the device, from the least that is enough to all that there is room for."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from forebay.memory import Tier
from forebay.model import Block
from forebay.planners.bench import Bench
from forebay.planners.parts import (
    DEDICATED,
    HOSTED,
    KEPT,
    RESIDENT,
    Draft,
    Level,
    all_resident,
    all_streamed,
    fewer_slots,
    keep_order,
    slot_options,
    slots_for,
    streaming_through,
)
from forebay.plans import Placement, Streaming

__all__ = [
    "SHARED",
    "Filling",
    "Home",
    "anything_fits",
    "around",
    "fewest_recomputed",
    "filled",
    "least_device",
    "levels",
    "options",
    "streamed_through",
    "usual_window",
    "wide",
    "windows",
    "with_needed_slots",
]

Home = tuple[Tier, Tier, Tier]
"""Where parameters, gradients and states of a block are at home."""

PARTS = 4
"""Recomputation is tried for none, all, and this many parts of the blocks."""

ROUNDS = 3
"""Rounds of filling: what is beside the arenas changes a little with what stays, so room may be left over."""


def levels(bench: Bench) -> list[Level]:
    """Blocks that recompute as a whole: none, a part of the blocks from the first on, all."""
    able = bench.recomputable
    return [Level(able[:n]) for n in sorted({len(able) * part // PARTS for part in range(PARTS + 1)})]


def options(bench: Bench, most: int = 3) -> list[tuple[int, ...]]:
    """Slots through which everything can stream, the most first."""
    return bench.slot_options(most)


def usual_window(bench: Bench) -> int:
    """Bytes of the gradients of one block: while they leave, the next block's are made."""
    blocks = [b for b in bench.model.blocks if not b.held] or list(bench.model.blocks)
    return max((b.gradient_nbytes for b in blocks), default=0)


def windows(bench: Bench) -> list[int]:
    """Bytes of gradients under way worth trying: of two blocks, of one parameter, none. (One block: the usual.)"""
    one = max((p.nbytes for b in bench.model.blocks for p in b.parameters if p.trainable), default=0)
    return sorted({2 * usual_window(bench), one, 0} - {usual_window(bench)}, reverse=True)


def streamed_through(bench: Bench, slots: tuple[int, ...], window: int, level: Level = KEPT) -> Draft:
    """Everything streams through ``slots``; the window is ``window`` or what there is room for, if that is less.

    The window may shrink to nothing, which lets one gradient after the other leave: it is a matter of speed, not of
    fit. Whether the rest fits is for the caller to ask.
    """
    return wide(bench, all_streamed(bench.model, streaming_through(bench.problem, slots, 0), level), window)


def around(bench: Bench, staying: Sequence[Block], home: Home, slots: int, level: Level) -> Draft:
    """``staying`` at ``home``; all other blocks stream through ``slots`` slots of the repeated size and one for what is
    larger (``slots`` 0: the least that is enough), with no window for gradients."""
    draft = all_streamed(bench.model, Streaming(), level)
    for block in staying:
        draft = draft.placed(block.name, DEDICATED if block.held and home == HOSTED else home)
    choices = slot_options(bench.streamed(draft), max(1, slots))
    return replace(draft, streaming=streaming_through(bench.problem, choices[0 if slots else -1], 0))


def wide(bench: Bench, draft: Draft, window: int) -> Draft:
    """``draft`` with a window of ``window`` bytes for gradients, or of what there is room for, if that is less."""

    def through(nbytes: int) -> Draft:
        return replace(draft, streaming=replace(draft.streaming, gradient_window=max(0, nbytes)))

    if bench.fits_device(through(window)):
        return through(window)
    # A byte of window takes at most a byte of the device: what is left without a window may all be window. But for
    # gradients in roots that are larger: what is beside them there counts as soon as there is any window.
    limit = bench.problem.limit(Tier.DEVICE)
    narrower = min(window, limit - bench.device(through(0)))
    narrower -= max(0, bench.device(through(narrower)) - limit)
    return through(narrower if bench.fits_device(through(narrower)) else 0)


def least_device(bench: Bench, among: Sequence[Level]) -> Draft:
    """The draft that needs the least of the device, with one of the levels ``among``."""
    return min((draft for level in among for draft in _narrowest(bench, level)), key=bench.device)


def anything_fits(bench: Bench, among: Sequence[Level]) -> bool:
    """Whether the device has room for ``least_device``. The levels that are likely to fit are to come first: what the
    others need is worked out only if none of those does."""
    return any(bench.fits_device(draft) for level in among for draft in _narrowest(bench, level))


def _narrowest(bench: Bench, level: Level) -> tuple[Draft, Draft]:
    """With all blocks streaming, and with all on the device."""
    streaming = streaming_through(bench.problem, options(bench)[-1], 0)
    return all_streamed(bench.model, streaming, level), all_resident(bench.model, level)


def fewest_recomputed(bench: Bench, make: Callable[[Level], Draft], levels: Sequence[Level]) -> Level | None:
    """The fewest blocks, between the least and the most of ``levels`` and from the first block on, whose recomputation
    as a whole makes the draft fit that ``make`` makes; where all of ``levels`` name single ops, the first of them that
    does. None if none does."""
    able = bench.recomputable
    counts = [len(level.recompute) for level in levels if not level.activations]
    if not counts:
        return next((level for level in levels if bench.fits_device(make(level))), None)
    low, high = min(counts), max(counts)

    def fits(count: int) -> bool:
        return bench.fits_device(make(Level(able[:count])))

    if fits(low):
        return Level(able[:low])
    if not fits(high):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return Level(able[:low])


@dataclass(frozen=True)
class Filling:
    """How room on the device is given to blocks: at most ``most`` become resident, from the last one backwards if
    ``last_first``; what is left goes to slots of their own if ``dedicate``."""

    most: int | None = None
    last_first: bool = False
    dedicate: bool = True


SHARED = Filling(dedicate=False)
"""Slots are shared, and none is a block's own."""


def filled(bench: Bench, draft: Draft, how: Filling, limit: int | None = None) -> Draft:
    """``draft`` with blocks made resident, then dedicated, as long as there is room in ``limit`` bytes of the device
    (None: in the budget)."""
    limit = bench.problem.limit(Tier.DEVICE) if limit is None else limit
    best = draft
    for _ in range(ROUNDS):
        # From the first draft each time: what the last round has left beside the arenas is room for whoever comes first
        # in order, and not for what there was room for before.
        room = limit - bench.beside(best)
        more = _fill_twice(bench, draft, room, how)
        # The arenas were sized with the old draft's activations beside them; the new one's may be a little more.
        while more != draft and bench.device(more) > limit:
            room -= max(1, 2 * (bench.device(more) - limit))
            more = _fill_twice(bench, draft, room, how)
        if more == best or _given(bench, more) < _given(bench, best):
            break
        best = more
        if bench.problem.trace is None:
            break  # nothing beside the arenas changed
    return best


def with_needed_slots(bench: Bench, draft: Draft) -> Draft:
    """``draft`` with the slots that what streams still needs (``fewer_slots``)."""
    own = sum(p.parameters is Tier.DEVICE and not p.resident for p in draft.placements)
    return replace(draft, streaming=fewer_slots(draft.streaming, bench.streamed(draft), own))


def _fill_twice(bench: Bench, draft: Draft, room: int, how: Filling) -> Draft:
    """``_fill``, and once more: a block that the last ones share no slot with any more may have its own for nothing."""
    return _fill(bench, _fill(bench, draft, room, how), room, how)


def _given(bench: Bench, draft: Draft) -> tuple[int, int]:
    """Bytes of the device that blocks of ``draft`` have, those that stay first."""
    sizes = bench.arenas(draft)
    return sizes.device_resident, sizes.device


def _fill(bench: Bench, draft: Draft, room: int, how: Filling) -> Draft:
    """One round: arenas may take ``room`` bytes of the device."""
    blocks = bench.model.blocks
    sizer = bench.sizer(draft.streaming.update_chunk)
    homes = {p.block: (p.parameters, p.gradients, p.states) for p in draft.placements}
    streaming = draft.streaming
    taken = bench.arenas(draft).device
    kept = len(draft.resident)
    hosted: Sequence[int] = sorted(b.nbytes for b in blocks if homes[b.name] == HOSTED)
    # Blocks that can be fetched ahead into slots of their own.
    ahead = sum(homes[b.name] == DEDICATED and not b.held for b in blocks)
    for home in (RESIDENT, DEDICATED) if how.dedicate else (RESIDENT,):
        for block in keep_order(bench.model, draft.streaming.slots, last_first=how.last_first):
            old = homes[block.name]
            if old == RESIDENT or home == old or (home == RESIDENT and kept == how.most):
                continue
            streamed = _without(hosted, block.nbytes) if old == HOSTED else hosted
            own = ahead if block.held else ahead + (home == DEDICATED) - (old == DEDICATED)
            slots = slots_for(streaming, len(streamed), max(streamed[-1:], default=0), own)
            # What ``arenas`` counts for a block that stays: the sum that follows every change is its own.
            more = block.nbytes if old == HOSTED else 0
            if home == RESIDENT:
                more += bench.kept_gradients(block) + sizer.state_nbytes(block.name)
            more += sum(slots.slots) - sum(streaming.slots)
            if taken + more <= room:
                homes[block.name], hosted, ahead = home, streamed, own
                streaming, taken = slots, taken + more
                kept += home == RESIDENT
    return replace(draft, placements=tuple(Placement(b.name, *homes[b.name]) for b in blocks), streaming=streaming)


def _without(sizes: Sequence[int], size: int) -> Sequence[int]:
    """``sizes``, sorted, with one ``size`` less."""
    place = bisect_left(sizes, size)
    return [*sizes[:place], *sizes[place + 1 :]]
