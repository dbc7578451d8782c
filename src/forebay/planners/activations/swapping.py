"""How much is swapped: from nothing to everything, in the order in which a byte spares the most computation.

Of what a block makes, as good as nothing stays on the device: the first so many bytes, in the order of the computation
that each of them spares, go to the host, and the rest runs again. The seconds of a step are the longest of what compute
and every link have to do, which is convex in the number of bytes (Liao et al., "LoHan", 2024, section 4).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from math import inf
from typing import Final

from forebay.errors import DoesNotFit
from forebay.planners.activations.choosing import level_of
from forebay.planners.activations.groups import Group
from forebay.planners.activations.menu import Option
from forebay.planners.bench import Bench
from forebay.planners.homes import at_home
from forebay.planners.parts import Draft, Level
from forebay.planners.shapes import Filling, filled, options, streamed_through, usual_window

__all__ = ["streamed_swaps", "swapped", "swaps"]

PARTS: Final = 8
"""Steps from nothing of a layer swapped to everything."""

FEW_PARTS: Final = 4
"""The same for long steps (``Bench.is_long``), whose simulation takes its time."""

STAYS: Final = 0.05
"""Of the bytes that a block saves, so large a share may stay on the device: what cannot move, and small tensors."""


def swapped(bench: Bench) -> Iterator[Draft]:
    """Everything streams but what there is room for, with more and more of the activations swapped, for as long as the
    step gains by it: the seconds are convex in the bytes, and what moves little is quick to simulate. Nothing goes to a
    disk for it that need not."""
    homes: dict[Draft, Draft] = {}
    for draft in streamed_swaps(bench):
        full = filled(bench, draft, Filling())
        with suppress(DoesNotFit):
            homes[full] = at_home(bench, full)
    without = {draft: home for draft, home in homes.items() if not bench.arenas(home).disk}
    best = inf
    for draft, home in (without or homes).items():
        if bench.best_rates.step(home) < best:
            yield draft
            if bench.seconds(home) >= best:
                break
            best = bench.seconds(home)


def streamed_swaps(bench: Bench) -> Iterator[Draft]:
    """Everything streams, with more and more of the activations swapped, as far as the device has room."""
    for level in swaps(bench):
        through = (streamed_through(bench, slots, usual_window(bench), level) for slots in options(bench))
        draft = next((draft for draft in through if bench.fits_device(draft)), None)
        if draft is not None:
            yield draft


def swaps(bench: Bench) -> tuple[Level, ...]:
    """More and more of the activations swapped: nothing, what is between layers, and so on to everything."""
    nothing = Level(bench.recomputable)
    if bench.chain is None or bench.liveness is None:
        return (nothing,)
    groups, parts = bench.chain.groups, FEW_PARTS if bench.is_long else PARTS
    found = [nothing]
    for part in range(parts + 1):
        chosen = []
        for group in groups:
            order = _in_order(group)
            chosen.append([order[part * (len(order) - 1) // parts]] * len(group.blocks))
        found.append(level_of(bench.liveness, bench.chain, chosen))
    return tuple(dict.fromkeys(found))


def _in_order(group: Group) -> list[Option]:
    """The choices for a block that leave next to nothing on the device, those that move the least first. Of as many
    bytes the menu has those that spare the most computation."""
    least = min(option.held for option in group.options)
    able = [option for option in group.options if option.held <= least + STAYS * group.held]
    return sorted(able, key=lambda option: (option.moved, option.seconds))
