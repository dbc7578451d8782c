"""How many bytes a plan asks of every tier, arena by arena. No torch.

The runtime allocates these figures and the planner predicts with them, so the two cannot drift apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

from forebay.cells import cell_of
from forebay.errors import ConfigError
from forebay.layout import PAGE, Chunk, StateLayout, align, gradient_offsets, residual_offsets, state_layout
from forebay.memory import Kind, Tier
from forebay.model import Block, Model
from forebay.plans import Placement, Plan, Streaming, Update
from forebay.states import Masters
from forebay.units import MiB
from forebay.workspaces import widened_copies, workspace_nbytes

__all__ = [
    "DISK_BLOCK",
    "DISK_BOUNCE",
    "DISK_SUM",
    "GRADIENT_STAGING",
    "UPDATE_CELLS",
    "UPDATE_RING",
    "Arenas",
    "Sizer",
    "arenas",
    "arenas_of",
    "gradient_nbytes",
    "home_nbytes",
    "home_tier",
]

GRADIENT_STAGING = 8 * MiB
"""Bytes: the most of a micro-batch's gradient that waits on the host to be added to what has landed before."""

UPDATE_RING = 3
"""Buffers through which states on disk pass: one is read, one updated, one written back."""

UPDATE_CELLS = 3
"""Cells that an ``update_window`` should hold: one is on its way to the device, one updated, one on its way back. Those
of updates beside the storage are as many."""

DISK_BLOCK = 4 * MiB
"""Bytes that one call moves of memory whose address O_DIRECT does not take, by way of a bounce buffer."""

DISK_BOUNCE = 1
"""Bounce buffers, of ``DISK_BLOCK`` each."""

DISK_SUM = 8
"""Bytes of the host for each page of parameters and states on disk, where what is read is held against checksums of
what was written. Activations have none: no later step reads them."""


@dataclass(frozen=True)
class Arenas:
    """Bytes of every arena. ``device_*`` without activations; ``states`` includes fp32 master copies. Parameters and
    states of blocks that speculate are there twice; ``host_spare_parameters`` are those of ``host_parameters`` that are
    second copies, which have an arena of their own. What is on disk is there once more where a checkpoint may have one
    copy (``Streaming.disk_copies``): ``disk_other_parameters`` and ``disk_other_states``, the last ones of
    ``disk_parameters`` and ``disk_states``.

    Where blocks are updated on the device: ``device_updates`` is the window through which they pass, as many cells
    of ``update_cell`` as it holds and, at its end, ``update_widening``, where gradients become fp32.
    ``host_moved_states`` are those of ``host_states`` that move, in an arena of their own, and ``moved_ring`` is
    ``update_ring`` where the device copies from and to it.

    Where blocks are updated beside the storage: ``storage_window`` is the memory that the host shares with whoever does
    it: ``UPDATE_CELLS`` cells of ``storage_cell`` (whole pages) and, at its end, ``storage_widening``.
    ``host_residuals``, an arena of their own, are what of their gradients was not sent yet, if not all of it is."""

    device_resident: int
    device_gradients: int
    device_slots: int
    device_updates: int
    update_cell: int
    update_widening: int
    host_parameters: int
    host_spare_parameters: int
    host_gradients: int
    host_states: int
    host_moved_states: int
    host_residuals: int
    host_activations: int
    gradient_staging: int
    update_workspace: int
    update_ring: int
    moved_ring: int
    storage_cell: int
    storage_widening: int
    storage_window: int
    host_slots: int
    activation_ring: int
    disk_bounce: int
    disk_sums: int
    disk_parameters: int
    disk_states: int
    disk_other_parameters: int
    disk_other_states: int
    disk_activations: int

    @property
    def device(self) -> int:
        """Bytes on the device that are there all the time, and the gradients of resident blocks that wait for their
        step."""
        return self.device_resident + self.device_gradients + self.device_slots + self.device_updates

    @property
    def host_staging(self) -> int:
        """Bytes on the host through which other bytes pass."""
        to_device = self.gradient_staging + self.host_slots + self.activation_ring
        updates = self.update_workspace + self.update_ring + self.storage_window
        return to_device + updates + self.disk_bounce + self.disk_sums

    @property
    def host(self) -> int:
        """Bytes on the host."""
        homes = self.host_parameters + self.host_gradients + self.host_states + self.host_residuals
        return homes + self.host_activations + self.host_staging

    @property
    def pinnable(self) -> tuple[tuple[Kind, int], ...]:
        """The arenas on the host that the device copies from or to, in the order in which they are opened. Each is
        page-locked as a whole or, where the rest of the pinned budget is too small, not at all."""
        return (
            (Kind.PARAMETER, self.host_parameters - self.host_spare_parameters),
            (Kind.PARAMETER, self.host_spare_parameters),
            (Kind.GRADIENT, self.host_gradients),
            (Kind.ACTIVATION, self.host_activations),
            (Kind.STATE, self.host_moved_states),
            (Kind.STAGING, self.gradient_staging + self.host_slots + self.activation_ring),
            (Kind.STAGING, self.moved_ring),
        )

    @property
    def disk(self) -> int:
        """Bytes on disk."""
        return self.disk_parameters + self.disk_states + self.disk_activations


def home_tier(placement: Placement) -> Tier:
    """Where the home copy of a block's parameters is. A dedicated slot is a copy; its home is on the host."""
    if placement.parameters is Tier.DEVICE and not placement.resident:
        return Tier.HOST
    return placement.parameters


def home_nbytes(block: Block) -> int:
    """Bytes of the home copy of a block on disk: whole pages."""
    return align(block.nbytes, PAGE)


def gradient_nbytes(block: Block) -> int:
    """Bytes on the host of what a block's gradients take that have landed."""
    return gradient_offsets(block)[1]


def _copies(placement: Placement, tier: Tier, streaming: Streaming) -> int:
    """How often what a block has at home on ``tier`` is there."""
    ahead = placement.update is Update.AHEAD
    return 1 + ahead + (_others(streaming) if tier is Tier.DISK else 0)


def _others(streaming: Streaming) -> int:
    """How many places more all homes on disk have, so that a checkpoint may have one."""
    return streaming.disk_copies - 1


@final
class Sizer:
    """Sizes plans for one model that differ in their placements and slots: what depends on the optimizer's states,
    on ``update_chunk`` (elements) and on how masters are kept alone is worked out once."""

    def __init__(self, model: Model, state_names: tuple[str, ...], update_chunk: int, masters: Masters) -> None:
        self.update_chunk = update_chunk
        # Layers are alike: of every kind of block the first, and what is worked out for it.
        self._first: list[Block] = []
        self._kind: dict[str, int] = {}
        self._sizes: list[_StateSizes] = []
        kinds: dict[object, int] = {}
        for block in model.blocks:
            shape = block.nbytes, *(p.sort for p in block.parameters)
            if shape not in kinds:
                kinds[shape] = len(kinds)
                self._first.append(block)
                self._sizes.append(_StateSizes.of(state_layout(block, state_names, update_chunk, masters)))
            self._kind[block.name] = kinds[shape]
        # Bytes of the gradients of each kind on the host, and of the largest of them.
        self._landed = [gradient_nbytes(b) for b in self._first]
        self._largest = [max((p.nbytes for p in b.parameters if p.trainable), default=0) for b in self._first]

    def state_nbytes(self, block: str) -> int:
        """Bytes of the optimizer state of ``block``, masters included."""
        return self._sizes[self._kind[block]].nbytes

    def update_window(self, blocks: Iterable[str], cells: int = UPDATE_CELLS) -> int:
        """Bytes of the device through which ``blocks`` pass that are updated there, ``cells`` chunks at a time."""
        return _window([self._sizes[kind] for kind in {self._kind[name] for name in blocks}], cells)

    def arenas(self, placements: Iterable[Placement], streaming: Streaming) -> Arenas:
        """The arenas under ``placements``; ``streaming.update_chunk`` must be the sizer's own. Raises ``ConfigError``
        for an ``update_window`` without room for a chunk of a block that is updated on the device, and for
        ``gradient_slots`` of which none holds the gradients of one that is updated in backward."""
        if streaming.update_chunk != self.update_chunk:
            raise ConfigError(f"sizes for chunks of {self.update_chunk} elements, asked for {streaming.update_chunk}")
        groups = self._groups(placements)
        hosted = [g for g in groups if not g.placement.resident]
        resident = [g for g in groups if g.placement.resident]
        # The others' gradients are let go in backward: what of them is there at a time is none of an arena's.
        standing = [g for g in resident if g.placement.update is not Update.BACKWARD]
        trained = [g for g in hosted if g.block.gradient_nbytes]

        def state_copies(tier: Tier) -> int:
            there = [g for g in groups if g.placement.states is tier]
            return _total(there, lambda g: g.states.nbytes * _copies(g.placement, tier, streaming))

        moved = [g for g in hosted if g.placement.update is Update.DEVICE]
        cell, widening = _device_cell(moved, streaming.update_window)
        beside = _storage_cell(groups, streaming.gradient_density)
        on_host = [(g, _copies(g.placement, Tier.HOST, streaming)) for g in hosted if g.home is Tier.HOST]
        on_disk = [(g, _copies(g.placement, Tier.DISK, streaming)) for g in hosted if g.home is Tier.DISK]
        states_on_disk = [g for g in groups if g.placement.states is Tier.DISK]
        writes = bool(on_disk or streaming.disk_activations or any(g.states.nbytes for g in states_on_disk))
        at_home = [g for g in trained if g.placement.update not in (Update.DEVICE, Update.STORAGE)]
        passing = [g for g in states_on_disk if g.placement.update is not Update.STORAGE]
        ring = UPDATE_RING * max((g.states.largest_chunk for g in passing), default=0)
        largest_gradient = max((self._largest[g.kind] for g in trained), default=0)
        disk_parameters = sum(g.number * home_nbytes(g.block) * copies for g, copies in on_disk)
        disk_states = state_copies(Tier.DISK)
        slots = [g for g in hosted if g.placement.parameters is Tier.DEVICE]
        return Arenas(
            device_resident=_total(resident, lambda g: g.block.nbytes + g.states.nbytes),
            device_gradients=_total(standing, lambda g: g.block.gradient_nbytes),
            device_slots=sum(streaming.slots) + _total(slots, lambda g: g.block.nbytes),
            device_updates=streaming.update_window if moved else 0,
            update_cell=cell,
            update_widening=widening,
            host_parameters=sum(g.number * g.block.nbytes * copies for g, copies in on_host),
            host_spare_parameters=sum(g.number * g.block.nbytes * (copies - 1) for g, copies in on_host),
            host_gradients=self._gradients(hosted, streaming),
            host_states=state_copies(Tier.HOST),
            host_moved_states=_total([g for g in moved if g.placement.states is Tier.HOST], lambda g: g.states.nbytes),
            host_residuals=_residuals(groups, streaming.gradient_density),
            host_activations=streaming.host_activations,
            gradient_staging=min(GRADIENT_STAGING, largest_gradient),
            update_workspace=max((g.states.widened for g in at_home), default=0),
            update_ring=ring,
            moved_ring=ring if any(g.states.nbytes and g.placement.states is Tier.DISK for g in moved) else 0,
            storage_cell=beside[0],
            storage_widening=beside[1],
            storage_window=UPDATE_CELLS * beside[0] + beside[1],
            host_slots=sum(streaming.host_slots) if on_disk else 0,
            activation_ring=streaming.disk_window,
            disk_bounce=DISK_BLOCK * DISK_BOUNCE if writes else 0,
            disk_sums=DISK_SUM * ((disk_parameters + disk_states) // PAGE) if streaming.checksums else 0,
            disk_parameters=disk_parameters,
            disk_states=disk_states,
            disk_other_parameters=_others(streaming) * sum(g.number * home_nbytes(g.block) for g, _ in on_disk),
            disk_other_states=_others(streaming) * _total(states_on_disk, lambda g: g.states.nbytes),
            disk_activations=streaming.disk_activations,
        )

    def _groups(self, placements: Iterable[Placement]) -> list[_Group]:
        """The blocks of ``placements``, those together that are alike and placed alike."""
        kinds, found, counts = self._kind, dict[object, Placement](), Counter[object]()
        for p in placements:
            key = kinds[p.block], p.parameters, p.gradients, p.states, p.update
            found.setdefault(key, p)
            counts[key] += 1
        return [self._group(p, counts[key]) for key, p in found.items()]

    def _group(self, placement: Placement, count: int) -> _Group:
        kind = self._kind[placement.block]
        return _Group(count, kind, self._first[kind], self._sizes[kind], placement)

    def _gradients(self, hosted: Sequence[_Group], streaming: Streaming) -> int:
        """Bytes on the host of landed gradients: those of every block of ``hosted``, or the slots that they share."""
        used_up = [self._landed[g.kind] for g in hosted if g.placement.update is Update.BACKWARD]
        standing = [g for g in hosted if g.placement.update is not Update.BACKWARD]
        largest = max(used_up, default=0)
        if largest > max(streaming.gradient_slots, default=0):
            raise ConfigError(
                f"the gradients of a block that is updated in backward take {largest} bytes and the largest of the "
                f"gradient_slots has {max(streaming.gradient_slots, default=0)}; make it larger"
            )
        slots = sum(align(slot) for slot in streaming.gradient_slots if used_up)
        return slots + _total(standing, lambda g: self._landed[g.kind])


class _Group(NamedTuple):
    """``number`` blocks of one kind that are placed alike: the first block of that kind, what its states take, and the
    placement of one of them."""

    number: int
    kind: int
    block: Block
    states: _StateSizes
    placement: Placement

    @property
    def home(self) -> Tier:
        """Where the home copies of their parameters are."""
        return home_tier(self.placement)


def _total(groups: Iterable[_Group], nbytes: Callable[[_Group], int]) -> int:
    """Bytes of all blocks of ``groups``, each of which has ``nbytes``."""
    return sum(g.number * nbytes(g) for g in groups)


def _window(sizes: Sequence[_StateSizes], cells: int) -> int:
    """Bytes of the device through which blocks of such ``sizes`` pass, ``cells`` chunks at a time."""
    largest = max((s.largest_cell for s in sizes), default=0)
    return cells * largest + max((s.widened for s in sizes), default=0)


def _storage_cell(groups: Sequence[_Group], density: float | None) -> tuple[int, int]:
    """Bytes of the largest cell of the blocks that are updated beside the storage, in whole pages, and of their widest
    gradients."""
    states = [g.states for g in groups if g.placement.update is Update.STORAGE]
    cell = max((s.cell(density) for s in states), default=0)
    return align(cell, PAGE), max((s.widened for s in states), default=0)


def _residuals(groups: Sequence[_Group], density: float | None) -> int:
    """Bytes of what is not sent of the gradients of the blocks that are updated beside the storage."""
    if density is None:
        return 0
    there = [g for g in groups if g.placement.update is Update.STORAGE]
    return _total(there, lambda g: residual_offsets(g.block)[1])


def _device_cell(moved: Sequence[_Group], window: int) -> tuple[int, int]:
    """Bytes of the largest cell of the blocks ``moved``, which are updated on the device, and of their widest
    gradients."""
    sizes = [g.states for g in moved]
    widening = _window(sizes, 0)
    cell = _window(sizes, 1) - widening
    if window < cell + widening:
        raise ConfigError(
            f"update_window is {window} bytes and one chunk that is updated on the device takes {cell + widening}; "
            f"make it {_window(sizes, UPDATE_CELLS)}, or update_chunk smaller"
        )
    return cell, widening


@dataclass(frozen=True)
class _StateSizes:
    """Bytes of one block's state, of its largest chunk, of its largest cell, and of the gradients of a chunk that are
    widened to fp32 with what goes with them (``workspaces.workspace_nbytes``); and its chunks."""

    nbytes: int
    largest_chunk: int
    largest_cell: int
    widened: int
    chunks: tuple[Chunk, ...]

    @classmethod
    def of(cls, layout: StateLayout) -> _StateSizes:
        cell = max((cell_of(c).nbytes for c in layout.chunks), default=0)
        widened = max((_widened(layout, c) for c in layout.chunks), default=0)
        return cls(layout.nbytes, layout.largest_chunk, cell, widened, layout.chunks)

    def cell(self, density: float | None) -> int:
        """Bytes of its largest cell where this share of the elements of gradients comes (None: gradients as they
        are)."""
        if density is None:
            return self.largest_cell
        return max((cell_of(chunk, density).nbytes for chunk in self.chunks), default=0)


def _widened(layout: StateLayout, chunk: Chunk) -> int:
    parameters = [piece.parameter for piece in chunk.pieces]
    copies = max((widened_copies(p, layout.masters) for p in parameters), default=0)
    largest = max((piece.stop - piece.start for piece in chunk.pieces), default=0)
    return workspace_nbytes(layout.streams, largest, copies * chunk.elements, parameters)


def arenas(model: Model, placements: Iterable[Placement], streaming: Streaming, state_names: tuple[str, ...]) -> Arenas:
    """The arenas for ``model`` under ``placements``, with an optimizer that keeps ``state_names`` per element."""
    return Sizer(model, state_names, streaming.update_chunk, streaming.masters).arenas(placements, streaming)


def arenas_of(model: Model, plan: Plan, state_names: tuple[str, ...]) -> Arenas:
    """The arenas for ``model`` under ``plan``."""
    return arenas(model, plan.placements, plan.streaming, state_names)
