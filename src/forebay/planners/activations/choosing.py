"""From the programme to drafts that fit: the chain proposes, the bench judges."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice, product
from typing import TypeAlias

from forebay.lowering.liveness import Liveness
from forebay.memory import Tier
from forebay.planners.activations.chain import ANYTHING, Chain, Scope, Shares
from forebay.planners.activations.menu import MOVE, Option
from forebay.planners.activations.rounding import diffused, sorted_out
from forebay.planners.bench import Bench
from forebay.planners.parts import (
    DEDICATED,
    HOSTED,
    KEPT,
    RESIDENT,
    Draft,
    Level,
    all_resident,
    selected,
    streaming_through,
)
from forebay.planners.shapes import Filling, filled, options, streamed_through, usual_window, with_needed_slots
from forebay.planners.speculation import usually
from forebay.plans import Placement
from forebay.treatments import Fate, Treatment

__all__ = [
    "all_moved",
    "drafted",
    "early",
    "leanest",
    "level_of",
    "narrow",
    "rounded",
    "seeds",
    "spread",
    "staying",
    "still",
]

TRIES = 8
"""How often the room that the programme is given is corrected by what the bench says of its answer."""

CLOSE = 0.01
"""A draft that leaves at most this share of the device unused is not corrected any further."""

RUNGS = 4
"""Budgets of the ladder in every doubling."""

MOST_RUNGS = 3
"""Rungs of the ladder that are tried at most ..."""

RUNG_VISITS = 160
"""... and of a long trace so many as its visits go into this, but one in any case."""

LEAN_RUNG = 2
"""The rung of the ladder, from 0, whose choices of activations are tried with all of the device too."""

WIDER = (4, 2)
"""Times the usual window that is taken where there is room for it."""

NONE = 1e-6
"""Blocks: a share of at most so much is none, but for rounding in the solver."""

WINDOW = 2
"""Of the largest tensor that moves, so many fit into a window: one leaves while the next one is made."""

Ranks: TypeAlias = tuple[tuple[Tier, Tier, Tier], ...]
"""Homes, in the order in which blocks that are alike take them."""

STAYING_LAST: Ranks = (HOSTED, DEDICATED, RESIDENT)
"""What streams is fetched first, and later while what stays runs."""

STAYING_FIRST: Ranks = STAYING_LAST[::-1]
"""The next forward begins with blocks that wait for no update on the host."""


def seeds(bench: Bench) -> Iterator[Draft]:
    """Drafts near the optimum of the programme, through the most slots and through the fewest, with the choices of
    blocks that are alike in every order. Then those for smaller budgets of device and host, on a ladder that is the
    same whatever the budget: what fits into less fits, and for whole tensors every budget is another knapsack, which
    may be a worse one. Where a simulation takes so long that there is time for a few only (``Bench.is_costly``), one of
    each comes first: all of one budget are near to each other. Of a long step one of ``still`` comes second, and the
    programme has updates under backward, as the drafts are compared.
    """
    limit = bench.problem.limit(Tier.DEVICE)
    through = dict.fromkeys((options(bench)[0], options(bench)[-1]))
    ways = list(product(through, (_alike, early, spread)))
    scope = Scope(disk=not _without_a_disk(bench, limit), ahead=_may_run_ahead(bench))
    for place, draft in enumerate(_seeds(bench, limit, ways, scope)):
        yield draft
        if not place and bench.is_long:
            yield from islice(still(bench), 1)
        if not place and bench.is_costly and not bench.is_long:
            yield from _lean(bench, limit, scope)
            yield from _ladder(bench, limit, scope)
    if not bench.is_long:
        yield from _lean(bench, limit, scope)
    for rung in _rungs(limit)[: _rungs_tried(bench)]:
        yield from _seeds(bench, rung, list(product(options(bench)[:1], (early, _alike))), scope)
    lower = _rungs(bench.problem.limit(Tier.HOST))[: MOST_RUNGS - 1]
    for rung in lower if _rungs_tried(bench) == MOST_RUNGS else ():
        within = replace(scope, host=rung)
        yield from _seeds(bench, limit, list(product(options(bench)[:1], (early, _alike))), within)
    if not scope.disk and bench.problem.limit(Tier.DISK):
        yield from _seeds(bench, limit, ways[:1], ANYTHING)


def still(bench: Bench) -> Iterator[Draft]:
    """Drafts near the optimum of the programme in which nothing leaves the device, and in which no activation does. The
    programme takes no notice of what waits for a link, and so has more on it than it can hide; and programs of such
    drafts are short."""
    limit, slots = bench.problem.limit(Tier.DEVICE), options(bench)
    yield from _seeds(bench, limit, list(product(slots[:1], (early, _alike, spread))), Scope(host=0, disk=False))
    through = dict.fromkeys((slots[0], slots[-1]))
    scope = Scope(disk=not _without_a_disk(bench, limit), moves=False)
    yield from _seeds(bench, limit, list(product(through, (early, _alike))), scope)


def staying(bench: Bench) -> Iterator[Draft]:
    """Drafts in which parameters, gradients and states all stay and activations make the room: all that is saved moves,
    or what the programme says for less of the device, on the ladder. To the programme what streams beside compute is
    done for nothing, so that of its own accord it has activations stay and blocks stream."""
    tried = set[Level]()
    for level in _leaner(bench):
        draft = all_resident(bench.model, level)
        if level not in tried and bench.fits_device(draft):
            yield draft
        tried.add(level)


def _leaner(bench: Bench) -> Iterator[Level]:
    yield all_moved(bench)
    if bench.chain is None:
        return
    limit, slots = bench.problem.limit(Tier.DEVICE), options(bench)[0]
    scope = Scope(disk=not _without_a_disk(bench, limit))
    for rung, order in product(_rungs(limit), (_alike, early)):
        draft = _repaired(bench, bench.chain, slots, order, rung, scope)
        if draft is not None:
            yield draft.level


def _may_run_ahead(bench: Bench) -> bool:
    """Whether updates run under backward in the drafts that are compared (``usually``), where all blocks stream."""
    streamed = streamed_through(bench, options(bench)[-1], 0, Level(bench.recomputable))
    return usually(bench, streamed) != streamed


def _ladder(bench: Bench, limit: int, scope: Scope) -> Iterator[Draft]:
    """One draft for each rung of the ladder."""
    for rung in _rungs(limit):
        yield from islice(_seeds(bench, rung, [(options(bench)[0], _alike)], scope), 1)


def _without_a_disk(bench: Bench, limit: int) -> bool:
    """Whether nothing has to go to a disk. To the programme what the links of the disk can do beside everything else is
    done for nothing: what need not go there is better asked for without."""
    slots = sum(options(bench)[-1])
    return bench.chain is not None and bench.chain.shares(limit, slots, Scope(disk=False)) is not None


def _lean(bench: Bench, limit: int, scope: Scope) -> Iterator[Draft]:
    """A draft near the optimum for a smaller device, and the rest of ``limit`` bytes for larger windows and blocks that
    stay. Where compute binds, the programme takes no notice of what waits for links and updates: less to wait for is
    worth more there than activations that stay."""
    chain, lower = bench.chain, _rungs(limit)[LEAN_RUNG:]
    if chain is None or not lower:
        return
    draft = _repaired(bench, chain, options(bench)[0], _alike, lower[0], scope)
    if draft is not None:
        yield filled(bench, _widened(bench, draft, limit), Filling(), limit)


def _seeds(bench: Bench, limit: int, ways: Sequence[tuple[tuple[int, ...], Order]], scope: Scope) -> Iterator[Draft]:
    """Drafts near the optimum with ``limit`` bytes of the device, and ``scope`` of the rest, for each of ``ways``:
    slots, and an order."""
    chain, found = bench.chain, set[Draft]()
    for place, (slots, order) in enumerate(ways):
        for ranks in _both_ends(bench, place):
            draft = None if chain is None else _repaired(bench, chain, slots, order, limit, scope, ranks)
            if draft is None:
                continue
            for full in _completed(bench, draft, limit):
                if full not in found:
                    found.add(full)
                    yield full


def _both_ends(bench: Bench, place: int) -> Sequence[Ranks]:
    """Which of the blocks that are alike stay in draft number ``place`` of a few: the last ones, and in the first draft
    the first ones, too. In a long step the first ones alone: there what waits is mostly updates on the host, and the
    next forward begins with blocks that do not wait for theirs."""
    if bench.is_long:
        return (STAYING_FIRST,)
    return (STAYING_LAST,) if place else (STAYING_LAST, STAYING_FIRST)


def _completed(bench: Bench, draft: Draft, limit: int) -> Iterator[Draft]:
    """``draft`` with what is left of ``limit`` bytes used: for larger windows first, then for blocks that stay."""
    yield filled(bench, _widened(bench, draft, limit), Filling(), limit)
    if _rungs_tried(bench) < MOST_RUNGS:
        return
    # The other way round, too. And an update on the device takes time of compute: no more blocks need stay.
    for how in (Filling(), Filling(most=len(draft.resident))):
        yield _widened(bench, filled(bench, draft, how, limit), limit)


def _widened(bench: Bench, draft: Draft, limit: int) -> Draft:
    """``draft`` with larger windows for activations under way, as far as there is room: less waits for them."""
    how = draft.streaming
    for factor in WIDER:
        window = factor * how.offload_window
        wide = replace(draft, streaming=replace(how, offload_window=window, reload_window=window))
        if window and bench.device(wide) <= limit:
            return wide
    return draft


def _rungs_tried(bench: Bench) -> int:
    """How many rungs of the ladder there is time for."""
    visits = 0 if bench.problem.trace is None else len(bench.problem.trace.visits)
    return max(1, min(MOST_RUNGS, RUNG_VISITS // max(1, visits)))


def _rungs(limit: int) -> list[int]:
    """The budgets of the ladder below ``limit`` bytes, the largest first."""
    highest = math.ceil(RUNGS * math.log2(limit)) - 1
    return [int(2 ** (rung / RUNGS)) for rung in range(highest, max(0, highest - RUNGS), -1)]


def leanest(bench: Bench) -> list[Level]:
    """The levels that hold the least: with everything moved that can be, and without."""
    chain = bench.chain
    if chain is None or bench.liveness is None:
        return []
    found = []
    for moves in (False, True):
        chosen = []
        for group in chain.groups:
            able = [o for o in group.options if moves or not o.moved]
            chosen.append([min(able, key=lambda o: (o.held + o.workspace, o.held))] * len(group.blocks))
        found.append(level_of(bench.liveness, chain, chosen))
    return list(dict.fromkeys(found))


def all_moved(bench: Bench) -> Level:
    """Nothing recomputes, and whatever is saved and can move goes to the host."""
    chain = bench.chain
    if chain is None or bench.liveness is None:
        return KEPT
    chosen = [[group.whole(MOVE)] * len(group.blocks) for group in chain.groups]
    return level_of(bench.liveness, chain, chosen)


def narrow(level: Level) -> Level:
    """``level`` with no window: one tensor after the other leaves and comes back, with the least on the device."""
    return replace(level, window=0)


def drafted(bench: Bench, levels: Sequence[Level]) -> Iterator[Draft]:
    """Everything streams at each of ``levels``, with no window where there is no room for one, and what there is room
    for stays."""
    for level in levels:
        for one, slots in product(dict.fromkeys((level, narrow(level))), options(bench)):
            draft = streamed_through(bench, slots, usual_window(bench), one)
            if bench.fits_device(draft):
                yield filled(bench, draft, Filling())
                break


def level_of(liveness: Liveness, chain: Chain, chosen: Sequence[Sequence[Option]]) -> Level:
    """What a plan says where the blocks of each group of ``chain`` have the options ``chosen``, one for each block.

    Where those that compute copy, nothing is gained by a window: what comes back ahead of its time takes as long as on
    demand, has bytes of the device meanwhile, and is in no cache any more when it is read.
    """
    groups = chain.groups
    option_of = {
        b: o for g, options in zip(groups, chosen, strict=True) for b, o in zip(g.blocks, options, strict=True)
    }
    treatments = {block: dict(_by_name(option.treatments)) for block, option in option_of.items()}
    for group in groups:
        for block, source in zip(group.blocks, group.inputs, strict=True):
            # What comes in moves if the block that makes it recomputes: else nothing may move that nobody saved.
            if option_of[block].input_moves and source is not None and option_of[source[0]].recompute:
                maker, op, occurrence = source
                treatments[maker][op, occurrence] = Treatment(op, occurrence, Fate.OFFLOAD)
    selections = selected(liveness.trace, {block: list(named.values()) for block, named in treatments.items()})
    order = dict.fromkeys(visit.block for visit in liveness.trace.visits if visit.block in option_of)
    recompute = tuple(block for block in order if option_of[block].recompute)
    leaving = (move.in_transit for move in liveness.profile(recompute, selections).moves if move.leaves)
    largest = 0 if chain.copies_between_ops else max(leaving, default=0)
    moved = liveness.host_activations(recompute, selections)
    return Level(recompute, selections, window=WINDOW * largest, moved=moved)


def _by_name(treatments: Sequence[Treatment]) -> Iterator[tuple[tuple[str, int], Treatment]]:
    return (((t.op, t.occurrence), t) for t in treatments)


Order = Callable[[Sequence[float], int, Sequence[Option]], list[int]]


def early(shares: Sequence[float], count: int, options: Sequence[Option]) -> list[int]:
    """What holds the least comes first."""
    return sorted_out(shares, count, [option.held for option in options])


def spread(shares: Sequence[float], count: int, options: Sequence[Option]) -> list[int]:
    """The choices alternate."""
    return diffused(shares, count)


def _alike(shares: Sequence[float], count: int, options: Sequence[Option]) -> list[int]:
    """All take what holds the least of the choices that any takes: there are few such drafts, so that many budgets have
    the same, and no block is the one that others wait for."""
    taken = [choice for choice, share in enumerate(shares) if share > NONE]
    return [min(taken, key=lambda choice: options[choice].held)] * count


def _repaired(
    bench: Bench,
    chain: Chain,
    slots: tuple[int, ...],
    order: Order,
    limit: int,
    scope: Scope,
    ranks: Ranks = STAYING_LAST,
) -> Draft | None:
    """The whole blocks nearest to the optimum that fit into ``limit`` bytes of the device, by the bench's account, and
    on the host if nothing may go to a disk; None if that does not come about in a few tries."""
    room, best, over, short, step = limit, None, limit, 0, 0
    for _ in range(TRIES):
        found = chain.shares(room, sum(slots), scope)
        if found is None:
            if not step:
                break
            room = (room + over) // 2  # the last step was too long
            continue
        draft = rounded(bench, chain, found, slots, order, ranks)
        spare = limit - bench.device(draft)
        lacking = 0 if scope.disk else bench.arenas(draft).host - bench.problem.limit(Tier.HOST)
        if spare >= 0 and lacking > 0:
            # What passes through the host has buffers there, which the programme knows nothing of.
            host = chain.limits[Tier.HOST] if scope.host is None else scope.host
            scope = replace(scope, host=host - lacking)
        elif spare >= 0:
            best = draft
            if step or spare <= CLOSE * limit or order is _alike:
                break  # of blocks that are all alike, others take far more
            room += spare
        elif best is not None:
            break  # the room that was left is less than a whole tensor
        else:
            # Whole tensors come in steps: what is too much by a little stays so until the room shrinks by as much.
            step = 2 * step if -spare == short else -spare
            over, short = room, -spare
            room -= step
    return best


def rounded(
    bench: Bench, chain: Chain, shares: Shares, slots: tuple[int, ...], order: Order, ranks: Ranks = STAYING_LAST
) -> Draft:
    """The draft that ``shares`` stand for, through ``slots``; ``order`` says which of the blocks that are alike take
    which choice, ``ranks`` which home those take that come first. Whether it fits is for the caller to ask."""
    live = bench.liveness
    chosen: list[list[Option]] = []
    homes: dict[str, tuple[Tier, Tier, Tier]] = {}
    for group, options_, places in zip(chain.groups, shares.options, shares.homes, strict=True):
        count = len(group.blocks)
        chosen.append([group.options[i] for i in order(options_, count, group.options)])
        ranked = [ranks.index(_on_host(home.tiers)) for home in group.homes]
        for block, place in zip(group.blocks, sorted_out(places, count, ranked), strict=True):
            homes[block] = _on_host(group.homes[place].tiers)
    level = KEPT if live is None else level_of(live, chain, chosen)
    placements = tuple(Placement(b.name, *homes[b.name]) for b in bench.model.blocks)
    streaming = level.through(streaming_through(bench.problem, slots, usual_window(bench)))
    return with_needed_slots(bench, Draft(placements, streaming, level.recompute, level.activations))


def _on_host(tiers: tuple[Tier, Tier, Tier]) -> tuple[Tier, Tier, Tier]:
    """The home without a disk: what goes there is decided for the draft as a whole."""
    return HOSTED if tiers[0] is Tier.DISK else (tiers[0], tiers[1], Tier.HOST if tiers[2] is Tier.DISK else tiers[2])
