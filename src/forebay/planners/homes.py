"""Which homes are on the host and which on disk.

States go to disk before parameters: they cross the disk's link once a step in each direction, parameters twice in
one. The last blocks go first: the next forward asks for them last, so that their updates have the most time.

Activations that move cross the disk's link once in each direction too, as states do. Those of the blocks that run
first go first: backward asks for them last. Whether they go before the states or after them is for the caller to try.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import chain, islice
from math import ceil, inf

from forebay.arenas import UPDATE_RING, Arenas, home_nbytes
from forebay.errors import DoesNotFit
from forebay.layout import STATE_ITEMSIZE
from forebay.memory import Tier
from forebay.planners.bench import Bench
from forebay.planners.parts import Draft, selected
from forebay.planners.problem import Problem
from forebay.planners.refusals import disk_too_small, host_too_small
from forebay.plans import Placement, Streaming, Update
from forebay.scheduling.activations import host_nbytes
from forebay.states import element_nbytes
from forebay.treatments import Fate

__all__ = [
    "Tenant",
    "all_activations_on_disk",
    "at_home",
    "at_home_anew",
    "at_storage",
    "least_at_storage",
    "more_on_disk",
    "on_host",
    "with_a_disk",
]

DISK_RING_SHARE = 1 / 16
"""Share of the host budget that the buffers for states on disk may take."""

SMALLEST_CHUNK = 64 * 1024
"""Elements: the least that one update job handles."""

PARAMETERS_ON_DISK = (0.5, 0.75, 1.0)
"""Shares of the blocks whose parameters are tried on disk where there is no need for it."""

STRIDE = 8
"""Of choices with more and more on disk, every so many are looked at until one fits."""

ACTIVATION_RING = 4
"""Of the largest tensor that goes to disk, so many fit into the ring on the host: one comes, one is written, and as
many wait."""


class Tenant(StrEnum):
    """What may live on disk."""

    STATES = "states"
    ACTIVATIONS = "activations"
    PARAMETERS = "parameters"


def at_home(bench: Bench, draft: Draft, *, whatever_device: bool = False, first: Tenant = Tenant.STATES) -> Draft:
    """``draft``, of which no more than activations are on disk, with as much there as the host has no room for;
    ``first`` is what goes first. Raises ``DoesNotFit`` for the host or the disk; ``whatever_device`` leaves out the
    limit of the device."""
    problem = bench.problem
    allowed = {tier: problem.limit(tier) for tier in (Tier.HOST, Tier.DISK)}
    # Smaller chunks may take a page more for the states of resident blocks.
    room = inf if whatever_device else problem.limit(Tier.DEVICE) - bench.beside(draft)
    tried = []
    for stride in (STRIDE, 1):
        for choices in _passes(bench, draft, first):
            while some := list(islice(choices, stride)):
                if stride > 1 and bench.arenas(some[-1]).host > allowed[Tier.HOST]:
                    continue  # then mostly those before it too, of which less is on disk
                for choice in some:
                    sizes = bench.arenas(choice)
                    if sizes.device <= room and sizes.host <= allowed[Tier.HOST] and sizes.disk <= allowed[Tier.DISK]:
                        return choice
                    if stride == 1 and sizes.device <= room:
                        tried.append(sizes)
    raise _none_of(bench, tried, allowed[Tier.DISK])


def _none_of(bench: Bench, tried: Sequence[Arenas], disk: float) -> DoesNotFit:
    """The refusal where neither host nor a disk of so many bytes has room for any of ``tried``: the least that is
    enough of the one, where there is as much of the other."""
    enough_host = [s for s in tried if s.host <= bench.problem.limit(Tier.HOST)]
    if enough_host:
        return disk_too_small(bench, min(enough_host, key=lambda s: s.disk))
    # A draft that has activations on disk from the start may have too many there, whatever else is.
    return host_too_small(bench, min([s for s in tried if s.disk <= disk] or tried, key=lambda s: s.host))


def at_home_anew(bench: Bench, draft: Draft) -> Draft | None:
    """``draft`` with what goes to disk decided anew; None where it has no room at home, or on the device, or where its
    window for updates on the device is one for smaller chunks than would be tried."""
    there = on_host(bench, draft)
    small = draft.streaming.update_chunk < there.streaming.update_chunk
    if (small and draft.updated(Update.DEVICE)) or not bench.fits_device(there):
        return None
    try:
        return at_home(bench, there)
    except DoesNotFit:
        return None


def with_a_disk(bench: Bench, draft: Draft) -> int | None:
    """The bytes of the disk with which ``draft`` fits on the host; None if no disk is large enough."""
    room = bench.problem.limit(Tier.DEVICE) - bench.beside(draft)
    for choice in chain.from_iterable(_passes(bench, draft, Tenant.STATES, any_disk=True)):
        sizes = bench.arenas(choice)
        if sizes.disk and sizes.device <= room and sizes.host <= bench.problem.limit(Tier.HOST):
            return sizes.disk
    return None


def on_host(bench: Bench, draft: Draft) -> Draft:
    """``draft`` before anything went to disk."""
    placements = tuple(
        replace(
            p,
            parameters=Tier.HOST if p.parameters is Tier.DISK else p.parameters,
            states=Tier.HOST if p.states is Tier.DISK else p.states,
            # What is updated beside the storage has its states there.
            update=Update.STEP if p.update is Update.STORAGE else p.update,
        )
        for p in draft.placements
    )
    usual = Streaming()
    streaming = replace(
        draft.streaming,
        host_slots=(),
        update_chunk=usual.update_chunk,
        disk_reads=usual.disk_reads,
        disk_writes=usual.disk_writes,
        disk_copies=usual.disk_copies,
        checksums=usual.checksums,
    )
    there = replace(draft, placements=placements, streaming=streaming)
    return _activations_on_disk(bench, there, (), ring=0) if streaming.disk_activations else there


def all_activations_on_disk(bench: Bench, draft: Draft) -> Draft:
    """``draft`` with everything on disk that it moves, through a ring of the usual size."""
    moving = [block for selection in draft.activations for block in selection.blocks]
    return _activations_on_disk(bench, draft, moving, ACTIVATION_RING) if draft.streaming.host_activations else draft


def more_on_disk(bench: Bench, draft: Draft) -> Iterator[Draft]:
    """``draft`` with states and parameters of all blocks that do not stay on disk; with those of fewer and fewer
    parameters, and at last the states alone. A block with a slot of its own would keep its home on the host: where it
    can, it shares that slot with all others."""
    if not bench.problem.limit(Tier.DISK):
        return
    draft = on_host(bench, draft)
    dedicated = {p.block for p in draft.placements if p.parameters is Tier.DEVICE and not p.resident}
    sharing = {b.name: b.nbytes for b in bench.model.blocks if b.name in dedicated and not b.held}
    slots = tuple(sorted((*draft.streaming.slots, *sharing.values()), reverse=True))
    homes = (replace(p, parameters=Tier.HOST) if p.block in sharing else p for p in draft.placements)
    draft = replace(draft, placements=tuple(homes), streaming=replace(draft.streaming, slots=slots))
    staging = _Staging(_disk_chunk(bench.problem), ACTIVATION_RING)
    states = list(_states(bench, draft, staging))
    parameters = list(_parameters(bench, states[-1] if states else draft, staging))
    counts = {ceil(share * len(parameters)) for share in PARAMETERS_ON_DISK if parameters}
    yield from (parameters[count - 1] for count in sorted(counts, reverse=True))
    yield from states[-1:]


def at_storage(bench: Bench, draft: Draft, *, any_disk: bool = False) -> Draft:
    """``draft``, of which nothing is on disk, with the states of all blocks that do not stay there, and updated there;
    and with as many parameters as the host has no room for. As it is where there are no states. Raises ``DoesNotFit``
    for the host or the disk; ``any_disk`` leaves the limit of that out."""
    host, disk = bench.problem.limit(Tier.HOST), inf if any_disk else bench.problem.limit(Tier.DISK)
    tried = []
    for staging in (_Staging(_disk_chunk(bench.problem), ACTIVATION_RING), _Staging(SMALLEST_CHUNK, 1)):
        there = _beside_storage(bench, draft, staging)
        if not there.updated(Update.STORAGE):
            return draft
        for choice in (there, *_parameters(bench, there, staging)):
            sizes = bench.arenas(choice)
            if sizes.host <= host and sizes.disk <= disk:
                return choice
            tried.append(sizes)
    raise _none_of(bench, tried, disk)


def least_at_storage(bench: Bench, draft: Draft) -> Draft:
    """``at_storage`` with the smallest staging, and whatever parameters are on the host there, if it fits or not."""
    return _beside_storage(bench, draft, _Staging(SMALLEST_CHUNK, 1))


def _beside_storage(bench: Bench, draft: Draft, staging: _Staging) -> Draft:
    """``draft`` with all states that are on the host on disk, and updated there."""
    *_, there = draft, *_states(bench, draft, staging)
    return there.updating(Update.STORAGE, [p.block for p in there.placements if p.states is Tier.DISK])


@dataclass(frozen=True)
class _Staging:
    """What passes through the host on its way to disk: elements of an update job; of activations, how many tensors of
    the largest size fit into the ring."""

    chunk: int
    ring: int


def _passes(bench: Bench, draft: Draft, first: Tenant, *, any_disk: bool = False) -> Iterator[Iterator[Draft]]:
    """What may live where beside the device, the fastest first: everything on the host, then more and more on disk;
    then that once more with the smallest staging."""
    yield iter((draft,))
    if bench.problem.limit(Tier.DISK) or any_disk:
        for staging in (_Staging(_disk_chunk(bench.problem), ACTIVATION_RING), _Staging(SMALLEST_CHUNK, 1)):
            yield _pass(bench, draft, first, staging)


def _pass(bench: Bench, draft: Draft, first: Tenant, staging: _Staging) -> Iterator[Draft]:
    """More and more on disk."""
    order = sorted((Tenant.STATES, Tenant.ACTIVATIONS), key=lambda tenant: tenant is not first)
    for tenant in (*order, Tenant.PARAMETERS):
        for more in _MORE[tenant](bench, draft, staging):
            yield more
            draft = more


def _states(bench: Bench, draft: Draft, staging: _Staging) -> Iterator[Draft]:
    """The states of more and more blocks on disk."""
    sizer = bench.sizer(staging.chunk)
    homes = {p.block: p for p in draft.placements}
    how = replace(_suiting_the_disk(bench, draft.streaming), update_chunk=staging.chunk)
    for block in reversed(bench.model.blocks):
        old = homes[block.name]
        if not old.resident and sizer.state_nbytes(block.name):
            homes[block.name] = replace(old, states=Tier.DISK)
            yield _moved(draft, homes, how)


def _parameters(bench: Bench, draft: Draft, staging: _Staging) -> Iterator[Draft]:
    """The parameters of more and more blocks on disk."""
    homes = {p.block: p for p in draft.placements}
    how = replace(_suiting_the_disk(bench, draft.streaming), update_chunk=staging.chunk)
    largest = 0
    for block in reversed(bench.model.blocks):
        old = homes[block.name]
        if old.parameters is Tier.HOST:
            homes[block.name] = replace(old, parameters=Tier.DISK)
            largest = max(largest, home_nbytes(block))
            how = replace(how, host_slots=(largest, largest))
            yield _moved(draft, homes, how)


def _suiting_the_disk(bench: Bench, streaming: Streaming) -> Streaming:
    """``streaming`` with the calls that suit the disk of the machine, and the copies and checksums that are asked
    for."""
    asked, machine = bench.problem, bench.problem.machine
    streaming = replace(streaming, disk_copies=asked.disk_copies, checksums=asked.checksums)
    if machine is None or machine.disk is None:
        return streaming
    return replace(streaming, disk_reads=machine.disk.reads, disk_writes=machine.disk.writes)


def _moved(draft: Draft, homes: dict[str, Placement], how: Streaming) -> Draft:
    return replace(draft, placements=tuple(homes.values()), streaming=how)


def _activations(bench: Bench, draft: Draft, staging: _Staging) -> Iterator[Draft]:
    """The activations of as many blocks on disk as it takes, if that is enough; of all that move any."""
    if not draft.streaming.host_activations or bench.liveness is None:
        return
    routings = [_nbytes_by_block(bench, draft, routing) for routing in range(1 + len(bench.liveness.extremes))]
    blocks = list(dict.fromkeys(block for nbytes in routings for block in nbytes))
    everything = _activations_on_disk(bench, draft, blocks, staging.ring)
    room = bench.problem.limit(Tier.HOST) - bench.arenas(everything).host
    for count in range(1, len(blocks)):
        if max(sum(nbytes.get(block, 0) for block in blocks[count:]) for nbytes in routings) <= room:
            yield _activations_on_disk(bench, draft, blocks[:count], staging.ring)
            break
    yield everything


def _nbytes_by_block(bench: Bench, draft: Draft, routing: int) -> dict[str, int]:
    """Bytes on the host of what each block moves there, in the order of the forward; ``routing`` 0: of the trace."""
    found: dict[str, int] = {}
    if bench.liveness is not None:
        liveness = (bench.liveness, *bench.liveness.extremes)[routing]
        for move in liveness.profile(draft.recompute, draft.activations).moves:
            if move.fate is Fate.OFFLOAD:
                found[move.block] = found.get(move.block, 0) + host_nbytes(move.moved)
    return found


def _activations_on_disk(bench: Bench, draft: Draft, blocks: Collection[str], ring: int) -> Draft:
    """``draft`` with the activations that ``blocks`` move on disk, and all others that move on the host. ``ring``: how
    many of the largest fit into the ring."""
    liveness, away = bench.liveness, frozenset(blocks)
    if liveness is None or not draft.activations:
        return draft
    treatments = {
        block: tuple(
            one if one.fate is Fate.KEEP else replace(one, fate=Fate.DISK if block in away else Fate.OFFLOAD)
            for one in selection.treatments
        )
        for selection in draft.activations
        for block in selection.blocks
    }
    chosen = selected(liveness.trace, treatments)
    streaming = replace(
        _suiting_the_disk(bench, draft.streaming) if away else draft.streaming,
        host_activations=liveness.host_activations(draft.recompute, chosen),
        disk_activations=liveness.disk_activations(draft.recompute, chosen),
        disk_window=ring * liveness.disk_window(draft.recompute, chosen),
    )
    return replace(draft, activations=chosen, streaming=streaming)


_MORE: dict[Tenant, Callable[[Bench, Draft, _Staging], Iterator[Draft]]] = {
    Tenant.STATES: _states,
    Tenant.ACTIVATIONS: _activations,
    Tenant.PARAMETERS: _parameters,
}


def _disk_chunk(problem: Problem) -> int:
    """Elements of a chunk such that the ring of staging buffers takes a small share of the host."""
    per_element = STATE_ITEMSIZE + ceil(element_nbytes(problem.state_names))
    chunk = int(problem.limit(Tier.HOST) * DISK_RING_SHARE) // (UPDATE_RING * per_element)
    return max(SMALLEST_CHUNK, min(Streaming().update_chunk, chunk // 1024 * 1024))
