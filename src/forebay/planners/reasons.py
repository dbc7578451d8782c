"""Why a plan is as it is, in words: what binds, and what each choice bought, from the simulator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from math import inf

from forebay.arenas import DISK_SUM, home_tier
from forebay.errors import DoesNotFit
from forebay.layout import LOWER, MASTER, PAGE, needs_master
from forebay.memory import Tier
from forebay.planners.activations.coding import lossy
from forebay.planners.activations.named import again_seconds, moved_nbytes
from forebay.planners.bench import Bench
from forebay.planners.device_updates import at_home_again
from forebay.planners.device_updates import candidates as able_on_device
from forebay.planners.homes import at_home, on_host
from forebay.planners.parts import KEPT, Draft, slot_options
from forebay.planners.problem import Problem
from forebay.planners.shapes import Filling, filled, options, streamed_through, usual_window
from forebay.planners.speculation import candidates, second_copies
from forebay.plans import Plan, Update
from forebay.states import Masters, form_of
from forebay.timeline import Lane
from forebay.treatments import Fate, Treatment
from forebay.units import format_bytes, format_seconds

__all__ = [
    "LANES_IN_WORDS",
    "bought_by_codes",
    "bought_by_speculation",
    "bound_anew",
    "explained",
    "kept",
    "limits",
    "recomputed",
    "unknown_activations",
]

SAME = 0.005
"""Steps that differ by less than this share are not worth a figure."""

LANES_IN_WORDS = {
    Lane.COMPUTE: "compute",
    Lane.H2D: "the way from host to device (h2d)",
    Lane.D2H: "the way from device to host (d2h)",
    Lane.UPDATE: "the update on the host",
    Lane.DEVICE_UPDATE: "the update on the device",
    Lane.STORAGE_UPDATE: "the update beside the storage (storage_update)",
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
    beside = len(draft.updated(Update.STORAGE))
    if states > beside or homes:
        words.append(f"{_on_disk(states - beside, homes)} on disk: the host has no room for all of them")
        if draft.streaming.disk_copies > 1:
            three = any(p.on_disk and p.update is Update.AHEAD for p in placements)
            words.append(
                f"what is on disk has two places there{', or three' if three else ''}: updates write beside the last "
                f"checkpoint, no save copies it"
            )
    if draft.streaming.checksums and (states or homes):
        words.append(
            f"what is read of it is held against checksums of what was written: {DISK_SUM} bytes of the host for each "
            f"{format_bytes(PAGE)}"
        )
    return tuple(words)


def _on_disk(states: int, homes: int) -> str:
    """Of how many blocks what is there."""
    if not homes:
        return f"the states of {_blocks(states)} are"
    if not states:
        return f"the parameters of {_blocks(homes)} are"
    if states == homes:
        return f"the states and the parameters of {_blocks(states)} are"
    return f"the states of {_blocks(states)} and the parameters of {homes} are"


def _blocks(count: int) -> str:
    return f"{count} block{'s' * (count != 1)}"


def recomputed(draft: Draft) -> tuple[str, ...]:
    """How many blocks recompute, and what is treated otherwise."""
    words = [f"{len(draft.recompute)} blocks recompute their activations"] if draft.recompute else []
    how = draft.streaming
    for nbytes, where in ((how.host_activations, "the host"), (how.disk_activations, "disk")):
        if nbytes:
            words.append(f"{format_bytes(nbytes)} of activations go to {where} in forward and come back in backward")
    return tuple(words)


def unknown_activations(problem: Problem) -> tuple[str, ...]:
    """What is not known without a batch."""
    if problem.measured:
        return ()
    why = problem.footprint.note or "no batch was given"
    return (f"the activations are not known beforehand ({why}): device memory left over is theirs",)


def explained(bench: Bench, draft: Draft) -> tuple[str, ...]:
    """The reasons for a draft that was searched for: each choice beside the same plan without it."""
    # What each of the other choices buys is said with all updates at home and after their step: the rest comes on top.
    base, unit = _without_copies(bench, draft, draft.plain), exactness(bench, draft)
    return (
        *kept(draft),
        _binding(bench, draft),
        *_bought_by_residents(bench, base, unit),
        *_treated(bench, base),
        *_bought_by_recomputation(bench, base, unit),
        *_bought_by_slots(bench, base, unit),
        *bought_by_speculation(bench, draft),
        *_bought_on_device(bench, draft),
        *_halved(bench),
        *_pinning(bench, draft),
        *_gap(bench, draft),
    )


def _halved(bench: Bench) -> tuple[str, ...]:
    """What it saves to keep half of each master."""
    if bench.problem.masters is Masters.WHOLE:
        return ()
    elements = sum(p.numel for block in bench.model.blocks for p in block.parameters if needs_master(p))
    less = elements * (form_of(MASTER).itemsize - form_of(LOWER).itemsize)
    return (f"of fp32 masters the lower halves are kept, and parameters are the upper ones: {format_bytes(less)} less",)


def _without_copies(bench: Bench, draft: Draft, other: Draft) -> Draft:
    """``other``, which is ``draft`` without updates ahead. What went to the disk for the sake of second copies is on
    the host again, if there is room: there it would only cost."""
    if not draft.updated(Update.AHEAD):
        return other
    settled = _settled(bench, on_host(bench, other))
    if settled is None or not bench.may_compare(settled):
        return other
    return min(other, settled, key=bench.seconds)


def limits(bench: Bench, draft: Draft) -> tuple[str, ...]:
    """What the step of ``draft`` waits for, and how far it is from what no plan can beat."""
    return (_binding(bench, draft), *_gap(bench, draft))


def bought_by_speculation(bench: Bench, draft: Draft) -> Iterator[str]:
    """The same without updates ahead of their step."""
    able, count = candidates(bench, draft), len(draft.updated(Update.AHEAD))
    if not count:
        return
    which = f"of {count} of {len(able)} blocks" if count < len(able) else f"of {_blocks(count)}"
    copies = second_copies(bench, draft)
    parts = ((copies[Tier.HOST], "of host memory"), (copies[Tier.DISK], "on disk"))
    where = " and ".join(f"{format_bytes(nbytes)} {words}" for nbytes, words in parts if nbytes)
    other = _without_copies(bench, draft, draft.updating(Update.AHEAD, ()))
    gain = against(bench, draft, other, "otherwise", exactness(bench, draft))
    yield f"running updates {which} under backward, into a second copy ({where}), {gain}"


def _bought_on_device(bench: Bench, draft: Draft) -> Iterator[str]:
    """The same with those updates at home."""
    count = len(draft.updated(Update.DEVICE))
    if not count:
        return
    able, other = able_on_device(bench, draft), at_home_again(draft)
    first = f"the first {count} of {_blocks(len(able))} that do not stay"
    line = f"{first} are updated on the device, through a window of {format_bytes(draft.streaming.update_window)} there"
    if bench.may_compare(other):
        line += f", which {against(bench, draft, other, 'at home', exactness(bench, draft))}"
    yield line


def bought_by_codes(bench: Bench, draft: Draft, other: Draft | DoesNotFit) -> str:
    """What ``draft`` gains by codes of fewer bits: ``other`` is what there is without them."""
    bits = bench.problem.compress
    if not lossy(draft.activations):
        return f"activations may be kept as {bits} bits, and nothing would be gained by it"
    what = f"keeping activations as {bits} bits"
    if isinstance(other, DoesNotFit):
        return f"{what} is what makes it fit: without, {format_bytes(other.needed)} of {other.tier} would be needed"
    return f"{what} {against(bench, draft, other, 'without', exactness(bench, draft))}"


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


def bound_anew(bench: Bench, before: Plan, plan: Plan) -> Plan:
    """``plan``, which was made of ``before``, with what binds a step of its own in the place of what bound that one."""
    if plan.step_seconds == before.step_seconds:
        return plan
    said, says = _binding(bench, Draft.of(before)), _binding(bench, Draft.of(plan))
    return replace(plan, reasons=tuple(says if reason == said else reason for reason in plan.reasons))


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole if whole else 0:.0f} %"


def _bought_by_residents(bench: Bench, draft: Draft, unit: float) -> Iterator[str]:
    """The same slots and recomputation with every block streaming."""
    if not draft.resident:
        return
    streamed = streamed_through(bench, options(bench)[0], usual_window(bench), on_host(bench, draft).level)
    other = _settled(bench, streamed)
    how_many = "all blocks" if len(draft.resident) == len(draft.placements) else _blocks(len(draft.resident))
    if other is None:
        yield f"keeping {how_many} on the device is what makes the rest fit"
    elif bench.may_compare(other):
        yield f"keeping {how_many} on the device {against(bench, draft, other, 'when every block streams', unit)}"


def _treated(bench: Bench, draft: Draft) -> Iterator[str]:
    """For every group of blocks that are treated alike: what runs again, what stays, what moves; and beside which lane
    that is done."""
    if bench.liveness is None or not draft.activations:
        return
    again = frozenset(draft.recompute)
    for selection in draft.activations:
        here = selection.blocks
        one = len(here) == 1
        if here[0] in again:
            words = "runs again" if one else "run again"
        else:
            words = "keeps what it saves" if one else "keep what they save"
        for fate, verb in ((Fate.KEEP, "kept"), (Fate.OFFLOAD, "but on the host"), (Fate.DISK, "but on disk")):
            for way in sorted({_way(t) for t in selection.treatments if t.fate is fate}):
                named = [t for t in selection.treatments if t.fate is fate and _way(t) == way]
                ops = Counter(t.op.removeprefix("aten.").split(".")[0] for t in named)
                counted = (f"{n} {op}" if n > 1 else op for op, n in ops.items())
                words += f", {verb}{_in_words(named[0])}: {', '.join(counted)}"
        moved = sum(moved_nbytes(bench.liveness.index, (replace(selection, blocks=here[:1]),)))
        size = f" ({format_bytes(moved)} a block)" if moved else ""
        ends = f"{here[0]} {'and' if len(here) == 2 else 'to'} {here[-1]}"
        where = f"block {here[0]}" if one else f"{len(here)} blocks ({ends})"
        yield f"{where} {words}{size}"
    spent = again_seconds(bench.costs, bench.liveness.index, draft.recompute, draft.activations)
    if spent:
        yield f"what runs again takes {format_seconds(spent)} of compute"


def _way(treatment: Treatment) -> tuple[int, int, int]:
    """Bits, and what of each tensor is treated."""
    split = treatment.split
    return treatment.bits, *((split.parts, split.treated) if split else (0, 0))


def _in_words(treatment: Treatment) -> str:
    bits = f" as {treatment.bits} bits" if treatment.bits else ""
    return f"{bits}, {treatment.split} of each" if treatment.split else bits


def _gap(bench: Bench, draft: Draft) -> Iterator[str]:
    """How far the step is from what no plan can beat that updates at home what does not stay."""
    bound, step = bench.bound, bench.exact(draft).step_seconds
    if 0 < bound < inf and not draft.updated(Update.DEVICE):
        yield (
            f"no plan that keeps, moves or recomputes whole tensors within these budgets takes less than "
            f"{format_seconds(bound)} a step: this one is at most {100 * max(0.0, step / bound - 1):.1f} % slower"
        )


def _bought_by_recomputation(bench: Bench, draft: Draft, unit: float) -> Iterator[str]:
    """The same with all activations kept, with as many blocks on the device as there is room for then."""
    if draft.level == KEPT:
        return
    all_kept = draft.at(KEPT)
    freed = bench.beside(all_kept) - bench.beside(draft)
    what = [f"recomputing {_blocks(len(draft.recompute))}"] if draft.recompute else []
    moved = draft.streaming.host_activations + draft.streaming.disk_activations
    if moved:
        what.append(f"moving {format_bytes(moved)}")
    if lossy(draft.activations):
        what.append(f"keeping activations as {bench.problem.compress} bits")
    line = f"{' and '.join(what)} frees {format_bytes(max(0, freed))} of the device"
    for slots in options(bench):
        plain = streamed_through(bench, slots, usual_window(bench))
        if bench.fits_device(plain):
            other = _settled(bench, filled(bench, plain, Filling()))
            if other is not None and bench.may_compare(other):
                line += f" and {against(bench, draft, other, 'when none does', unit)}"
            break
    else:
        line += f"; without it at least {format_bytes(bench.device(plain))} would be needed there"
    yield line


def _bought_by_slots(bench: Bench, draft: Draft, unit: float) -> Iterator[str]:
    """The same with the fewest slots that do, and without a fetch ahead."""
    slots = draft.streaming.slots
    fewest = slot_options(bench.streamed(draft), most=1)[-1]
    if len(slots) <= len(fewest):
        return
    base = on_host(bench, draft)
    one = replace(base.streaming, slots=fewest, prefetch_distance=0)
    other = _settled(bench, replace(base, streaming=one))
    if other is not None and bench.may_compare(other):
        otherwise = "through a single slot" if len(fewest) == 1 else f"through {len(fewest)}"
        yield f"having {len(slots)} slots and fetching ahead {against(bench, draft, other, otherwise, unit)}"


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


def exactness(bench: Bench, draft: Draft) -> float:
    """Exact seconds of a step of ``draft``, over those in which drafts are compared, which are coarse for a large
    model. Reasons speak of exact seconds of the draft that they explain; of others nobody works them out."""
    coarse = bench.seconds(draft)
    return bench.exact(draft).step_seconds / coarse if coarse else 0.0


def against(bench: Bench, draft: Draft, other: Draft, otherwise: str, unit: float) -> str:
    """What ``draft`` saves beside ``other``, which is what there is ``otherwise``; ``unit`` is the ``exactness`` of the
    draft that is explained."""
    mine, theirs = unit * bench.seconds(draft), unit * bench.seconds(other)
    if abs(mine - theirs) < SAME * theirs:
        return f"changes little ({format_seconds(theirs)} a step {otherwise})"
    word = "saves" if mine < theirs else "costs"
    return f"{word} {format_seconds(abs(theirs - mine))} a step ({format_seconds(theirs)} {otherwise})"
