"""Which homes are on the host and which on disk.

States go to disk before parameters: they cross the disk's link once a step in each direction, parameters twice in
one. The last blocks go first: the next forward asks for them last, so that their updates have the most time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from forebay.arenas import home_nbytes
from forebay.layout import STATE_ITEMSIZE
from forebay.memory import Tier
from forebay.planners.bench import Bench
from forebay.planners.parts import Draft
from forebay.planners.problem import Problem
from forebay.planners.refusals import disk_too_small, host_too_small
from forebay.plans import Placement, Streaming
from forebay.remedies import Remedy
from forebay.units import format_bytes

__all__ = ["at_home", "with_a_disk"]

DISK_RING_SHARE = 1 / 16
"""Share of the host budget that the buffers for states on disk may take."""

SMALLEST_CHUNK = 64 * 1024
"""Elements: the least that one update job handles."""


def at_home(bench: Bench, draft: Draft, *, whatever_device: bool = False) -> Draft:
    """``draft`` with as much on disk as the host has no room for. Raises ``DoesNotFit`` for the host or the disk;
    ``whatever_device`` leaves the device's own limit out."""
    problem = bench.problem
    allowed = {tier: problem.limit(tier) for tier in (Tier.DEVICE, Tier.HOST, Tier.DISK)}
    beside = bench.beside(draft)
    tried = []
    for choice in _homes(bench, draft):
        sizes = bench.arenas(choice)
        if sizes.device + beside > allowed[Tier.DEVICE] and not whatever_device:
            continue  # smaller chunks may take a page more for the states of resident blocks
        if sizes.host <= allowed[Tier.HOST] and sizes.disk <= allowed[Tier.DISK]:
            return choice
        tried.append(sizes)
    enough_host = [s for s in tried if s.host <= allowed[Tier.HOST]]
    if enough_host:
        raise disk_too_small(bench, min(enough_host, key=lambda s: s.disk))
    raise host_too_small(bench, min((s for s in tried if s.disk <= allowed[Tier.DISK]), key=lambda s: s.host))


def with_a_disk(bench: Bench, draft: Draft) -> Remedy | None:
    """The disk with which ``draft`` fits on the host; None if no disk is large enough."""
    for choice in _homes(bench, draft, any_disk=True):
        sizes = bench.arenas(choice)
        if sizes.disk and sizes.host <= bench.problem.limit(Tier.HOST):
            return Remedy(
                Tier.DISK.value, sizes.disk, bench.problem.limit(Tier.DISK), f"a disk of {format_bytes(sizes.disk)}"
            )
    return None


def _homes(bench: Bench, draft: Draft, *, any_disk: bool = False) -> Iterator[Draft]:
    """What may live where beside the device, the fastest first: everything on the host, then more and more on disk,
    from the last block on; then once more with the smallest staging."""
    yield draft
    if not bench.problem.limit(Tier.DISK) and not any_disk:
        return
    for chunk in dict.fromkeys((_disk_chunk(bench.problem), SMALLEST_CHUNK)):
        sizer = bench.sizer(chunk)
        homes = {p.block: p for p in draft.placements}
        how = replace(draft.streaming, update_chunk=chunk)
        for block in reversed(bench.model.blocks):
            old = homes[block.name]
            if not old.resident and sizer.state_nbytes(block.name):
                homes[block.name] = replace(old, states=Tier.DISK)
                yield _moved(draft, homes, how)
        largest = 0
        for block in reversed(bench.model.blocks):
            old = homes[block.name]
            if old.parameters is Tier.HOST:
                homes[block.name] = replace(old, parameters=Tier.DISK)
                largest = max(largest, home_nbytes(block))
                how = replace(how, host_slots=(largest, largest))
                yield _moved(draft, homes, how)


def _moved(draft: Draft, homes: dict[str, Placement], how: Streaming) -> Draft:
    return replace(draft, placements=tuple(homes.values()), streaming=how)


def _disk_chunk(problem: Problem) -> int:
    """Elements of a chunk such that the ring of staging buffers takes a small share of the host."""
    per_element = STATE_ITEMSIZE * (len(problem.state_names) + 1)
    chunk = int(problem.limit(Tier.HOST) * DISK_RING_SHARE) // (3 * per_element)
    return max(SMALLEST_CHUNK, min(Streaming().update_chunk, chunk // 1024 * 1024))
