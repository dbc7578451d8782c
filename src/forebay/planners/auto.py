"""``auto``, first version: what fits on the device stays there, the rest streams; what fits on the host stays there,
the rest goes to disk. ``stream`` is the same with nothing kept on the device.

Choices
    A resident block saves both fetches, the gradient's way out and the host update; a dedicated slot saves one fetch
    of the two. So blocks become resident, the largest first (an embedding or a head, which would otherwise need a
    slot of its own size), then from the last block backwards, whose fetches in backward follow the forward's at once;
    what is left goes to dedicated slots. States go to disk before parameters: they cross the disk's link once a step
    in each direction, parameters twice in one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from forebay.arenas import Arenas, Sizer, arenas, home_nbytes, home_tier
from forebay.errors import DoesNotFit
from forebay.layout import STATE_ITEMSIZE
from forebay.memory import Tier
from forebay.planners.problem import Problem
from forebay.plans import Placement, Plan, Streaming
from forebay.trace import Block
from forebay.units import format_apart, format_bytes

__all__ = ["auto", "stream"]

SHARED_SLOTS = 3
"""Slots for the repeated blocks: one computes, one is being fetched, one is still being read."""

NEAR = 1.25
"""A block of up to this many times the commonest size still counts as a repeated one."""

UNMEASURED_SHARE = 0.5
"""Without a batch, everything stays on the device only if it takes at most this share of the budget."""

DISK_RING_SHARE = 1 / 16
"""Share of the host budget that the buffers for states on disk may take."""

SMALLEST_CHUNK = 64 * 1024
"""Elements: the least that one update job handles."""

RESIDENT = (Tier.DEVICE, Tier.DEVICE, Tier.DEVICE)
HOSTED = (Tier.HOST, Tier.HOST, Tier.HOST)
DEDICATED = (Tier.DEVICE, Tier.HOST, Tier.HOST)


def auto(problem: Problem) -> Plan:
    """Keeps on the device what fits. Raises ``DoesNotFit``."""
    everything = tuple(Placement(b.name, *RESIDENT) for b in problem.model.blocks)
    sizes = arenas(problem.model, everything, Streaming(), problem.state_names)
    reasons = ["parameters, gradients and states fit on the device"]
    plan = _finish(problem, "auto", everything, Streaming(), sizes, reasons)
    measured = problem.footprint.measured
    allowed = problem.budget.device if measured else int(problem.budget.device * UNMEASURED_SHARE)
    if plan.device <= allowed:
        return plan
    streaming = _slots(problem, problem.model.blocks)
    placements = {b.name: Placement(b.name, *(DEDICATED if b.held else HOSTED)) for b in problem.model.blocks}
    if measured:
        placements, streaming = _keep(problem, placements, streaming)
    return _place_on_host(problem, "auto", placements, streaming)


def stream(problem: Problem) -> Plan:
    """Streams every block, whatever the device could hold. Raises ``DoesNotFit``."""
    placements = {b.name: Placement(b.name, *(DEDICATED if b.held else HOSTED)) for b in problem.model.blocks}
    return _place_on_host(problem, "stream", placements, _slots(problem, problem.model.blocks))


def _working_set(problem: Problem) -> int:
    """Device bytes that are there whatever streams: activations and temporaries at their peak, and buffers."""
    return problem.footprint.peak + problem.model.buffer_nbytes


def _slots(problem: Problem, streamed: Sequence[Block]) -> Streaming:
    """The shared slots for ``streamed``: as many as fit of the repeated size, one for what is larger."""
    shared = [b for b in streamed if not b.held]
    dedicated = sum(b.nbytes for b in streamed if b.held)
    options = _slot_options(shared)
    window = max((b.gradient_nbytes for b in shared or streamed), default=0)
    for slots in options:
        need = sum(slots) + dedicated + _working_set(problem)
        # The window may shrink to one small gradient; it is a matter of speed, not of fit.
        spare = problem.budget.device - need
        if spare >= 0:
            return _streaming(problem, slots, min(window, spare))
    parts = []
    if shared:
        largest = max(shared, key=lambda b: b.nbytes)
        parts.append(f"{format_bytes(largest.nbytes)} for the largest block ({largest.name})")
    parts.append(f"{format_bytes(dedicated)} for blocks in use throughout")
    parts.append(f"{format_bytes(_working_set(problem))} for the activations of one step")
    needed, allowed = format_apart(need, problem.budget.device)
    raise DoesNotFit(
        f"device memory: {needed} are needed and {allowed} are allowed: {', '.join(parts)}; raise device_memory, "
        f"or use a smaller batch or a shorter sequence",
        tier=Tier.DEVICE.value,
        needed=need,
        allowed=problem.budget.device,
    )


def _slot_options(shared: Sequence[Block]) -> list[tuple[int, ...]]:
    """Slots that would do for ``shared``, the fastest first; the last is the least that is enough."""
    if not shared:
        return [()]
    repeated = _repeated_size(shared)
    larger = max((b.nbytes for b in shared if b.nbytes > repeated), default=0)
    wanted = min(SHARED_SLOTS, sum(b.nbytes <= repeated for b in shared))
    options = [(*([larger] if larger else []), *[repeated] * n) for n in range(wanted, 0, -1)]
    return [*options, (larger,)] if larger else options


def _streaming(problem: Problem, slots: tuple[int, ...], window: int) -> Streaming:
    return Streaming(
        slots=slots,
        prefetch_distance=max(0, min(len(slots) - 1, SHARED_SLOTS - 1)),
        gradient_window=window,
        overlap_update=problem.overlap_update,
    )


def _repeated_size(blocks: Sequence[Block]) -> int:
    """The largest size that counts as repeated: near the size that most blocks have, the larger one of equals."""
    counts = Counter(b.nbytes for b in blocks)
    commonest, count = max(counts.items(), key=lambda item: (item[1], item[0]))
    if count == 1:
        return max(counts)
    return max(size for size in counts if size <= NEAR * commonest)


def _keep(
    problem: Problem, placements: dict[str, Placement], streaming: Streaming
) -> tuple[dict[str, Placement], Streaming]:
    """Makes blocks resident, then dedicated, as long as the device has room."""
    blocks = problem.model.blocks
    repeated = min(streaming.slots, default=0)
    larger = sorted((b for b in blocks if b.nbytes > repeated), key=lambda b: b.nbytes, reverse=True)
    order = [*larger, *(b for b in reversed(blocks) if b.nbytes <= repeated)]
    for home in (RESIDENT, DEDICATED):
        for block in order:
            if placements[block.name].parameters is Tier.DEVICE:
                continue
            trial = {**placements, block.name: Placement(block.name, *home)}
            streamed = [b for b in blocks if trial[b.name].parameters is not Tier.DEVICE]
            slots = _fewer_slots(streaming, streamed)
            if _device_peak(problem, trial, slots) <= problem.budget.device:
                placements, streaming = trial, slots
    return placements, streaming


def _fewer_slots(streaming: Streaming, streamed: Sequence[Block]) -> Streaming:
    """The slots that ``streamed`` still needs: a slot larger than every block left over shrinks or goes."""
    sizes: list[int] = []
    remaining = sorted((b.nbytes for b in streamed), reverse=True)
    for slot in streaming.slots[: len(remaining)]:
        sizes.append(min(slot, remaining[0]))
    slots = tuple(sorted(sizes, reverse=True))
    return replace(streaming, slots=slots, prefetch_distance=min(streaming.prefetch_distance, max(0, len(slots) - 1)))


def _device_peak(problem: Problem, placements: dict[str, Placement], streaming: Streaming) -> int:
    sizes = arenas(problem.model, placements.values(), streaming, problem.state_names)
    return sizes.device + streaming.gradient_window + _working_set(problem)


def _place_on_host(problem: Problem, name: str, placements: dict[str, Placement], streaming: Streaming) -> Plan:
    """Moves states, then parameters, to disk until the host has room. Raises ``DoesNotFit``."""
    tried: list[Arenas] = []
    for homes, how, sizes in _homes(problem, placements, streaming):
        device = sizes.device + how.gradient_window + _working_set(problem)
        if device > problem.budget.device:
            continue  # smaller chunks may take a page more for the states of resident blocks
        if sizes.host <= problem.host_limit and sizes.disk <= problem.disk_limit:
            return _finish(problem, name, tuple(homes.values()), how, sizes, [_kept(homes), *_moved(homes)])
        tried.append(sizes)
    enough_host = [s for s in tried if s.host <= problem.host_limit]
    if enough_host:
        raise _disk_too_small(problem, min(enough_host, key=lambda s: s.disk))
    raise _no_room(problem, min((s for s in tried if s.disk <= problem.disk_limit), key=lambda s: s.host))


def _homes(
    problem: Problem, placements: dict[str, Placement], streaming: Streaming
) -> Iterator[tuple[dict[str, Placement], Streaming, Arenas]]:
    """What may live where beside the device, the fastest first: everything on the host, then more and more on disk,
    from the last block on; then once more with the smallest staging."""
    sizer = Sizer(problem.model, problem.state_names, streaming.update_chunk)
    yield placements, streaming, sizer.arenas(placements.values(), streaming)
    if not problem.disk_limit:
        return
    for chunk in dict.fromkeys((_disk_chunk(problem), SMALLEST_CHUNK)):
        sizer = Sizer(problem.model, problem.state_names, chunk)
        homes, how = placements, replace(streaming, update_chunk=chunk)
        for block in reversed(problem.model.blocks):
            old = homes[block.name]
            if not old.resident and sizer.state_nbytes(block.name):
                homes = {**homes, block.name: replace(old, states=Tier.DISK)}
                yield homes, how, sizer.arenas(homes.values(), how)
        largest = 0
        for block in reversed(problem.model.blocks):
            old = homes[block.name]
            if old.parameters is Tier.HOST:
                homes = {**homes, block.name: replace(old, parameters=Tier.DISK)}
                largest = max(largest, home_nbytes(block))
                how = replace(how, host_slots=(largest, largest))
                yield homes, how, sizer.arenas(homes.values(), how)


def _kept(placements: dict[str, Placement]) -> str:
    resident = sum(p.resident for p in placements.values())
    dedicated = sum(p.parameters is Tier.DEVICE for p in placements.values()) - resident
    streamed = len(placements) - resident - dedicated
    return f"of {len(placements)} blocks {resident} stay on the device, {dedicated} keep a slot, {streamed} stream"


def _moved(placements: dict[str, Placement]) -> list[str]:
    states = sum(p.states is Tier.DISK for p in placements.values())
    homes = sum(home_tier(p) is Tier.DISK for p in placements.values())
    if not states and not homes:
        return []
    return [f"states of {states} blocks and parameters of {homes} are on disk: the host has no room"]


def _disk_chunk(problem: Problem) -> int:
    """Elements of a chunk such that the ring of staging buffers takes a small share of the host."""
    per_element = STATE_ITEMSIZE * (len(problem.state_names) + 1)
    chunk = int(problem.host_limit * DISK_RING_SHARE) // (3 * per_element)
    return max(SMALLEST_CHUNK, min(Streaming().update_chunk, chunk // 1024 * 1024))


def _disk_too_small(problem: Problem, sizes: Arenas) -> DoesNotFit:
    needed, allowed = format_apart(sizes.disk, problem.disk_limit)
    return DoesNotFit(
        f"disk: {needed} are needed and {allowed} are allowed; give the disk budget more room, or raise host_memory",
        tier=Tier.DISK.value,
        needed=sizes.disk,
        allowed=problem.disk_limit,
    )


def _no_room(problem: Problem, sizes: Arenas) -> DoesNotFit:
    disk = "" if problem.disk_limit else ", or give disk=PATH:SIZE for the optimizer states"
    needed, allowed = format_apart(sizes.host, problem.host_limit)
    return DoesNotFit(
        f"host memory: {needed} are needed and {allowed} are allowed: "
        f"{format_bytes(sizes.host_parameters)} parameters, {format_bytes(sizes.host_gradients)} gradients, "
        f"{format_bytes(sizes.host_states)} optimizer states, {format_bytes(sizes.host_staging)} staging; raise "
        f"host_memory{disk}",
        tier=Tier.HOST.value,
        needed=sizes.host,
        allowed=problem.host_limit,
    )


def _finish(
    problem: Problem,
    name: str,
    placements: tuple[Placement, ...],
    streaming: Streaming,
    sizes: Arenas,
    reasons: list[str],
) -> Plan:
    if not problem.footprint.measured:
        why = problem.footprint.note or "no batch was given"
        reasons = [*reasons, f"the activations are not known beforehand ({why}): device memory left over is theirs"]
    return Plan(
        planner=name,
        budget=problem.budget,
        placements=placements,
        streaming=streaming,
        device=sizes.device + streaming.gradient_window + _working_set(problem),
        host=sizes.host,
        disk=sizes.disk,
        reasons=tuple(reasons),
    )
