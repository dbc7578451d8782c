"""Why a plan is as it is, in words: what binds, and what each choice bought, from the simulator."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from forebay.arenas import home_tier
from forebay.errors import DoesNotFit
from forebay.memory import Tier
from forebay.planners.bench import Bench
from forebay.planners.homes import at_home
from forebay.planners.parts import Draft, on_host, slot_options
from forebay.planners.problem import Problem
from forebay.planners.shapes import Filling, filled, options, streamed_through, usual_window
from forebay.timeline import Lane
from forebay.units import format_bytes, format_seconds

__all__ = ["LANES_IN_WORDS", "explained", "kept", "recomputed", "unknown_activations"]

SAME = 0.005
"""Steps that differ by less than this share are not worth a figure."""

LANES_IN_WORDS = {
    Lane.COMPUTE: "compute",
    Lane.H2D: "the way from host to device (h2d)",
    Lane.D2H: "the way from device to host (d2h)",
    Lane.UPDATE: "the update on the host",
    Lane.DISK_READ: "reading from disk (disk_read)",
    Lane.DISK_WRITE: "writing to disk (disk_write)",
}
"""The lanes as the reasons name them."""


def kept(draft: Draft) -> tuple[str, ...]:
    """Where the blocks are."""
    placements = draft.placements
    resident = len(draft.resident)
    dedicated = sum(p.parameters is Tier.DEVICE for p in placements) - resident
    streamed = len(placements) - resident - dedicated
    if resident == len(placements):
        words = ["parameters, gradients and states fit on the device"]
    else:
        where = f"{resident} stay on the device, {dedicated} keep a slot, {streamed} stream"
        words = [f"of {len(placements)} blocks {where}"]
    states = sum(p.states is Tier.DISK for p in placements)
    homes = sum(home_tier(p) is Tier.DISK for p in placements)
    if states or homes:
        words.append(f"states of {states} blocks and parameters of {homes} are on disk: the host has no room")
    return tuple(words)


def recomputed(draft: Draft) -> tuple[str, ...]:
    """How many blocks recompute."""
    return (f"{len(draft.recompute)} blocks recompute their activations",) if draft.recompute else ()


def unknown_activations(problem: Problem) -> tuple[str, ...]:
    """What is not known without a batch."""
    if problem.measured:
        return ()
    why = problem.footprint.note or "no batch was given"
    return (f"the activations are not known beforehand ({why}): device memory left over is theirs",)


def explained(bench: Bench, draft: Draft) -> tuple[str, ...]:
    """The reasons for a draft that was searched for: each choice beside the same plan without it."""
    return (
        *kept(draft),
        _binding(bench, draft),
        *_bought_by_residents(bench, draft),
        *_bought_by_recomputation(bench, draft),
        *_bought_by_slots(bench, draft),
        *_pinning(bench, draft),
    )


def _binding(bench: Bench, draft: Draft) -> str:
    """Which lane the step waits for."""
    forecast = bench.exact(draft)
    step = forecast.step_seconds
    busy = {lane: seconds for lane, seconds in forecast.busy.items() if seconds > 0 and lane in LANES_IN_WORDS}
    others = sorted((lane for lane in busy if lane is not forecast.binding), key=lambda lane: -busy[lane])
    line = f"{LANES_IN_WORDS[forecast.binding]} binds: busy {_share(busy.get(forecast.binding, 0.0), step)} of a step"
    line += f" of {format_seconds(step)}"
    if others:
        line += ", " + ", ".join(f"{lane.value} {_share(busy[lane], step)}" for lane in others)
    return line


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole if whole else 0:.0f} %"


def _bought_by_residents(bench: Bench, draft: Draft) -> Iterator[str]:
    """The same slots and recomputation with every block streaming."""
    if not draft.resident:
        return
    streamed = streamed_through(bench, options(bench)[0], usual_window(bench), draft.recompute)
    other = _settled(bench, streamed)
    how_many = "all blocks" if len(draft.resident) == len(draft.placements) else f"{len(draft.resident)} blocks"
    if other is None:
        yield f"keeping {how_many} on the device is what makes the rest fit"
    else:
        yield f"keeping {how_many} on the device {_against(bench, draft, other, 'when every block streams')}"


def _bought_by_recomputation(bench: Bench, draft: Draft) -> Iterator[str]:
    """The same without recomputation, with as many blocks on the device as there is room for then."""
    if not draft.recompute:
        return
    freed = bench.beside(replace(draft, recompute=())) - bench.beside(draft)
    line = f"recomputing {len(draft.recompute)} blocks frees {format_bytes(max(0, freed))} of the device"
    for slots in options(bench):
        plain = streamed_through(bench, slots, usual_window(bench))
        if bench.fits_device(plain):
            other = _settled(bench, filled(bench, plain, Filling()))
            if other is not None:
                line += f" and {_against(bench, draft, other, 'when none does')}"
            break
    else:
        line += f"; without it at least {format_bytes(bench.device(plain))} would be needed there"
    yield line


def _bought_by_slots(bench: Bench, draft: Draft) -> Iterator[str]:
    """The same with the fewest slots that do, and without a fetch ahead."""
    slots = draft.streaming.slots
    fewest = slot_options(bench.streamed(draft), most=1)[-1]
    if len(slots) <= len(fewest):
        return
    base = on_host(draft)
    one = replace(base.streaming, slots=fewest, prefetch_distance=0)
    other = _settled(bench, replace(base, streaming=one))
    if other is not None:
        otherwise = "through a single slot" if len(fewest) == 1 else f"through {len(fewest)}"
        yield f"having {len(slots)} slots and fetching ahead {_against(bench, draft, other, otherwise)}"


def _pinning(bench: Bench, draft: Draft) -> Iterator[str]:
    """Arenas that are not page-locked for want of budget: the simulation takes all of them as page-locked."""
    pageable = bench.pageable(bench.arenas(draft))
    if pageable:
        yield (
            f"{format_bytes(pageable)} that the device copies from or to stay pageable, because the pinned budget is "
            f"{format_bytes(bench.problem.limit(Tier.PINNED))}: copies will be slower than predicted"
        )


def _settled(bench: Bench, draft: Draft) -> Draft | None:
    """``draft`` with homes, if it fits."""
    if not bench.fits_device(draft):
        return None
    try:
        return at_home(bench, draft)
    except DoesNotFit:
        return None


def _against(bench: Bench, draft: Draft, other: Draft, otherwise: str) -> str:
    """What ``draft`` saves beside ``other``, which is what there is ``otherwise``."""
    mine, theirs = bench.seconds(draft), bench.seconds(other)
    if abs(mine - theirs) < SAME * theirs:
        return f"changes little ({format_seconds(theirs)} a step {otherwise})"
    word = "saves" if mine < theirs else "costs"
    return f"{word} {format_seconds(abs(theirs - mine))} a step ({format_seconds(theirs)} {otherwise})"
