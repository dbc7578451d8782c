"""What the policies for model states share: levels of recomputation, streams, refusals, the finished plan."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from forebay.errors import CannotServe, DoesNotFit
from forebay.memory import Tier
from forebay.model import Block
from forebay.planners.bench import Bench
from forebay.planners.homes import at_home, with_a_disk
from forebay.planners.nearest import House, larger, refused
from forebay.planners.parts import (
    DEDICATED,
    HOSTED,
    KEPT,
    RESIDENT,
    Draft,
    Level,
    fewer_slots,
)
from forebay.planners.reasons import bought_by_speculation, kept, recomputed, unknown_activations
from forebay.planners.refusals import device_too_small, host_too_small
from forebay.planners.shapes import (
    Filling,
    Home,
    around,
    fewest_recomputed,
    filled,
    options,
    streamed_through,
    usual_window,
)
from forebay.plans import Placement, Plan
from forebay.remedies import Remedy
from forebay.units import format_apart

__all__ = [
    "all_stays",
    "as_much_stays",
    "cannot_serve",
    "expect_trace",
    "finished",
    "levels",
    "most_slots",
    "on_device",
    "on_host",
    "on_host_alone",
    "serial",
    "streamed",
    "with_homes",
]


def expect_trace(bench: Bench, policy: str, asks: str) -> None:
    """Raises ``ConfigError`` for a problem without a trace: ``policy`` asks for ``asks``."""
    if bench.problem.trace is None:
        raise bench.problem.unknown(f"policy {policy} needs {asks}")


def cannot_serve(policy: str, why: str, instead: str, *more: Remedy) -> CannotServe:
    """``policy`` is not for this model or machine: ``why``, and what would do: ``more``, or the policies
    ``instead``."""
    nearest = (*more, Remedy("policy", 0, 0, f"policy {instead}"))
    words = "; or ".join(remedy.words for remedy in nearest)
    return CannotServe(f"policy {policy} {why}. What would fit: {words}", nearest=nearest)


def levels(bench: Bench) -> Sequence[Level]:
    """No block runs again, and every block that may."""
    return (KEPT, Level(bench.recomputable))


def serial(draft: Draft) -> Draft:
    """``draft`` with all updates between backward and the next forward."""
    return replace(draft, streaming=replace(draft.streaming, overlap_update=False))


def streamed(bench: Bench, house: House | None = None) -> Draft:
    """Everything streams. The fewest blocks run again with which a block can be fetched while another computes, or with
    which it can be done at all; the slots are then as many as there is room for. Raises ``DoesNotFit``, which says what
    ``house`` asks for at once (``nearest.refused``)."""
    choices = options(bench)
    for least in dict.fromkeys((bench.slot_options(2)[0], choices[-1])):
        level = fewest_recomputed(bench, partial(streamed_through, bench, least, 0), levels(bench))
        if level is not None:
            break
    else:
        draft = streamed_through(bench, choices[-1], 0, levels(bench)[-1])
        raise refused(bench, device_too_small(bench, draft), draft, house=house)
    drafts = (streamed_through(bench, slots, usual_window(bench), level) for slots in (*choices, least))
    return next(draft for draft in drafts if bench.fits_device(draft))


def as_much_stays(bench: Bench, staying: Sequence[Block], slots: int) -> tuple[Home, Level] | None:
    """How much of the blocks ``staying`` the device has room for, ``around`` which all others stream: all of it, their
    parameters, or nothing; and the fewest blocks that run again with it. None if there is room for nothing."""
    for home in (RESIDENT, DEDICATED, HOSTED):
        level = fewest_recomputed(bench, partial(around, bench, staying, home, slots), levels(bench))
        if level is not None:
            return home, level
    return None


def most_slots(bench: Bench, base: Draft, cut: Callable[[int], tuple[int, ...]]) -> Draft:
    """``base``, which fits on the device, with as many slots as there is room for: those that ``cut`` makes for a
    number of blocks, up to all that stream. The more blocks, the more bytes ``cut`` must ask for."""

    def made(count: int) -> Draft:
        return replace(base, streaming=replace(base.streaming, slots=cut(count)))

    counts = range(1, 1 + len(bench.streamed(base)))
    fitting = bisect_right(counts, bench.problem.limit(Tier.DEVICE), key=lambda count: bench.device(made(count)))
    return made(counts[fitting - 1]) if fitting else base


def all_stays(bench: Bench, base: Draft) -> Draft | None:
    """``base`` with the parameters of all blocks on the device, and the gradients and states of as many as there is
    room for beside them; None where there is no room for the parameters."""
    homes = tuple(Placement(block.name, *DEDICATED) for block in bench.model.blocks)
    draft = replace(base, placements=homes, streaming=fewer_slots(base.streaming, (), len(homes)))
    return filled(bench, draft, Filling()) if bench.fits_device(draft) else None


def on_host(bench: Bench, draft: Draft, policy: str) -> Draft:
    """``draft``, if the host has room for all of its homes. Raises ``DoesNotFit``: ``policy`` uses no disk."""
    house = on_host_alone(policy)
    try:
        return house(bench, draft)
    except DoesNotFit as error:
        raise refused(bench, error, draft, house=house, more=_another_policy(bench)) from None


def on_host_alone(policy: str) -> House:
    """How ``policy`` finds homes, which uses no disk."""
    return partial(_hosted, policy=policy)


def _hosted(bench: Bench, draft: Draft, policy: str) -> Draft:
    sizes = bench.arenas(draft)
    if sizes.host > bench.problem.limit(Tier.HOST):
        raise host_too_small(bench, sizes, policy)
    return draft


def with_homes(bench: Bench, draft: Draft) -> Draft:
    """``draft`` with homes on the host and, as far as need be, on disk. Raises ``DoesNotFit`` with what would fit."""
    try:
        return at_home(bench, draft)
    except DoesNotFit as error:
        raise refused(bench, error, draft) from None


def on_device(bench: Bench, draft: Draft, policy: str, keeps: str, *, disk: bool = False) -> DoesNotFit:
    """``draft``, the least that would do, does not fit on the device: ``policy`` ``keeps`` something there; with what
    would fit, another policy among it. ``disk``: it may use one."""
    needed, limit = bench.device(draft), bench.problem.limit(Tier.DEVICE)
    shown = format_apart(needed, limit)
    words = f"device memory: {shown[0]} are needed and {shown[1]} are allowed: policy {policy} {keeps}"
    error = DoesNotFit(words, tier=Tier.DEVICE.value, needed=needed, allowed=limit)
    house = None if disk else on_host_alone(policy)
    return refused(bench, error, draft, house=house, more=_another_policy(bench))


def _another_policy(bench: Bench) -> list[Remedy]:
    """``zero-infinity``, which asks the least of the device and may use a disk, where that fits."""
    with suppress(DoesNotFit):
        draft, name = streamed(bench), "zero-infinity"
        device, limit = bench.device(draft), bench.problem.limit(Tier.DEVICE)
        try:
            at_home(bench, draft)
        except DoesNotFit:
            nbytes = with_a_disk(bench, draft)
            if nbytes is None:
                return []
            disk = larger(bench.problem, Tier.DISK, nbytes)
            words = f"policy {name} with {disk.words}"
            return [Remedy("policy", nbytes, disk.allowed, words, policy=name, at_once=(disk,))]
        return [Remedy("policy", device, limit, f"policy {name} or auto, within the same budgets", policy=name)]
    return []


def finished(bench: Bench, name: str, draft: Draft, *reasons: str) -> Plan:
    """The plan of the policy called ``name``, with its reasons and the seconds of its simulated step."""
    bought = bought_by_speculation(bench, draft)
    words = (*kept(draft), *recomputed(draft), *reasons, *bought, *unknown_activations(bench.problem))
    return bench.timed(bench.plan(name, draft, reasons=words))
