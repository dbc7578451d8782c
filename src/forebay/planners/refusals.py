"""Refusals: which tier is too small, by how much, and what would fit instead. All figures are computed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace

from forebay.arenas import Arenas, Sizer, gradient_nbytes
from forebay.errors import CannotServe, DoesNotFit
from forebay.layout import align, states_nbytes
from forebay.loss import VOCABULARY
from forebay.memory import Tier
from forebay.planners.bench import Bench
from forebay.planners.in_backward import passed, usable
from forebay.planners.parts import KEPT, Draft, Level, all_resident
from forebay.plans import Plan, Update
from forebay.remedies import Remedy
from forebay.states import BLOCK
from forebay.units import format_apart, format_bytes, format_enough, parse_bytes

__all__ = ["device_too_small", "disk_too_small", "expect_there_in_backward", "host_too_small", "with_remedies"]

SMALLER_OPTIMIZERS = (("sgd with momentum", ("momentum_buffer",)), ("sgd", ()))
"""Optimizers with fewer states per element, by name."""

PANELS = 8
"""Parts of a weight in tiles of which one is there at a time, where a refusal proposes a size."""

LEAST_SHARE = 0.01
"""A batch smaller than this share of the one asked for is no remedy."""


def expect_there_in_backward(bench: Bench, plan: Plan) -> None:
    """Raises ``CannotServe`` for a plan under which a block streams that the model's own checkpoint reads itself in
    backward: nothing says then that the block is needed (``Trace.read_in_backward``)."""
    trace = bench.problem.trace
    asked = () if trace is None else trace.read_in_backward
    away = [p.block for p in plan.placements if p.block in asked and not p.resident]
    if not away:
        return
    (remedy,) = _all_on_device(bench)
    raise CannotServe(
        f"the model checkpoints a function that reads parameters of {away[0]} itself, outside of its forward, and "
        f"in backward nothing says when to bring them; take that checkpoint out of the model (a plan recomputes "
        f"where it gains by it), call the module inside it, or give {remedy.words}",
        nearest=(remedy,),
    )


def device_too_small(bench: Bench, draft: Draft) -> DoesNotFit:
    """``draft`` is the least that would do and does not fit on the device."""
    problem = bench.problem
    need, limit = bench.device(draft), problem.limit(Tier.DEVICE)
    parts = []
    shared = bench.streamed(draft)
    resident = sum(b.nbytes for b in bench.model.blocks if b.name in draft.resident)
    if shared:
        largest = max(shared, key=lambda b: b.nbytes)
        parts.append(f"{format_bytes(largest.nbytes)} for the largest block ({largest.name})")
    if resident:
        sizes = bench.arenas(draft)
        parts.append(f"{format_bytes(sizes.device)} for parameters, gradients and states")
    else:
        held = sum(b.nbytes for b in bench.model.blocks if b.held)
        parts.append(f"{format_bytes(held)} for blocks in use throughout")
    again = f" ({len(draft.recompute)} blocks recomputed)" if draft.recompute else ""
    parts.append(f"{format_bytes(bench.beside(draft))} for the activations of one step{again}")
    needed, allowed = format_apart(need, limit)
    return DoesNotFit(
        f"device memory: {needed} are needed and {allowed} are allowed: {', '.join(parts)}; raise device_memory, "
        f"or use a smaller batch or a shorter sequence",
        tier=Tier.DEVICE.value,
        needed=need,
        allowed=limit,
    )


def disk_too_small(bench: Bench, sizes: Arenas) -> DoesNotFit:
    """``sizes`` is the least of the disk that the host has room for."""
    limit = bench.problem.limit(Tier.DISK)
    needed, allowed = format_apart(sizes.disk, limit)
    return DoesNotFit(
        f"disk: {needed} are needed and {allowed} are allowed; give the disk budget more room, or raise host_memory",
        tier=Tier.DISK.value,
        needed=sizes.disk,
        allowed=limit,
    )


def host_too_small(bench: Bench, sizes: Arenas) -> DoesNotFit:
    """``sizes`` is the least of the host that the disk has room for."""
    disk = "" if bench.problem.limit(Tier.DISK) else ", or give disk=PATH:SIZE for the optimizer states"
    unsent = f", {format_bytes(sizes.host_residuals)} of gradients that are not sent" if sizes.host_residuals else ""
    limit = bench.problem.limit(Tier.HOST)
    needed, allowed = format_apart(sizes.host, limit)
    return DoesNotFit(
        f"host memory: {needed} are needed and {allowed} are allowed: "
        f"{format_bytes(sizes.host_parameters)} parameters, {format_bytes(sizes.host_gradients)} gradients, "
        f"{format_bytes(sizes.host_states)} optimizer states, {format_bytes(sizes.host_activations)} activations, "
        f"{format_bytes(sizes.host_staging)} staging{unsent}; raise host_memory{disk}",
        tier=Tier.HOST.value,
        needed=sizes.host,
        allowed=limit,
    )


def with_remedies(bench: Bench, error: DoesNotFit, draft: Draft, more: Iterable[Remedy] = ()) -> DoesNotFit:
    """``error`` with the nearest things that would fit, ``more`` among them; ``draft`` is what it speaks of."""
    tier = Tier(error.tier)
    remedies = [Remedy(tier.value, error.needed, error.allowed, f"{_AS_ASKED[tier]} {format_enough(error.needed)}")]
    if tier is Tier.DEVICE:
        remedies.extend(_smaller_batch(bench, draft))
        remedies.extend(_single_modules(bench, draft))
        remedies.extend(_tiles(bench, draft))
    else:
        remedies.extend(_gradients_used_up(bench, error, draft))
        remedies.extend(_all_on_device(bench))
    remedies.extend(more)
    remedies.extend(_smaller_optimizer(bench, draft, tier))
    message = str(error)
    remedies.sort(key=lambda remedy: remedy.besides)
    if bench.problem.trace is not None:
        instead = "; or ".join(remedy.words for remedy in remedies if not remedy.besides)
        message += f". What would fit: {'; '.join((instead, *(r.words for r in remedies if r.besides)))}"
    return DoesNotFit(message, tier=error.tier, needed=error.needed, allowed=error.allowed, nearest=tuple(remedies))


_AS_ASKED = {Tier.DEVICE: "device_memory", Tier.HOST: "host_memory", Tier.DISK: "a disk of"}


def _smaller_batch(bench: Bench, draft: Draft) -> Iterator[Remedy]:
    """The batch whose activations there is room for, as a share of the one asked for: in proportion to it. Attention
    that is materialised shrinks faster than a shorter sequence, so the estimate is on the safe side."""
    blocks = bench.model.blocks
    gradient = max((p.nbytes for b in blocks for p in b.parameters if p.trainable), default=0)
    fixed = bench.arenas(draft).device + bench.model.buffer_nbytes + gradient
    scaling = bench.device(draft) - fixed
    room = bench.problem.limit(Tier.DEVICE) - fixed
    if scaling <= 0 or room < LEAST_SHARE * scaling:
        return
    share = room / scaling
    yield Remedy(
        "batch",
        bench.device(draft),
        bench.problem.limit(Tier.DEVICE),
        f"a batch or a sequence of {int(share * 100)} % of this one (an estimate: activations in proportion to it)",
        estimate=True,
        share=share,
    )


def _single_modules(bench: Bench, draft: Draft) -> Iterator[Remedy]:
    """Blocks of single modules, where the largest of them is so much smaller than the largest block that it would do.
    What takes several modules to run again is kept then."""
    largest, owned = max(draft.streaming.slots, default=0), Counter[str]()
    for block in bench.streamed(draft):
        for parameter in block.parameters:
            owned[parameter.name.rpartition(".")[0]] += align(parameter.nbytes)
    name, nbytes = max(owned.items(), key=lambda item: item[1], default=("", largest))
    limit = bench.problem.limit(Tier.DEVICE)
    kept = replace(draft, recompute=(), activations=(), streaming=KEPT.through(draft.streaming))
    need = bench.device(kept) - largest + nbytes
    if nbytes < largest and need <= limit:
        words = f"blocks of single modules, named in blocks= of forebay.prepare: the largest, {name}, takes "
        yield Remedy("blocks", need, limit, f"{words}{format_bytes(nbytes)} (an estimate)", estimate=True)


def _tiles(bench: Bench, draft: Draft) -> Iterator[Remedy]:
    """The largest weight in tiles, where it is what does not fit: a part of it, and tiles, are in the place of the slot
    for its block and of its gradient. Other weights that are larger than a part go with it."""
    shared, limit = bench.streamed(draft), bench.problem.limit(Tier.DEVICE)
    weights = [parameter for block in shared for parameter in block.parameters if len(parameter.shape) == 2]
    weight = max(weights, key=lambda parameter: parameter.nbytes, default=None)
    parts = 0 if weight is None else min(PANELS, min(weight.shape) // VOCABULARY)
    if weight is None or parts < 2:
        return
    size = format_enough(weight.nbytes // parts)
    panel = parse_bytes(size)
    tile = panel // parts
    left = [sum(align(p.nbytes) for p in b.parameters if len(p.shape) != 2 or p.nbytes <= panel) for b in shared]
    gradient = min(weight.nbytes if weight.trainable else 0, bench.beside(draft))
    slot = max(draft.streaming.slots, default=0)
    need = bench.device(draft) - slot - gradient + panel + max(tile, *left) + tile
    if need <= limit:
        words = f"forebay.tile(model, '{size}') (--tile {size}), which cuts {weight.name}, "
        yield Remedy(
            "tile", need, limit, f"{words}{format_bytes(weight.nbytes)}, into tiles (an estimate)", estimate=True
        )


def _gradients_used_up(bench: Bench, error: DoesNotFit, draft: Draft) -> Iterator[Remedy]:
    """Updates in backward, for who can do without gradients after it: the host needs as much less, wherever all else
    is at home."""
    problem, liveness = bench.problem, bench.liveness
    if error.tier != Tier.HOST.value or liveness is None or problem.update == "backward" or problem.micro_batches > 1:
        return
    early = passed(bench.model, draft, usable(liveness))
    names = early.updated(Update.BACKWARD)
    spared = sum(gradient_nbytes(block) for block in bench.model.blocks if block.name in names)
    need = error.needed - spared + sum(early.streaming.gradient_slots)
    if names and need <= error.allowed:
        words = f"update='backward', where nobody clips gradients or reads them: {format_bytes(need)} there"
        yield Remedy("update", need, error.allowed, words)


def _all_on_device(bench: Bench) -> Iterator[Remedy]:
    """The device memory with which nothing is asked of host and disk."""
    draft = min((all_resident(bench.model, level) for level in (KEPT, Level(bench.recomputable))), key=bench.device)
    need = bench.device(draft)
    yield Remedy(
        Tier.DEVICE.value,
        need,
        bench.problem.limit(Tier.DEVICE),
        f"device_memory {format_enough(need)}, with everything on the device",
    )


def _smaller_optimizer(bench: Bench, draft: Draft, tier: Tier) -> Iterator[Remedy]:
    """Optimizers with fewer states with which the same placements fit. One without any is not for updates where states
    are stored."""
    problem, stored = bench.problem, draft.updated(Update.STORAGE)
    for name, states in SMALLER_OPTIMIZERS:
        if states_nbytes(states, BLOCK) >= states_nbytes(problem.state_names, BLOCK) or (stored and not states):
            continue
        sizer = Sizer(bench.model, states, draft.streaming.update_chunk)
        settled = bench.in_backward(draft)
        sizes = sizer.arenas(settled.placements, settled.streaming)
        fits = all(n <= problem.limit(t) for t, n in ((Tier.HOST, sizes.host), (Tier.DISK, sizes.disk)))
        device = bench.beside(draft) + sizes.device
        if not fits or device > problem.limit(Tier.DEVICE):
            continue
        need = {Tier.DEVICE: device, Tier.HOST: sizes.host, Tier.DISK: sizes.disk}[tier]
        yield Remedy(
            "optimizer",
            need,
            problem.limit(tier),
            f"the optimizer {name}, which needs {format_bytes(need)} there",
            optimizer=name,
        )
