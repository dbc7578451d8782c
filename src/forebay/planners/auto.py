"""``auto``: of the plans that keep every budget, the one whose simulated step is the fastest.

Choices
    A resident block saves both fetches, the gradient's way out and the host update; a dedicated slot saves one fetch
    of the two. So blocks become resident, those first that would need a slot of their own size (an embedding or a
    head), then from the last block backwards; what is left goes to dedicated slots. Which blocks recompute, how many
    slots there are, the gradient window and the prefetch distance are searched for (``search``); an update runs on
    the device for blocks that are resident and on the host for all others.
    Which ops of a block are kept, run again or moved to the host comes from the programme over all blocks
    (``activations``); the search goes on around its answers.
    What waits for links and updates is not in that programme, and what streams beside compute costs it nothing. So it
    is also asked for answers in which nothing moves, drafts in which all but activations stays are tried first, and the
    simplest policies for activations, all kept and all blocks run again, are searched with simulations of their own:
    ``auto`` is not behind what one of them finds.
    What the host has no room for goes to disk: states, activations that move, parameters (``homes``).
    What is left of the host goes to second copies of blocks that are updated while backward still runs, where that
    makes a step faster (``speculation``); and the first blocks of the forward are updated on the device, where the host
    would make it wait (``device_updates``). What is found so is balanced in the end: both numbers, and how many blocks
    stay (``balance``); and then changed a little at a time, by chance, as long as that gains (``climbing``). Where the
    machine's drives compute, all states may be there instead.

Without a batch nothing can be simulated: then what fits stays, in the same order, and nothing recomputes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

from forebay.errors import DoesNotFit
from forebay.memory import Tier
from forebay.planners.activations.choosing import all_moved, drafted, leanest, narrow, seeds, staying, still
from forebay.planners.activations.swapping import swapped
from forebay.planners.balance import balanced
from forebay.planners.bench import Bench
from forebay.planners.climbing import climbed
from forebay.planners.device_updates import fastest_there
from forebay.planners.homes import at_home, at_storage, on_host
from forebay.planners.nearest import refused
from forebay.planners.parts import KEPT, Draft, Level, all_resident
from forebay.planners.problem import Problem
from forebay.planners.reasons import bought_by_codes, explained, kept, unknown_activations
from forebay.planners.refusals import device_too_small
from forebay.planners.search import Search, plain_share
from forebay.planners.shapes import (
    Filling,
    anything_fits,
    filled,
    least_device,
    levels,
    options,
    streamed_through,
    usual_window,
)
from forebay.planners.speculation import fastest_ahead, judged
from forebay.plans import Plan

__all__ = ["auto", "first_that_fits", "proven", "searched", "without_a_trace"]

UNMEASURED_SHARE = 0.5
"""Without a batch, everything stays on the device only if it takes at most this share of the budget."""

CLIMBED = 0.06
"""A share of a step that is more than climbing gains: 2.2 % at most in 24 plans for models of 1B to 8B, 5.0 % in 48
for eight small layers (docs/log.md, 2026-12-01)."""


def auto(problem: Problem, bench: Bench | None = None) -> Plan:
    """The fastest plan found. Raises ``DoesNotFit`` with the nearest that fits."""
    bench = bench or Bench(problem)
    if problem.trace is None:
        return without_a_trace(bench, "auto")
    if not problem.compress:
        best = _fastest(bench)
        return bench.timed(bench.plan("auto", best, reasons=explained(bench, best)))
    best, gained = _gaining(bench)
    return bench.timed(bench.plan("auto", best, reasons=(*explained(bench, best), gained)))


def _fastest(bench: Bench) -> Draft:
    """The fastest draft found that the checker accepts, or what fits as it is, if that is nearly as fast."""
    best, plain = _by_the_drives(bench, _fastest_of_all(bench)), all_resident(bench.model)
    # What was added behind the search has to be worth it beside the plain step, too.
    least = bench.seconds(best) * (1 + plain_share(bench))
    if best != plain and bench.fits_device(plain) and bench.seconds(plain) <= least:
        return plain
    return best


def _fastest_of_all(bench: Bench) -> Draft:
    """The fastest draft found that the checker accepts."""
    accepted = partial(proven, bench)
    best, *others = _opinions(bench)
    chosen = fastest_ahead(bench, best, accepted, others)
    if accepted(chosen):
        drafts = [chosen, best]
    elif chosen != best and accepted(best):
        drafts = [best]
    else:
        best = searched(bench, levels(bench))
        drafts = [fastest_ahead(bench, best, accepted), best]
    found = fastest_there(bench, drafts, accepted)
    # What waits for updates now may wait for fewer with other numbers: of another kind it is balanced, too.
    starts = [found, *(draft for draft in drafts[:1] if draft.level != found.level)]
    found = min((balanced(bench, start, accepted) for start in starts), key=bench.seconds)
    # What is slower than a plan that there is by more than can be gained is of no use.
    behind = bench.seconds(found) * (1 - CLIMBED) >= bench.problem.faster_than
    return found if behind else climbed(bench, found, accepted)


def _opinions(bench: Bench) -> list[Draft]:
    """The fastest draft that a search around the programme finds, and the fastest of each of the simplest policies for
    activations, the fastest of all first. Each is searched for with simulations of its own: what the programme proposes
    would use up those of the others, and what waits for links and updates is not in it."""
    found = [searched(bench, levels(bench), seeded=True)]
    for level in dict.fromkeys((KEPT, Level(bench.recomputable))):
        # What the level computes is the least of its steps, whatever is where.
        if bench.best_rates.computing(level) < judged(bench, found[0]) and anything_fits(bench, [level]):
            best = Search(bench, [level]).run()
            found += [best] if best is not None else []
    return sorted(found, key=partial(judged, bench))


def _by_the_drives(bench: Bench, best: Draft) -> Draft:
    """``best``, or that with all states on disk and updated there, if the machine's drives compute and it is faster."""
    machine = bench.problem.machine
    if (
        machine is None
        or machine.disk is None
        or machine.disk.update_rate is None
        or not bench.problem.limit(Tier.DISK)
    ):
        return best
    try:
        beside = at_storage(bench, on_host(bench, best.plain))
    except DoesNotFit:
        return best
    return beside if bench.seconds(beside) < bench.seconds(best) and proven(bench, beside) else best


def _gaining(bench: Bench) -> tuple[Draft, str]:
    """The fastest draft with codes of fewer bits, and what it gains by them in words; the fastest without where it
    gains nothing: numbers change for a gain or not at all."""
    plain = Bench(replace(bench.problem, compress=0))
    exact: Draft | DoesNotFit
    try:
        exact = _fastest(plain)
    except DoesNotFit as refusal:
        exact = refusal.with_traceback(None)  # its frames refer to this one
    try:
        best = _fastest(bench)
    except DoesNotFit:
        if isinstance(exact, DoesNotFit):
            raise
        best = exact
    if isinstance(exact, Draft) and bench.exact(best).step_seconds >= plain.exact(exact).step_seconds:
        best = exact
    return best, bought_by_codes(bench, best, exact)


def proven(bench: Bench, draft: Draft) -> bool:
    """Whether the checker accepts ``draft``. Where activations move it is stricter than the bench about how much may be
    under way at once, and a plan that it refuses is worth nothing."""
    if bench.problem.trace is None or not draft.activations:
        return True
    return bench.fault_of(bench.plan("auto", draft)) is None


def searched(bench: Bench, among: Sequence[Level], *, seeded: bool = False, single_blocks: bool = True) -> Draft:
    """The fastest draft found that recomputes what one of ``among`` names or what lies between them and, if ``seeded``,
    what the programme over all blocks proposes; without ``single_blocks`` that of the shapes alone. Raises
    ``DoesNotFit``."""
    lean = leanest(bench) if seeded else []
    if seeded and not anything_fits(bench, [*map(narrow, lean), *among]):
        lean.append(all_moved(bench))  # what the programme counts for a block may be more than moving all of it needs
    narrowest = list(map(narrow, lean))
    if not anything_fits(bench, [*narrowest, *among]):
        least = least_device(bench, [*among, *narrowest])
        raise refused(bench, device_too_small(bench, least), least)
    proposed = chain(seeds(bench), drafted(bench, lean))
    guided = (staying(bench), swapped(bench), still(bench), proposed) if seeded else ()
    search = Search(bench, among, guided)
    best = search.run(single_blocks=single_blocks)
    if best is None:
        # The disk first: a host that is large enough is there already.
        error, draft = min(search.refusals, key=lambda r: (r[0].tier != Tier.DISK.value, r[0].needed))
        raise refused(bench, error, draft, staying=among)
    return best


def first_that_fits(bench: Bench, level: Level = KEPT) -> Draft:
    """Everything streams, through as many slots as there is room for. Raises ``DoesNotFit`` for the device."""
    for slots in options(bench):
        draft = streamed_through(bench, slots, usual_window(bench), level)
        if bench.fits_device(draft):
            return draft
    raise refused(bench, device_too_small(bench, draft), draft)


def without_a_trace(bench: Bench, name: str) -> Plan:
    """Keeps on the device what fits, by the planner called ``name``. Raises ``DoesNotFit``."""
    problem = bench.problem
    everything = all_resident(bench.model)
    room = problem.limit(Tier.DEVICE)
    if bench.device(everything) <= (room if problem.measured else int(room * UNMEASURED_SHARE)):
        reasons = ("parameters, gradients and states fit on the device", *unknown_activations(problem))
        return bench.plan(name, everything, reasons=reasons)
    draft = first_that_fits(bench)
    if problem.measured:
        draft = filled(bench, draft, Filling(last_first=True))
    try:
        draft = at_home(bench, draft)
    except DoesNotFit as error:
        raise refused(bench, error, draft, staying=(KEPT,)) from None
    return bench.plan(name, draft, reasons=(*kept(draft), *unknown_activations(problem)))
