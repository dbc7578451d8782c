"""The planners that search: ``arena``, the default, takes the best that all of them find in the time that there is. No
torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

from forebay.planners.cpsat import cpsat_is_there
from forebay.planners.layout.ahead import compile_searches
from forebay.planners.layout.aim import Aim, Found, lower_of
from forebay.planners.layout.beams import Beams
from forebay.planners.layout.cores import Cores
from forebay.planners.layout.cpsat import solve
from forebay.planners.layout.drawings import Drawings
from forebay.planners.layout.exact import task_of
from forebay.planners.layout.greedy import fitted, portfolio
from forebay.planners.layout.multilevel import Multilevel
from forebay.planners.layout.orders import order_by
from forebay.planners.layout.periodic import Shaker
from forebay.planners.layout.placing import Outcome
from forebay.planners.layout.pools import Pools
from forebay.planners.layout.sweeps import Sweeps
from forebay.planners.layout.table import Table
from forebay.planners.layout.turns import Improver, Turns

__all__ = ["arena", "exact", "periodic"]

ALONE = 1.0
"""Seconds of the searches here before CP-SAT is asked, where it is installed: what is easy is found in less."""

CPSAT_MOST = 1000
"""Buffers of the largest part that CP-SAT is asked about."""

CPSAT_TIMES = 2.0
"""How many times as long as the searches here it gets."""

LONGER = 2.0
"""How many times as long as the time before each of them gets, after both have found nothing: CP-SAT begins anew each
time, so that it loses no more than half of what it was given, and what the searches here find is not put off to the
end."""

BEAM_MOST = 500
"""Buffers of the largest part that is searched with many partial layouts at a time: what one more buffer takes for all
of them grows with the number of buffers, and a turn is to stay short."""

JOINED_MOST = 500
"""Buffers of the largest part that are joined to blocks: all pairs of them are looked at, again and again. A turn,
four sets of blocks, takes a tenth of a second of 220 to 420 buffers, where a turn of the others takes some
hundredths."""

SWEPT_MOST = 1000
"""Buffers of the largest part that is swept: what one more takes grows with those that come before and after it."""

DRAWN_FIRST = 5
"""Turns for a drawing ahead of all other searches: half a second where as much comes as goes at most times, and no time
elsewhere. Of 45 such sets of 120 to 450 buffers 41 are found within a second (docs/log.md, 2026-11-29)."""

POOLED_MOST = 3000
"""Buffers of the largest part that is searched with a pool: of 20,000 it finds no lower layouts in 10 seconds."""

MANY = 10_000
"""Buffers of the smallest part that only the first greedy layouts are made of, a quarter of a second each: the time
is better spent on its core, which sees the same orders and many more."""

FEW = 2
"""Greedy layouts of such a part."""

SHAKEN = ("area", "pressure-length")
"""Orders that local searches begin with."""


def exact(table: Table, aim: Aim) -> Found:
    """A layout within the target, or the proof that there is none; if neither is found in time, or the part is too
    large for that, the best of the greedy ones."""
    best = _greedy(table, aim)
    if aim.met(best.height):
        return best
    with aim.untimed():
        compile_searches()
    return Turns(table, aim, best, ()).advance(aim)


def arena(table: Table, aim: Aim) -> Found:
    """Greedy layouts first, and a drawing where nothing is free; then searches of all kinds take turns."""
    best = _greedy(table, aim)
    if aim.met(best.height):
        return best
    drawings = [Drawings(table, best, aim.target(best.height))] if table.aligned and len(table) <= POOLED_MOST else []
    for search in drawings * DRAWN_FIRST:
        search.advance()
        if aim.met(search.best.height):
            return search.best
    with aim.untimed():
        compile_searches()
    turns = Turns(table, aim, best, _improvers(table, aim, best, drawings))
    if aim.fits(best.height) or len(table) > CPSAT_MOST or not cpsat_is_there():
        return turns.advance(aim)
    return _with_cpsat(table, aim, turns)


def _improvers(table: Table, aim: Aim, best: Found, drawings: Sequence[Improver]) -> list[Improver]:
    """Whose turn it is after each exact search, one after the other; which there are depends on how many buffers there
    are."""
    target, count = aim.target(best.height), len(table)
    if count > POOLED_MOST:
        return [Cores(table, best)]
    pools = [Pools(table, best, aim)]
    joined = [Multilevel(table, best, target, aim.deadline)] if table.aligned and count <= JOINED_MOST else []
    beams = [Beams(table, task_of(table), best, aim)] if count <= BEAM_MOST else []
    sweeps = [Sweeps(table, best, target)] if table.aligned and count <= SWEPT_MOST else []
    found: list[Improver] = []
    for name in SHAKEN:
        shaken = [Shaker(table, order_by(table, name), target)]
        # Sweeps have every other turn: five of nine hard sets were found so, two before (docs/log.md, 2026-11-23).
        for others in (joined, pools, beams, joined, pools, shaken):
            found += [*others, *sweeps, *drawings]
    return found


def _with_cpsat(table: Table, aim: Aim, turns: Turns) -> Found:
    """The searches here and CP-SAT one after the other, as long as nothing fits, each for longer every time."""
    alone = ALONE
    while True:
        best = turns.advance(aim.within(alone))
        if aim.fits(best.height) or best.exhausted or aim.deadline.over:
            return best
        target = aim.target(best.height)
        outcome, offsets = solve(table, target, min(CPSAT_TIMES * alone, aim.deadline.left))
        if outcome is Outcome.FOUND:
            return Found(offsets, int((offsets + table.size).max()), "CP-SAT")
        if outcome is Outcome.NONE:
            return replace(best, exhausted=True)
        alone *= LONGER


def periodic(table: Table, aim: Aim) -> Found:
    """Best fit by area, its order improved until the aim is met."""
    order = order_by(table, "area")
    found = fitted(table, order, "best fit by area")
    if aim.met(found.height):
        return found
    with aim.untimed():
        compile_searches()
    search = Shaker(table, order, aim.target(found.height))
    while not aim.met(lower_of(found, search.best).height):
        search.advance()
    return lower_of(found, search.best)


def _greedy(table: Table, aim: Aim) -> Found:
    best: Found | None = None
    for found in islice(portfolio(table), FEW if len(table) >= MANY else None):
        best = lower_of(best, found)
        if aim.met(best.height):
            break
    assert best is not None  # a portfolio is not empty
    return best
