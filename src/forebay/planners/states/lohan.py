"""``lohan``: everything streams, layers are updated under backward, and as many activations are swapped as is best.

Liao, Sun, Yang, Xie, Chen, Yuan, Wu and Wang, "LoHan: low-cost high-performance framework to fine-tune 100B model on a
consumer GPU", 2024 (arXiv 2403.06504). Two things make it up. Active gradient offloading: a layer's gradient that has
come to the host is used at once, its states are read, updated and written back while backward goes on to the layers
before it. Holistic traffic-aware activation swapping: the activations between layers are always swapped, and of those
inside a layer the first so many bytes in the order of their benefit, the computation that a byte spares; the rest is
computed again. How many bytes is decided by a model of the iteration's time, the longest of what the GPU, both ways of
the link, the SSDs and the CPU have to do, which is convex in it.

Ours departs in four things. The time is simulated, in steps from nothing swapped to everything, and the fastest taken:
the simulator knows of waiting too. The blocks that are alike swap the same, where the paper may stop inside a layer.
Model states and activations go to disk only as far as the host has no room for them. An update while backward runs goes
into a second copy (see ``l2l``), and is made only where the step is faster for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from forebay.errors import DoesNotFit
from forebay.memory import Tier
from forebay.planners.activations.choosing import level_of
from forebay.planners.activations.groups import Group
from forebay.planners.activations.menu import Option
from forebay.planners.auto import proven, refused
from forebay.planners.bench import Bench
from forebay.planners.homes import at_home
from forebay.planners.parts import Draft, Level
from forebay.planners.problem import Problem
from forebay.planners.refusals import device_too_small
from forebay.planners.shapes import least_device, options, streamed_through, usual_window
from forebay.planners.speculation import ahead
from forebay.planners.states.drafting import expect_trace, finished
from forebay.plans import Plan
from forebay.units import format_bytes

__all__ = ["lohan", "swaps"]

PARTS: Final = 8
"""Steps from nothing of a layer swapped to everything."""

FEW_PARTS: Final = 4
"""The same for long steps (``Bench.is_long``), whose simulation takes its time."""

STAYS: Final = 0.05
"""Of the bytes that a block saves, so large a share may stay on the device: what cannot move, and small tensors."""


def lohan(problem: Problem, bench: Bench | None = None) -> Plan:
    """The fastest amount of activations that are swapped, of those that fit. Raises ``DoesNotFit``, and ``ConfigError``
    without a batch."""
    bench = bench or Bench(problem)
    expect_trace(bench, "lohan", "what activations take and how long they take to make")
    fitting, refusals = list[Draft](), list[tuple[DoesNotFit, Draft]]()
    for draft in _drafts(bench):
        try:
            settled = at_home(bench, draft)
        except DoesNotFit as refusal:
            refusals.append((refusal, draft))
            continue
        if proven(bench, settled):
            fitting.append(settled)
    if not fitting:
        if refusals:
            error, draft = min(refusals, key=lambda refusal: (refusal[0].tier != Tier.DISK.value, refusal[0].needed))
            raise refused(bench, error, draft)
        least = least_device(bench, swaps(bench))
        raise refused(bench, device_too_small(bench, least), least)
    best = min(fitting, key=bench.seconds)
    more = ahead(bench, best)
    moved = best.streaming.host_activations + best.streaming.disk_activations
    said = f"swapping {format_bytes(moved)} of activations is the fastest of {len(fitting)} amounts"
    return finished(bench, "lohan", more if proven(bench, more) else best, said)


def _drafts(bench: Bench) -> Iterator[Draft]:
    """Everything streams, with more and more of the activations swapped, as far as the device has room."""
    for level in swaps(bench):
        drafts = (streamed_through(bench, slots, usual_window(bench), level) for slots in options(bench))
        draft = next((draft for draft in drafts if bench.fits_device(draft)), None)
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
        found.append(level_of(bench.liveness, groups, chosen))
    return tuple(dict.fromkeys(found))


def _in_order(group: Group) -> list[Option]:
    """The choices for a block that leave next to nothing on the device, those that move the least first. Of as many
    bytes the menu has those that spare the most computation."""
    least = min(option.held for option in group.options)
    able = [option for option in group.options if option.held <= least + STAYS * group.held]
    return sorted(able, key=lambda option: (option.moved, option.seconds))
