"""The parts that plans are put together from: tiers of a block, slots, which blocks may recompute."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from forebay.layout import is_drawn
from forebay.lowering.index import are_apart
from forebay.memory import Tier
from forebay.model import Block, Model
from forebay.planners.problem import Problem
from forebay.plans import Placement, Plan, Streaming, Update, updated
from forebay.trace import Phase, Trace, Visit
from forebay.treatments import Selection, Treatment

__all__ = [
    "DEDICATED",
    "HOSTED",
    "KEPT",
    "RESIDENT",
    "Draft",
    "Level",
    "all_resident",
    "all_streamed",
    "delays",
    "fewer_slots",
    "gives_up_nothing",
    "keep_order",
    "omissions",
    "recomputable",
    "repeated",
    "repeated_size",
    "roomy",
    "roundings",
    "selected",
    "sizes_at_once",
    "slot_options",
    "slots_for",
    "streaming_through",
    "turns",
]

SHARED_SLOTS = 3
"""Slots for the repeated blocks: one computes, one is being fetched, one is still being read."""

NEAR = 1.25
"""A block of up to this many times the commonest size still counts as a repeated one."""

RESIDENT = (Tier.DEVICE, Tier.DEVICE, Tier.DEVICE)
HOSTED = (Tier.HOST, Tier.HOST, Tier.HOST)
DEDICATED = (Tier.DEVICE, Tier.HOST, Tier.HOST)


@dataclass(frozen=True)
class Level:
    """What happens to activations: the blocks that recompute, in the order of the forward, and what is treated
    otherwise. ``window`` are the bytes that may be on their way to the host, and as many on their way back; ``moved``
    are those that a micro-batch moves."""

    recompute: tuple[str, ...] = ()
    activations: tuple[Selection, ...] = ()
    window: int = 0
    moved: int = 0

    def through(self, streaming: Streaming) -> Streaming:
        """``streaming`` with the windows and the arena on the host that the level needs, and nothing on disk."""
        window, moved = self.window, self.moved
        moving = replace(streaming, offload_window=window, reload_window=window, host_activations=moved)
        return replace(moving, disk_activations=0, disk_window=0)


KEPT = Level()
"""Everything that is saved stays on the device."""


@dataclass(frozen=True)
class Draft:
    """What a planner decides; the rest of a plan follows from it. ``placements`` are in the order of the model."""

    placements: tuple[Placement, ...]
    streaming: Streaming
    recompute: tuple[str, ...] = ()
    activations: tuple[Selection, ...] = ()

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Of all that is decided: asked for again and again, and there may be hundreds of placements."""
        return hash((self.placements, self.streaming, self.recompute, self.activations))

    @classmethod
    def of(cls, plan: Plan) -> Draft:
        """What ``plan`` decided."""
        return cls(plan.placements, plan.streaming, plan.recompute, plan.activations)

    @property
    def level(self) -> Level:
        """What happens to activations, where nothing that moves goes to disk."""
        how = self.streaming
        return Level(self.recompute, self.activations, how.offload_window, how.host_activations)

    def at(self, level: Level) -> Draft:
        """The draft with the activations of ``level``."""
        streaming = level.through(self.streaming)
        return replace(self, streaming=streaming, recompute=level.recompute, activations=level.activations)

    @property
    def plain(self) -> Draft:
        """The draft with all updates on the host and when their step asks, but for those of blocks that stay."""
        placements = tuple(p.updating(Update.STEP) for p in self.placements)
        streaming = replace(self.streaming, update_window=0, gradient_density=None)
        return replace(self, placements=placements, streaming=streaming)

    @property
    def resident(self) -> frozenset[str]:
        """Names of the blocks that stay on the device as a whole."""
        return frozenset(p.block for p in self.placements if p.resident)

    def updated(self, how: Update) -> tuple[str, ...]:
        """The blocks that are updated so."""
        return updated(self.placements, how)

    def updating(self, how: Update, blocks: Collection[str]) -> Draft:
        """The draft with ``blocks``, and no others, updated so: others that were are updated when their step asks."""

        def chosen(placement: Placement) -> Update:
            if placement.block in blocks:
                return how
            return Update.STEP if placement.update is how else placement.update

        blocks = frozenset(blocks)
        return replace(self, placements=tuple(p.updating(chosen(p)) for p in self.placements))

    def placed(self, block: str, home: tuple[Tier, Tier, Tier]) -> Draft:
        """The draft with ``block`` at ``home``, updated when its step asks."""
        moved = tuple(Placement(block, *home) if p.block == block else p for p in self.placements)
        return replace(self, placements=moved)


def all_resident(model: Model, level: Level = KEPT) -> Draft:
    """All blocks stay on the device."""
    homes = tuple(Placement(b.name, *RESIDENT) for b in model.blocks)
    return Draft(homes, level.through(Streaming()), level.recompute, level.activations)


def all_streamed(model: Model, streaming: Streaming, level: Level = KEPT) -> Draft:
    """Every block streams; one that is in use throughout keeps a slot of its own."""
    homes = tuple(Placement(b.name, *(DEDICATED if b.held else HOSTED)) for b in model.blocks)
    return Draft(homes, level.through(streaming), level.recompute, level.activations)


def delays(streaming: Streaming) -> tuple[str, ...]:
    """What delayed updates do to the numbers, in words (``Plan.changes_numbers``)."""
    if streaming.delay_after is None:
        return ()
    late = "the update of each step comes a step late: forward and backward see parameters without it"
    return (f"{late} (delayed parameter update, from step {streaming.delay_after + 1} on)",)


def turns(streaming: Streaming) -> tuple[str, ...]:
    """What updates in turns do to the numbers, in words (``Plan.changes_numbers``)."""
    if streaming.update_every == 1:
        return ()
    return (
        f"blocks off the device are updated in turns, each once in {streaming.update_every} steps with the sum of its "
        f"gradients: forward and backward see parameters without those of up to {streaming.update_every - 1} steps",
    )


def omissions(streaming: Streaming) -> tuple[str, ...]:
    """What gradients that are not sent whole do to the numbers, in words (``Plan.changes_numbers``)."""
    density = streaming.gradient_density
    if density is None or density == 1:
        return ()
    most = f"of each gradient the largest {100 * density:.4g} % of its elements go to the update"
    return (f"{most}, and the rest to the gradient of the next step (top-k compression with error feedback)",)


def roundings(model: Model) -> tuple[str, ...]:
    """What parameters without a master do to the numbers, in words (``Plan.changes_numbers``)."""
    if not any(is_drawn(p) for block in model.blocks for p in block.parameters):
        return ()
    return ("parameters in bf16 have no fp32 master: a step rounds them up or down by chance (stochastic rounding)",)


def selected(trace: Trace, treatments: Mapping[str, Sequence[Treatment]]) -> tuple[Selection, ...]:
    """What a plan says where each block has the ``treatments`` given: those that are alike share a selection, in the
    order of the forward."""
    alike: dict[tuple[Treatment, ...], list[str]] = {}
    for block in dict.fromkeys(visit.block for visit in trace.visits):
        if treatments.get(block):
            alike.setdefault(tuple(treatments[block]), []).append(block)
    return tuple(Selection(tuple(names), named) for named, names in alike.items())


def slot_options(shared: Sequence[Block], most: int = SHARED_SLOTS) -> list[tuple[int, ...]]:
    """Slots that would do for ``shared``, the most first (up to ``most`` of the repeated size); the last is the least
    that is enough."""
    if not shared:
        return [()]
    repeated = repeated_size(shared)
    larger = max((b.nbytes for b in shared if b.nbytes > repeated), default=0)
    wanted = min(most, sum(b.nbytes <= repeated for b in shared))
    options = [(*([larger] if larger else []), *[repeated] * n) for n in range(wanted, 0, -1)]
    if larger:
        options.append((larger,))
    wanted_at_once = sizes_at_once(shared)
    return list(dict.fromkeys(roomy(option, wanted_at_once) for option in options))


def sizes_at_once(blocks: Sequence[Block]) -> list[tuple[int, ...]]:
    """Bytes of the blocks, largest first, of everything that needs several at once: of every module, for its forward
    (its own, and those of the modules around it: a tied head inside a block of its own, say), and of what the model
    itself runs again together."""
    found = set()
    of: dict[str, list[int]] = {}
    again = {frozenset((block.name, *block.beside)) for block in blocks if block.beside}
    for names in again:
        found.add(tuple(sorted((block.nbytes for block in blocks if block.name in names), reverse=True)))
    for place, block in enumerate(blocks):
        for name in block.modules:
            of.setdefault(name, []).append(place)
    for module in of:
        around = {module[:i] for i, letter in enumerate(module) if letter == "."} | {module, ""}
        needed = {place for name in around for place in of.get(name, ())}
        sizes = sorted((blocks[place].nbytes for place in needed), reverse=True)
        if len(sizes) > 1:
            found.add(tuple(sizes))
    return sorted(found)


def roomy(slots: tuple[int, ...], at_once: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """``slots`` and as many more as it takes to hold what is needed at once."""
    for sizes in at_once:
        for place, size in enumerate(sizes):
            if place >= len(slots) or slots[place] < size:
                slots = tuple(sorted((*slots, size), reverse=True))
    return slots


def repeated_size(blocks: Sequence[Block]) -> int:
    """The largest size that counts as repeated: near the size that most blocks have, the larger one of equals."""
    return repeated(b.nbytes for b in blocks)


def repeated(sizes: Iterable[int]) -> int:
    """``repeated_size`` of what has these ``sizes``."""
    counts = Counter(sizes)
    commonest, count = max(counts.items(), key=lambda item: (item[1], item[0]))
    if count == 1:
        return max(counts)
    return max(size for size in counts if size <= NEAR * commonest)


def streaming_through(problem: Problem, slots: tuple[int, ...], window: int) -> Streaming:
    """The streaming through ``slots`` with the distance that they allow."""
    return Streaming(
        slots=slots,
        prefetch_distance=max(0, min(len(slots) - 1, SHARED_SLOTS - 1)),
        gradient_window=window,
        overlap_update=problem.overlap_update,
    )


def fewer_slots(streaming: Streaming, streamed: Sequence[Block], dedicated: int = 0) -> Streaming:
    """The slots that ``streamed`` still needs: a slot larger than every block left over shrinks or goes. A block with
    a ``dedicated`` slot can be fetched ahead without a shared one."""
    return slots_for(streaming, len(streamed), max((b.nbytes for b in streamed), default=0), dedicated)


def slots_for(streaming: Streaming, count: int, largest: int, dedicated: int) -> Streaming:
    """``fewer_slots`` for ``count`` blocks, of which the largest has ``largest`` bytes."""
    slots = tuple(sorted((min(slot, largest) for slot in streaming.slots[:count]), reverse=True))
    ahead = max(len(slots) - 1, min(dedicated, SHARED_SLOTS - 1), 0)
    distance = min(max(streaming.prefetch_distance, dedicated), ahead)
    if (slots, distance) == (streaming.slots, streaming.prefetch_distance):
        return streaming
    return replace(streaming, slots=slots, prefetch_distance=distance)


def keep_order(model: Model, slots: tuple[int, ...], *, last_first: bool) -> list[Block]:
    """Blocks in the order in which room on the device is given to them: those that would need a slot of their own
    size, the largest first, then from the first block on or, ``last_first``, from the last one backwards.

    The first block is fetched twice a step, and the next forward waits for its update; the last ones are still in
    their slots when backward asks for them. On the other hand their gradients are the first to leave.
    """
    repeated = min(slots, default=0)
    larger = sorted((b for b in model.blocks if b.nbytes > repeated), key=lambda b: b.nbytes, reverse=True)
    rest = [b for b in model.blocks if b.nbytes <= repeated]
    return [*larger, *(reversed(rest) if last_first else rest)]


def recomputable(trace: Trace) -> tuple[str, ...]:
    """Blocks that may recompute, in the order in which the forward first comes to them: one module, not in use
    throughout, not ``Trace.unrepeatable``, in the middle of which no other runs, and with more bytes saved than come
    in, in all their runs. The first ones are the ones to take: when their turn comes in backward, what the later blocks
    saved is gone."""
    able = {b.name for b in trace.model.blocks if b.module is not None and not b.held} - set(trace.unrepeatable)
    starts = [visit.first_tensor for visit in trace.visits]
    runs: dict[str, list[int]] = {}
    gained: Counter[str] = Counter()
    for place, visit in enumerate(trace.visits):
        if visit.phase is Phase.FORWARD and visit.block in able and trace.segments[visit.segment].saves:
            runs.setdefault(visit.block, []).append(place)
            gained[visit.block] += _saved_nbytes(trace, visit) - _arriving_nbytes(trace, visit, starts)
    return tuple(block for block, places in runs.items() if gained[block] > 0 and are_apart(trace, places))


def _saved_nbytes(trace: Trace, visit: Visit) -> int:
    """Bytes that the visit makes and autograd keeps."""
    return sum(t.nbytes for i, t in enumerate(trace.segments[visit.segment].tensors) if t.saved and t.root == i)


def _arriving_nbytes(trace: Trace, visit: Visit, starts: Sequence[int]) -> int:
    """Bytes of what earlier visits made and this one is given; ``starts`` are the first tensors of all visits. Sources
    are there in any case, and so are views of them, which one run of a block may make for the next."""
    total = 0
    for port in set(visit.ports):
        root, nbytes = port, 0
        while root >= len(trace.sources):
            maker = trace.visits[bisect_right(starts, root) - 1]
            made = trace.segments[maker.segment].tensors
            nbytes = nbytes or made[root - maker.first_tensor].nbytes
            viewed = maker.resolve(made[root - maker.first_tensor].root)
            if viewed == root:
                total += nbytes
                break
            root = viewed
    return total


def gives_up_nothing(plan: Plan) -> bool:
    """Whether ``plan`` would be the same with more memory, so that a loss in pieces, which only saves memory, gains it
    nothing: all blocks stay on the device, none runs again, and no activation moves or is coded."""
    return all(p.resident for p in plan.placements) and not plan.recompute and not plan.activations
