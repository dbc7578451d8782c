"""Which blocks that are at home elsewhere are updated on the device, because the next forward waits for them first.

The host updates the blocks of a step one after the other, in the order of the next forward. Where that takes longer
than what the device does meanwhile, forward waits for it, while the link brings little and takes nothing. An update on
the device is for that time: of the first blocks, states and gradients go there and states and parameters come back,
and the host is done with the others so much earlier. With every further block the fetches of those behind wait longer
for the link: so it is the first few, and the simulation says how many. (Simulated, Llama 3.2 3B in bf16 on an RTX 4090,
1,024 tokens: 1.41 s a step where the host updates all of 20 blocks that do not stay, 1.18 s where the device updates
the first 7.) It costs a window on the device, and with it room for blocks that stay there.

What is simulated is what may gain: of the program of a draft without them it is asked first how long its step is if
the host has those updates off its hands and the link brings what they read (``at_best``).

Ren et al., "ZeRO-Offload" (USENIX ATC 2021), update on the host because the link is slow; Lian et al., "SuperOffload"
(ASPLOS 2026), leave the last buckets to the device, whose states stay there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import ceil

from forebay.arenas import UPDATE_CELLS, Sizer
from forebay.layout import needs_master
from forebay.memory import Tier
from forebay.model import Block
from forebay.planners.bench import Bench
from forebay.planners.homes import at_home_anew, on_host
from forebay.planners.parts import KEPT, Draft, Level
from forebay.planners.shapes import SHARED, Filling, filled, options, streamed_through, usual_window
from forebay.planners.speculation import FEW_RUNGS, GAIN, MORE_GAIN, ahead, alike, fits, usually
from forebay.plans import Update
from forebay.program import Outline, Verb
from forebay.simulation import pace, settled_seconds
from forebay.states import Masters, Reach, is_fp32, reach_of
from forebay.timeline import Lane
from forebay.trace import Phase

__all__ = ["at_best", "at_home_again", "candidates", "fastest_there", "placed_there", "there"]

FINALISTS = 2
"""Drafts with room for a window for which the number of blocks is looked for."""

NEAR = 0.02
"""A draft is looked at more closely where a first look has it behind the best by less than this share."""

LARGE = 3
"""Where states are factored: a block whose cell is more than so many times that of most stays with the host."""

PARTS = 4
"""Of all blocks that could be updated on the device, one part in so many more is tried at a time."""

PROBES = (1.0, 0.5, 0.25)
"""Of all blocks that could be, the shares with which it is asked what a draft may gain at best."""

LONG_PROBES = (1 / PARTS, 1 / PARTS / 2)
"""The same for long steps (``Bench.is_long``): with these it is seen whether there is anything in it."""


def there(bench: Bench, draft: Draft) -> Draft:
    """``draft`` with the updates on the device that make it faster; without a trace, as it is."""
    able = candidates(bench, draft)
    enough = bench.seconds(draft) * (1 - GAIN) if able else 0.0
    # What a step takes at least if no update on the host holds it up.
    if not able or bench.best_rates.step(draft.updating(Update.DEVICE, able)) > enough:
        return draft
    # Where nothing is fetched ahead, compute would wait for all that updates bring: another base may gain.
    if bench.is_long and draft.streaming.prefetch_distance and _least(bench, draft) > enough:
        return draft
    best, bases = draft, {base: _least(bench, base) for base in _bases(bench, draft, _window(bench, draft, able))}
    # Of those whose steps are the same with and without, one will do.
    unlike = {(bench.seconds(base), least): base for base, least in reversed(bases.items())}
    tried: list[Draft] = []
    for base in sorted(unlike.values(), key=lambda base: bases[base])[:FINALISTS]:
        worth = bases[base] < min(enough, bench.seconds(best))
        if worth and not any(alike(bench, base, one, _least) for one in tried):
            best = min(best, _fastest_count(bench, base), key=bench.seconds)
            tried.append(base)
    return best if bench.seconds(best) < enough else draft


def fastest_there(bench: Bench, drafts: Sequence[Draft], may_take: Callable[[Draft], bool]) -> Draft:
    """The first of ``drafts``, or one of them with updates on the device (``there``) that is faster than that and that
    ``may_take`` accepts."""
    best = drafts[0]
    for draft in dict.fromkeys(drafts[:1] if bench.is_long else drafts):
        more = there(bench, draft)
        if more != draft:  # what is left to the host may run ahead of its step
            few = ahead(bench, more, rungs=FEW_RUNGS)
            more = ahead(bench, more) if bench.seconds(few) < bench.seconds(best) * (1 + NEAR) else few
        if more != draft and bench.seconds(more) < bench.seconds(best) * (1 - MORE_GAIN) and may_take(more):
            best = more
    return best


def candidates(bench: Bench, draft: Draft) -> tuple[str, ...]:
    """The blocks of ``draft`` that could be updated on the device, in the order of the forward: none where the device's
    memory is the host's, or where states in fewer bits than fp32 would need room beside the window."""
    trace, machine = bench.problem.trace, bench.problem.machine
    if trace is None or machine is None or bench.liveness is None or "cpu" in (trace.device, machine.device_kind):
        return ()
    if not is_fp32(bench.problem.state_names):
        return ()
    index = bench.liveness.index
    trained = {index.blocks[done.parameter] for visit in index.completed for done in visit}
    others = (Update.BACKWARD, Update.STORAGE)
    placements = bench.in_backward(draft).placements
    able = trained & {p.block for p in placements if not p.resident and p.update not in others}
    used = dict.fromkeys(visit.block for visit in trace.visits if visit.phase is Phase.FORWARD)
    found = tuple(name for name in dict.fromkeys((*used, *sorted(able))) if name in able)
    reach = reach_of(bench.problem.state_names)
    if reach is Reach.MATRICES:
        # Updates are not alike there, so that the order of the forward is not the order of their worth: of no worth are
        # those at which the host is no longer than what they touch is on the link, half of it each way.
        both_ways = machine.h2d.curve.best + machine.d2h.curve.best
        found = tuple(name for name in found if bench.costs.update_seconds(name, 1) > 1 / both_ways)
    return _of_like_cells(bench, draft, found) if reach.takes_wholes else found


def _of_like_cells(bench: Bench, draft: Draft, names: Sequence[str]) -> tuple[str, ...]:
    """Those of ``names`` whose cells are not much larger than most. All cells are as large as the largest, and where
    states are factored that of an embedding is all of it."""
    sizer = bench.sizer(draft.streaming.update_chunk)
    cells = {name: sizer.update_window((name,), 1) for name in names}
    usual = sorted(cells.values())[len(cells) // 2] if cells else 0
    return tuple(name for name in names if cells[name] <= LARGE * usual)


def at_home_again(draft: Draft) -> Draft:
    """``draft`` with no update on the device."""
    none = draft.updating(Update.DEVICE, ())
    return replace(none, streaming=replace(draft.streaming, update_window=0))


def _fastest_count(bench: Bench, base: Draft) -> Draft:
    """The fastest of ``base`` and of those with the first blocks updated on the device: more of them as long as the
    step gains, then as many as lie between the best and its neighbours."""
    able = candidates(bench, base)
    tried = {0: base}

    def attempt(count: int) -> int:
        """Returns the best count so far."""
        least = min(map(bench.seconds, tried.values()))
        if count not in tried and at_best(bench, base, able[:count]) < least:
            more = placed_there(bench, base, able[:count])
            if more is not None:
                tried[count] = more
        return min(tried, key=lambda known: (bench.seconds(tried[known]), known))

    best = 0
    for part in range(1, 1 + PARTS):
        count = ceil(part * len(able) / PARTS)
        best = attempt(count)
        if best < count:
            break  # the link has too much to do: the more, the worse
    if best == 0:
        best = attempt(ceil(len(able) / PARTS / 2))
    elif not bench.is_long:
        below = max(count for count in tried if count < best)
        above = min((count for count in tried if count > best), default=best)
        attempt((best + above) // 2)
        best = attempt((below + best) // 2)
    return tried[best]


def placed_there(bench: Bench, draft: Draft, names: Sequence[str]) -> Draft | None:
    """``draft`` with ``names`` updated on the device, through the widest window that there is room for; None if there
    is no room for one chunk of them."""
    moved = draft.updating(Update.DEVICE, names)
    for cells in range(UPDATE_CELLS, 0, -1):
        streaming = replace(draft.streaming, update_window=_window(bench, draft, names, cells))
        more = replace(moved, streaming=streaming)
        if fits(bench, more):
            return more
    return None


def _window(bench: Bench, draft: Draft, names: Sequence[str], cells: int = UPDATE_CELLS) -> int:
    return bench.sizer(draft.streaming.update_chunk).update_window(names, cells)


def at_best(bench: Bench, base: Draft, names: Sequence[str]) -> float:
    """What a step of ``base`` takes at least with the updates of ``names`` on the device: they take the host no time,
    and the link as long as it takes to bring what they read, in front of the next fetch of their block. That they store
    again what they have made, and that fetches wait for this, is left out."""
    known, key = bench.known.relieved, (base, tuple(names))
    if key not in known:
        known[key] = _relieved(bench, base, names)
    return known[key]


def _relieved(bench: Bench, base: Draft, names: Sequence[str]) -> float:
    """``at_best``, worked out."""
    chosen = frozenset(names)
    program, score = bench.sketched(base)
    sizer = bench.sizer(base.streaming.update_chunk)
    loads = {b.name: _loaded(sizer, b, bench.problem.masters) for b in bench.model.blocks if b.name in chosen}
    due: dict[str, Outline] = {}  # updates that nobody has asked for yet
    loaded: dict[int, Outline] = {}
    updates = list[int]()
    for index, action in enumerate(program.actions):
        if action.verb is Verb.FETCH and action.block in due:
            update = due.pop(action.block)
            loaded[index] = update._replace(lane=Lane.H2D, verb=Verb.LOAD, nbytes=loads[action.block])
        elif action.verb is Verb.UPDATE and action.block in chosen:
            due.setdefault(action.block, action)
            updates.append(index)  # it holds up no other on its lane
    return settled_seconds(pace(score.instead(updates, loaded, bench.costs)), program)


def _loaded(sizer: Sizer, block: Block, masters: Masters) -> int:
    """Bytes that come to the device for one update of ``block``: its states, its gradients, and those of its parameters
    that have no whole master."""
    read = (p for p in block.parameters if p.trainable and (masters is Masters.LOWER or not needs_master(p)))
    return sizer.state_nbytes(block.name) + block.gradient_nbytes + sum(p.nbytes for p in read)


def _least(bench: Bench, base: Draft) -> float:
    """The least of ``at_best`` for some of the counts that would be tried."""
    able = candidates(bench, base)
    counts = {ceil(len(able) * part) for part in (LONG_PROBES if bench.is_long else PROBES)}
    bench.seconds(base)  # its program is at hand then
    return min(at_best(bench, base, able[:count]) for count in sorted(counts))


def _bases(bench: Bench, draft: Draft, window: int) -> list[Draft]:
    """Drafts that leave ``window`` bytes of the device: ``draft``, if it does, and those that are filled as far as
    that; where there are none of these, ``draft`` itself, through a narrower window. Of a long model one only, and one
    that fetches ahead."""
    limit = bench.problem.limit(Tier.DEVICE) - window
    is_base = bench.device(draft) <= limit and (not bench.is_long or draft.streaming.prefetch_distance > 0)
    found = [draft] if is_base else []
    level, slots = on_host(bench, draft).level, options(bench)

    def through(slots: tuple[int, ...], how: Filling, level: Level = level) -> Draft:
        return filled(bench, streamed_through(bench, slots, usual_window(bench), level), how, limit)

    if not found or not bench.is_long:
        found.append(through(slots[0], Filling()))
    if not bench.is_long:
        found += [through(slots[-1], Filling()), through(slots[0], SHARED)]
        # With updates out of the way fewer blocks need to stay, which leaves room for activations.
        found.append(through(slots[0], SHARED, KEPT))
    tried = (at_home_anew(bench, base) for base in dict.fromkeys(found) if bench.device(base) <= limit)
    return [usually(bench, base) for base in tried if base is not None] or [draft]
