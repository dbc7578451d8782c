"""The search of ``auto``: a few shapes are drafted, the promising ones simulated, the fastest taken.

How much of the model recomputes decides the room for everything else, so it comes first; then slots, gradient window
and prefetch distance around the best; then, on small models, single blocks; at last fewer blocks stay, where the best
waits for nothing. Which updates run ahead of their step is sought later; drafts of long steps are compared with about
as many as will (``speculation.usually``). A draft is not simulated when one of its lanes alone takes longer than the
best so far. Everything here is counted, nothing is timed: the same problem gives the same plan. There is an answer from
the first draft on that fits, and the search is over when it has simulated so many drafts, or drafts of so many actions
(``bench``); what it does beside that grows with the blocks times the drafts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import inf
from typing import final

from forebay.errors import DoesNotFit
from forebay.memory import Tier
from forebay.planners.bench import Bench
from forebay.planners.homes import Tenant, at_home, on_host
from forebay.planners.moves import fewer_moves, one_move_less
from forebay.planners.parts import DEDICATED, HOSTED, KEPT, RESIDENT, Draft, Level, all_resident
from forebay.planners.shapes import (
    SHARED,
    Filling,
    fewest_recomputed,
    filled,
    options,
    streamed_through,
    usual_window,
    windows,
    with_needed_slots,
)
from forebay.planners.speculation import GAIN, judged, unhindered, usually

__all__ = ["PLAIN", "PLAIN_HERE", "TIE", "Search", "plain_share"]

TIE = 0.002
"""Drafts whose steps differ by less than this share are equally fast: the simpler one is taken."""

PLAIN = 0.01
"""Where everything fits on the device as it is, that is taken unless another plan is faster by more than this share: it
needs nothing of host and link. Predictions are off by more than that (6 % in the median), but less so when two plans on
one machine are compared; and no published policy is to be ahead of ``auto`` by more (``benchmarks/policies``)."""

PLAIN_HERE = 0.05
"""The same on a card that was measured, which is the one to train on. The thread that launches its kernels runs
forebay's hooks, too, wherever any block is at home elsewhere, and no rate counts those: a Llama of 1.1B on an H200 took
127 ms a step with 3 of 25 blocks elsewhere, of which 88 were foretold, and 109 with all of them there
(docs/log.md)."""

MOST_SLOTS = 4
"""Slots of the repeated size that are tried at most."""

WINDOWS = (0.5, 2.0)
"""Windows of activations under way that are tried, in parts of the usual one."""

SEEDED = 0.75
"""Share of the simulations that may go to seeds: what they do not think of has to be tried as well."""

SEEDED_FIRST = 0.25
"""The share that counts of what those of the lists before the last have taken."""

COMPUTING = 0.2
"""The share that is left to the last of the search, where the device's own work is all that takes time."""

USUAL = Filling()

FEWER_PARTS = 8
"""Of all blocks, one part in so many less stays at a time, though all could."""

FIRST_HALVING = 8
"""The search between levels begins with steps of one part in this many of the blocks."""


def plain_share(bench: Bench) -> float:
    """``PLAIN``, or ``PLAIN_HERE``."""
    machine = bench.problem.machine
    here = machine is not None and machine.device_kind == "cuda" and machine.source == "measured"
    return PLAIN_HERE if here else PLAIN


@final
class Search:
    """One search among drafts that recompute what one of ``levels`` names, or what lies between them, and around
    ``seeds``, one list of them after the other. Of a long step the last list is all that there is time for.

    ``best`` is what it has found; ``refusals`` are those of host and disk, each with the draft that it speaks of.
    """

    def __init__(self, bench: Bench, levels: Sequence[Level], seeds: Sequence[Iterable[Draft]] = ()) -> None:
        self.bench = bench
        self.best: Draft | None = None
        self.refusals: list[tuple[DoesNotFit, Draft]] = []
        self._levels = levels
        self._seeds = seeds
        self._seen: set[Draft] = set()
        self._settled: set[Draft] = set()
        self._began = bench.simulated, bench.actions
        self._fastest = inf

    def run(self, *, single_blocks: bool = True) -> Draft | None:
        """The fastest draft found, but for ``TIE`` and ``PLAIN``; None if the host or the disk has no room for any.
        ``single_blocks``: whether what is left of the simulations goes to moves of single blocks."""
        whole = fewest_recomputed(self.bench, lambda level: all_resident(self.bench.model, level), self._levels)
        plain = None if whole is None else all_resident(self.bench.model, whole)
        if plain is not None:
            self.consider(plain)
        if plain is None or whole != KEPT:
            self._explore(single_blocks)
            self._less_to_compute()
            return self.best
        # Everything fits as it is: in plain PyTorch too.
        share = 1 + plain_share(self.bench)
        if self.bench.seconds(plain) > self.bench.bound * share:
            self._fewer_stay()
            self._explore(single_blocks)
        return plain if self.bench.seconds(plain) <= self._fastest * share else self.best

    def _explore(self, single_blocks: bool) -> None:
        """Whatever is tried beside what fits as a whole."""
        self._plainest()
        for seeds in self._seeds[-1:] if self.bench.is_long else self._seeds:
            for seed in seeds:
                self.consider(seed)
                if self._over or (self.best is not None and self.bench.spent(*self._began, SEEDED)):
                    break  # drafting takes time too
            if not self.bench.is_long:
                # A draft of many moves may have more actions than seeds are allowed: what is over is not the others'.
                last = seeds is self._seeds[-1]
                self._began = self.bench.within(*self._began, SEEDED if last else SEEDED_FIRST)
        if self._over or (self.bench.is_long and self.best is not None and self.bench.spent(*self._began, SEEDED)):
            return  # what else there is to try would be drafted and not simulated; of long steps nothing is near enough
        levels = self._useful_levels()
        for level in levels:
            self._shapes(level)
        self._around_best()
        self._between_levels()
        for level in () if self.bench.is_long else levels:
            self._lean(level)
        self._less_on_host()
        if single_blocks and not self.bench.is_long:
            self._single_blocks()

    def consider(self, draft: Draft) -> None:
        """Finds homes for what does not stay on the device, simulates, keeps the better."""
        if self._over or draft in self._seen:
            return
        self._seen.add(draft)
        try:
            settled = at_home(self.bench, draft)
        except DoesNotFit as refusal:
            self.refusals.append((refusal.with_traceback(None), draft))  # its frames refer to this search
            return
        self._compare(settled)
        if settled.streaming.disk_activations or (draft.activations and self.bench.arenas(settled).disk):
            # Which of the two had better go to disk, states or activations, is a matter of speed.
            with suppress(DoesNotFit):
                self._compare(at_home(self.bench, draft, first=Tenant.ACTIVATIONS))

    def _compare(self, settled: Draft) -> None:
        """Simulates a draft that fits, unless it cannot be faster, and keeps the better."""
        if self._over or settled in self._settled:
            return
        self._settled.add(settled)
        if self.bench.best_rates.step(settled) > self._fastest * (1 + TIE):
            return
        seconds = judged(self.bench, settled)
        self._fastest = min(self._fastest, seconds)
        # Beside the fastest, not beside the best: or else one tie after the other would lead far away from it.
        tie = self._fastest * (1 + TIE)
        worse = self.best is None or judged(self.bench, self.best) > tie
        if worse or (self.best is not None and seconds <= tie and _cost(settled) < _cost(self.best)):
            self.best = settled

    @property
    def _over(self) -> bool:
        """Whether all simulations have been spent, or no plan can be faster by more than a tie. The bound is infinite
        where nothing fits: then what is tried says why."""
        done = self.best is not None and self._fastest <= self.bench.bound * (1 + TIE)
        return done or self.bench.spent(*self._began)

    def _useful_levels(self) -> list[Level]:
        """The levels that were asked for and those that are just enough, by how many blocks recompute."""
        levels = set(self._levels)
        choices = options(self.bench)
        for slots in {choices[0], choices[-1]}:
            make = partial(streamed_through, self.bench, slots, 0)
            enough = fewest_recomputed(self.bench, make, self._levels)
            if enough is not None:
                levels.add(enough)
        return sorted(levels, key=lambda level: len(level.recompute))

    def _fewer_stay(self) -> None:
        """Fewer and fewer blocks stay, though all could, as long as the step gains by it: an update on the device takes
        time of compute, one on the host runs beside it where links and host are fast. Nobody else thinks of that: to
        the programme every byte of the device is worth something."""
        blocks = len(self.bench.model.blocks)
        for part in range(FEWER_PARTS - 1, -1, -1):
            before, most = self._fastest, blocks * part // FEWER_PARTS
            self._through(options(self.bench)[0], usual_window(self.bench), KEPT, Filling(most=most))
            if self._fastest >= before:
                return

    def _plainest(self) -> None:
        """The shapes with the fewest blocks recomputed that fit. They cost little to simulate, and what the programme
        proposes has to be faster: its drafts may have so many moves that a few of them are all that there is time for.
        """
        for level in self._useful_levels():
            self._shapes(level)
            if self.best is not None:
                break
        if self.bench.is_long and self.best is not None and self.best.recompute != self.bench.recomputable:
            # A few simulations are all that there is time for, and those of drafts in which nothing moves are short.
            self._shapes(Level(self.bench.recomputable))

    def _shapes(self, level: Level) -> None:
        """The most slots that fit with ``level`` recomputed, and all the room that is left to blocks that stay. Fewer
        slots leave more room, and so less for the host: they are tried as long as nothing has fitted there."""
        for slots in options(self.bench):
            self._through(slots, usual_window(self.bench), level)
            if self.best is not None and self._fits(slots, level):
                return

    def _fits(self, slots: tuple[int, ...], level: Level) -> bool:
        return self.bench.fits_device(streamed_through(self.bench, slots, 0, level))

    def _through(self, slots: tuple[int, ...], window: int, level: Level, how: Filling = USUAL) -> None:
        if self._over:
            return  # drafting takes time too
        draft = streamed_through(self.bench, slots, window, level)
        if self.bench.fits_device(draft):
            self.consider(filled(self.bench, draft, how))

    def _less_to_compute(self) -> None:
        """Where the best waits for nothing it gains by nothing but less to compute: half as many blocks stay, whose
        updates are, as long as it gains by that. A few simulations are left for it, whatever the search has used up."""
        self._began = self.bench.within(*self._began, 1 - COMPUTING)
        before: Draft | None = None
        while self.best is not None and self.best is not before and self.best.resident:
            before, seconds = self.best, judged(self.bench, self.best)
            if (
                seconds > self.bench.best_rates.step(before) * (1 + TIE)
                or self.bench.best_rates.updating(before) < TIE * seconds
            ):
                return
            level, half = on_host(self.bench, before).level, Filling(most=len(before.resident) // 2)
            self._through(self._slots_of_best(), before.streaming.gradient_window, level, half)

    def _around_best(self) -> None:
        """Other slots, windows, distances and ways to fill the device at the recomputation of the best."""
        if self.best is None or (self.bench.is_long and self._waits_for_updates(self.best)):
            return
        level = on_host(self.bench, self.best).level
        for slots in options(self.bench, MOST_SLOTS):
            self._through(slots, usual_window(self.bench), level)
        kept = len(self.best.resident)
        # Where links and host are fast, updates on the device may be what takes time: fewer blocks stay.
        fewer = [Filling(most=most) for most in (3 * kept // 4, kept // 2, 0)]
        for how in (SHARED, Filling(last_first=True), *fewer):
            self._through(self._slots_of_best(), self.best.streaming.gradient_window, level, how)
        if self.best.streaming.slots:
            for window in windows(self.bench):
                self._through(self._slots_of_best(), window, level)
        for factor in WINDOWS if self.best.activations else ():
            base = on_host(self.bench, self.best)
            window = round(factor * base.streaming.offload_window)
            other = replace(base, streaming=replace(base.streaming, offload_window=window, reload_window=window))
            if self.bench.fits_device(other):
                self.consider(other)
        if self.bench.is_long:
            return  # of 24 long plans that were looked at none was faster for it (docs/log.md)
        for distance in range(1, 1 + min(MOST_SLOTS, len(self.best.placements) - len(self.best.resident))):
            base = on_host(self.bench, self.best)
            self.consider(replace(base, streaming=replace(base.streaming, prefetch_distance=distance)))

    def _waits_for_updates(self, draft: Draft) -> bool:
        """Whether it is updates that the next forward of ``draft`` waits for, which other slots do nothing about."""
        usual = usually(self.bench, draft)
        return unhindered(self.bench, usual) < self.bench.seconds(usual) * (1 - GAIN)

    def _lean(self, level: Level) -> None:
        """The fewest slots and the smallest window, so that the most blocks stay; then slots that are shared and none
        of a block's own, which hide as much with less room."""
        self._through(options(self.bench)[-1], 0, level)
        for slots in options(self.bench):
            self._through(slots, usual_window(self.bench), level, SHARED)

    def _slots_of_best(self) -> tuple[int, ...]:
        """The slots for everything, of as many as the best has."""
        count = 0 if self.best is None else len(self.best.streaming.slots)
        return min(options(self.bench, MOST_SLOTS), key=lambda slots: abs(len(slots) - count))

    def _between_levels(self) -> None:
        """Halves the steps between the best level and its neighbours."""
        able = self.bench.recomputable
        if self.best is None or len(self._levels) < 2 or self.best.activations:
            return
        step = max(1, len(able) // FIRST_HALVING)
        while step:
            count = len(self.best.recompute)
            for near in (count - step, count + step):
                if 0 <= near <= len(able):
                    self._through(self._slots_of_best(), self.best.streaming.gradient_window, Level(able[:near]))
            step //= 2

    def _less_on_host(self) -> None:
        """Where the host has had no room for any draft: of the one that asks the least of it, less moves, as far as the
        device has room. Where that is not enough it says what would be."""
        moving = [(r.needed, d) for r, d in self.refusals if r.tier == Tier.HOST.value and d.streaming.host_activations]
        if self.best is not None or not moving:
            return
        needed, base = min(moving, key=lambda refused: refused[0])
        missing = needed - self.bench.problem.limit(Tier.HOST)
        for draft in fewer_moves(self.bench, base, base.streaming.host_activations - missing):
            self.consider(draft)

    def _single_blocks(self) -> None:
        """Moves of single blocks, as long as they help and simulations are left."""
        improved = True
        while improved and self.best is not None:
            before = self.best
            for draft in self._moves(on_host(self.bench, before)):
                if self._over:
                    return
                if draft not in self._seen and self.bench.fits_device(draft):
                    self.consider(draft)
            improved = self.best is not before

    def _moves(self, base: Draft) -> Iterator[Draft]:
        """Drafts that differ from ``base`` in one block."""
        yield from one_move_less(self.bench, base)
        for block in self.bench.model.blocks:
            old = next(p for p in base.placements if p.block == block.name)
            for home in (RESIDENT, DEDICATED, HOSTED):
                if home == (old.parameters, old.gradients, old.states) or (block.held and home == HOSTED):
                    continue
                moved = self._with_a_window(base.placed(block.name, home))
                if home != HOSTED or max(base.streaming.slots, default=0) >= block.nbytes:
                    yield with_needed_slots(self.bench, moved)
        named = {block for selection in base.activations for block in selection.blocks}
        for name in self.bench.recomputable if len(self._levels) > 1 else ():
            if name not in named:
                chosen = set(base.recompute) ^ {name}
                yield replace(base, recompute=tuple(b for b in self.bench.recomputable if b in chosen))

    def _with_a_window(self, draft: Draft) -> Draft:
        """``draft`` with the usual window if it has none, but where all blocks stay, and there is room."""
        if draft.streaming.gradient_window or len(draft.resident) == len(draft.placements):
            return draft
        wide = replace(draft, streaming=replace(draft.streaming, gradient_window=usual_window(self.bench)))
        return wide if self.bench.fits_device(wide) else draft


def _cost(draft: Draft) -> tuple[int, ...]:
    """How complicated a draft is: what is simpler goes before what is not."""
    streaming = draft.streaming
    return (
        sum(t.lossy for selection in draft.activations for t in selection.treatments),
        sum((p.states is Tier.DISK) + (p.parameters is Tier.DISK) for p in draft.placements),
        streaming.disk_activations,
        streaming.host_activations,
        len(draft.recompute),
        sum(len(selection.treatments) for selection in draft.activations),
        sum(not p.resident for p in draft.placements),
        sum(streaming.slots),
        streaming.gradient_window,
        streaming.prefetch_distance,
    )
