"""The store: every block's home copies, gradients and states, in the tiers that the plan names."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Final, final

import torch

from forebay.arenas import UPDATE_RING, Arenas, arenas_of, home_tier
from forebay.device.base import Completion, Device
from forebay.layout import MASTER, PAGE, STATE_ITEMSIZE, needs_master
from forebay.memory import ArenaUsage, Kind, Tier
from forebay.model import Model, Parameter
from forebay.optim.rules import UpdateRule
from forebay.phases import PASSING
from forebay.plans import Plan, Streaming, used_up
from forebay.runtime.block_placer import BlockPlacer, OnHost
from forebay.runtime.blockstate import BlockState
from forebay.runtime.cells import Cells, DeviceWay
from forebay.runtime.depots import Depot, DepotRow, DiskDepot, HostDepot
from forebay.runtime.filing import Filing
from forebay.runtime.homes import StorageHome
from forebay.runtime.host_arenas import HostArenas, Ledgers
from forebay.runtime.landing import Landing
from forebay.runtime.places import Places
from forebay.runtime.standing import Standing
from forebay.runtime.storage_side import StorageSide, Territory
from forebay.runtime.tensors import alone, dtype_of, elements, flat, shaped
from forebay.scheduling.gradients import GradientSlots
from forebay.scheduling.staging import StagingRing
from forebay.slabs import WINDOW, device_slabs
from forebay.tiers.arena import HostArena, NoPinner, Pinner
from forebay.tiers.diskfile import TierFile
from forebay.tiers.handed import hand_over
from forebay.tiers.kept import KeptFolder
from forebay.tiers.shared import SharedArena
from forebay.treatments import Fate

__all__ = ["Store"]

_PART: Final = PASSING // STATE_ITEMSIZE
"""Elements of a parameter that are written at a time."""


@final
class Store:
    """All blocks of a model in their tiers. Owns the arenas, the files and the resident device buffers. What is at
    home on disk is in ``kept``, if there is one, where a checkpoint can name it."""

    def __init__(
        self,
        device: Device,
        model: Model,
        plan: Plan,
        state_names: tuple[str, ...],
        ledgers: Ledgers,
        pinner: Pinner | None = None,
        kept: KeptFolder | None = None,
    ) -> None:
        self._device = device
        self._ledgers = ledgers
        self._arenas = HostArenas(ledgers, pinner or NoPinner())
        self._stack = contextlib.ExitStack()
        self._filing: Filing | None = None
        self.kept = kept
        # The model's buffers stay on the device for as long as the session lives.
        device.ledger.charge(Kind.BUFFER, model.buffer_nbytes, "the model's buffers")
        self._stack.callback(device.ledger.discharge, Kind.BUFFER, model.buffer_nbytes)
        self.blocks: dict[str, BlockState] = {}
        self.workspace = self._staging = torch.empty(0, dtype=torch.uint8, device="cpu")
        # Where activations go that leave the device, by fate.
        self.depots: dict[Fate, Depot] = {}
        self._micro_batches = 1
        self.rows: dict[Fate, DepotRow] = {}
        self.cells: Cells | None = None
        self.beside: StorageSide | None = None
        self._territory: Territory | None = None
        self.sizes = arenas_of(model, plan, state_names)
        self.standing = Standing(device, device_slabs(model, plan, state_names))
        # Whatever was opened before a failure is closed again: a refused plan leaves no file and no pinned page.
        with contextlib.ExitStack() as opened:
            opened.callback(self.close)
            self._open(model, plan, state_names)
            opened.pop_all()

    def _open(self, model: Model, plan: Plan, state_names: tuple[str, ...]) -> None:
        sizes, streaming = self.sizes, plan.streaming
        host = self._open_host(sizes)
        self._filing = Filing(plan, sizes, self._stack, self._ledgers.disk, self._ledgers.host, self.kept)
        files = self._filing.files
        slot_ring = self._open_staging(sizes, streaming, files)
        chunk_ring = self._open_update_staging(sizes)
        # Where updates and compute share the cores a norm is no sooner there under backward.
        ahead = streaming.overlap_update
        self.landing = Landing(self._device, streaming.gradient_window, self._staging, norms_ahead=ahead)
        if host.activations is not None:
            self.depots[Fate.OFFLOAD] = HostDepot(self._device, host.activations.memory)
            self._arenas.given_to(host.activations, [self.depots[Fate.OFFLOAD]])
        self.standing.open()
        if sizes.update_cell:
            window = self.standing.region(WINDOW, sizes.device_updates, WINDOW)
            self.cells = Cells(DeviceWay(self._device), window, sizes.update_cell, sizes.update_widening)
        shared = self._open_shared(sizes)
        # No update is under way while states are looked at from here: the cells are idle then.
        cells = StagingRing([] if shared is None else [shared.memory[: sizes.storage_cell]])
        places = Places(self._device, self.standing, files, slot_ring, chunk_ring, cells)
        through_slots = host.gradients is not None and used_up(plan.placements, resident=False)
        passed = streaming.gradient_slots if through_slots else ()
        slots = GradientSlots([host.gradients.carve(n) for n in passed] if host.gradients is not None else [])
        placer = BlockPlacer(plan.streaming, state_names, places, host, slots, self.landing)
        for placement in plan.placements:
            self.blocks[placement.block] = placer.placed(model.block(placement.block), placement)
        if shared is not None:
            self._territory = self._shared_with(shared, plan, files["states"])

    def _open_host(self, sizes: Arenas) -> OnHost:
        again, moved = sizes.host_spare_parameters, sizes.host_moved_states
        return OnHost(
            parameters=self._arena(sizes.host_parameters - again, Kind.PARAMETER, "parameters", pinned=True),
            # An arena of their own: when the session ends, parameters stay where they are, and these go.
            second=self._arena(again, Kind.PARAMETER, "second copies of parameters", pinned=True),
            gradients=self._arena(sizes.host_gradients, Kind.GRADIENT, "gradients", pinned=True),
            activations=self._arena(sizes.host_activations, Kind.ACTIVATION, "activations", pinned=True),
            moved_states=self._arena(moved, Kind.STATE, "optimizer states that move", pinned=True),
            states=self._arena(sizes.host_states - moved, Kind.STATE, "optimizer states", pinned=False),
            unsent=self._arena(sizes.host_residuals, Kind.STATE, "what of gradients is not sent", pinned=False),
        )

    def _open_shared(self, sizes: Arenas) -> SharedArena | None:
        """Opens the memory that the session shares with the process beside the storage."""
        if not sizes.storage_window:
            return None
        what = "memory shared with the process beside the storage"
        return self._stack.enter_context(SharedArena(sizes.storage_window, ledger=self._ledgers.host, what=what))

    def _shared_with(self, memory: SharedArena, plan: Plan, file: TierFile) -> Territory:
        """What the process beside the storage is given."""
        sizes = self.sizes
        homes = ((s.block, s.states) for s in self.blocks.values())
        blocks = tuple((block, home.offset) for block, home in homes if isinstance(home, StorageHome))
        chunk, density = plan.streaming.update_chunk, plan.streaming.gradient_density
        return Territory(blocks, hand_over(file), chunk, memory, sizes.storage_cell, sizes.storage_widening, density)

    def employ(self, rule: UpdateRule) -> None:
        """Starts the process beside the storage, if the plan has blocks updated there: by ``rule``. Raises
        ``StorageError`` where it cannot be started."""
        if self._territory is not None:
            self.beside = StorageSide(self._device, rule, self._territory)
            # It ends before the file and the memory go that it has: those are closed later.
            self._stack.callback(self.beside.close)

    def _open_update_staging(self, sizes: Arenas) -> StagingRing:
        """Opens what updates need beside gradients and states; returns the ring through which states on disk pass."""
        working = self._arena(sizes.update_workspace, Kind.STAGING, "update workspace", pinned=False)
        if working is not None:
            self.workspace = alone(working.carve(sizes.update_workspace))
        ring = self._arena(sizes.update_ring, Kind.STAGING, "update staging", pinned=bool(sizes.moved_ring))
        if ring is None:
            return StagingRing([])
        return StagingRing([ring.carve(sizes.update_ring // UPDATE_RING, PAGE) for _ in range(UPDATE_RING)])

    def _open_staging(self, sizes: Arenas, streaming: Streaming, files: Mapping[str, TierFile]) -> StagingRing:
        """Opens what bytes pass through between the device and somewhere else; returns the slots on the host."""
        nbytes = sizes.gradient_staging + sizes.host_slots + sizes.activation_ring
        moving = self._arena(nbytes, Kind.STAGING, "transfer staging", pinned=True)
        if moving is None:
            return StagingRing([])
        # Aligned carves first: what follows them needs no padding.
        slots = StagingRing([moving.carve(n, PAGE) for n in streaming.host_slots if sizes.host_slots])
        # Whole pages of the ring: only those can be read and written past the page cache.
        ring = moving.carve(sizes.activation_ring // PAGE * PAGE, PAGE)
        if ring.numel() and "activations" in files:
            self.depots[Fate.DISK] = DiskDepot(self._device, ring, files["activations"])
        self._staging = alone(moving.carve(sizes.gradient_staging))
        return slots

    def _arena(
        self, nbytes: int, kind: Kind, what: str, stack: contextlib.ExitStack | None = None, *, pinned: bool
    ) -> HostArena | None:
        return self._arenas.open(nbytes, kind, what, stack or self._stack, pinned=pinned)

    @property
    def notes(self) -> Sequence[str]:
        """Which arenas are not page-locked although they would like to be, and why."""
        return self._arenas.notes

    @property
    def arenas(self) -> tuple[ArenaUsage, ...]:
        """The account of every piece of memory that was taken once, on the device and on the host."""
        return (*self.standing.usages(), *self._arenas.usages())

    @property
    def disk_written(self) -> int:
        """Bytes written to disk so far."""
        beside = 0 if self.beside is None else self.beside.worker.written
        return beside if self._filing is None else beside + self._filing.written

    def fetch(self, block: str, target: torch.Tensor, after: Sequence[Completion]) -> Completion:
        """Queues the copy of a block's home into a slot (``slots.BlockSource``)."""
        self.blocks[block].expect_not_updated()
        return self.blocks[block].parameters.fetch(target[: self.blocks[block].block.nbytes], after)

    def make_room(self, micro_batches: int) -> None:
        """Has room for what so many micro-batches move off the device at the same time; a plan has it for one. It is
        kept. Raises ``HostOutOfMemory`` or ``DiskFull`` where a budget has none; nothing has changed then."""
        further = micro_batches - self._micro_batches
        if further <= 0:
            return
        with self._arenas.all_or_none() as opened:
            made = self._further_depots(further, f"activations-{micro_batches}", opened)
            self._stack.push(opened.pop_all())
        for fate, depots in made.items():
            self.rows[fate] = self.depots[fate] = DepotRow((self.depots[fate], *depots))
        self._micro_batches = micro_batches

    def _further_depots(self, further: int, name: str, opened: contextlib.ExitStack) -> dict[Fate, list[Depot]]:
        made: dict[Fate, list[Depot]] = {}
        sizes = self.sizes
        if Fate.OFFLOAD in self.depots:
            nbytes = further * sizes.host_activations
            arena = self._arena(nbytes, Kind.ACTIVATION, "activations of further micro-batches", opened, pinned=True)
            if arena is not None:
                # One each: what a micro-batch moves fills it to the byte, in whatever order they take turns.
                parts = [arena.memory[i : i + sizes.host_activations] for i in range(0, nbytes, sizes.host_activations)]
                made[Fate.OFFLOAD] = [HostDepot(self._device, part) for part in parts]
                self._arenas.given_to(arena, made[Fate.OFFLOAD])
        tier = None if self._filing is None else self._filing.tier
        if Fate.DISK in self.depots and tier is not None:
            what = "transfer staging of further micro-batches"
            ring = self._arena(sizes.activation_ring, Kind.STAGING, what, opened, pinned=True)
            if ring is not None:
                whole = ring.carve(sizes.activation_ring // PAGE * PAGE, PAGE)
                # The ring holds the largest of them: so much may be left over where one file ends.
                size = further * sizes.disk_activations + whole.numel()
                file = tier.create(name, size, Kind.ACTIVATION)
                made[Fate.DISK] = [DiskDepot(self._device, whole, file)]
        return made

    def fill(self, block: str, names: Collection[str], read: Callable[[Parameter], torch.Tensor]) -> None:
        """Writes the parameters of ``block`` that are in ``names`` to their home, and to the fp32 masters if there are
        any. ``read`` gives the value of one of them, in its shape; it is asked for one at a time, and nothing of the
        length of a parameter is made beside that (but of one whose elements do not lie in order)."""
        state = self.blocks[block]
        self.write_apart(state)
        given = [parameter for parameter in state.block.parameters if parameter.name in names]
        home = state.parameters
        placed = home.replace if len(given) == len(state.block.parameters) else home.edit
        with placed(0, home.nbytes) as content:
            for parameter in given:
                _put(state, content, parameter, read(parameter))

    def write_apart(self, state: BlockState) -> None:
        """Before somebody else than an update writes to a block: has its current copy be one that no checkpoint has, or
        reads."""
        state.settle()
        state.settle_save()
        source, target = state.current, state.target
        if target is source:
            return
        if target.parameters is not source.parameters:
            target.parameters.copy_from(source.parameters, [(0, source.parameters.nbytes)])
        if target.states is not source.states:
            target.states.copy_from(source.states, [(c.offset, c.nbytes) for c in state.layout.chunks if c.nbytes])
        state.turn()

    def value(self, block: str, parameter: Parameter) -> torch.Tensor:
        """``parameter`` in its own dtype once its updates are done: the home bytes themselves, or a copy from disk."""
        content = self.blocks[block].parameters.read(parameter.offset, parameter.nbytes)
        return shaped(elements(content, parameter, 0), parameter)

    def full_precision(self, block: str, parameter: Parameter) -> torch.Tensor:
        """A copy of ``parameter`` on the host: its fp32 master if it has one, else its own value."""
        state = self.blocks[block]
        if needs_master(parameter):
            return shaped(state.gathered((MASTER,), parameter)[MASTER], parameter)
        value = self.value(block, parameter)
        if home_tier(state.placement) is Tier.DISK:
            return alone(value)  # read for this
        return value.clone() if value.device.type == "cpu" else value.cpu()

    def full_precision_parts(self, block: str, parameter: Parameter) -> Iterator[torch.Tensor]:
        """``full_precision`` in the order of memory, part by part on the host (1-D), each to be read before the next
        one is asked for: the home bytes themselves, if they are there."""
        state = self.blocks[block]
        if needs_master(parameter):
            yield from (part.cpu() for part in state.parts(MASTER, parameter))
            return
        for start in range(0, parameter.nbytes, PASSING):
            nbytes = min(PASSING, parameter.nbytes - start)
            yield state.parameters.read(parameter.offset + start, nbytes).view(dtype_of(parameter)).cpu()

    def settle(self) -> None:
        """Waits until every update of every block is at home."""
        # First all of them to their lanes: one must not wait for the end of another.
        for state in self.blocks.values():
            state.queue_deferred()
        for state in self.blocks.values():
            state.settle()

    def come_home(self) -> None:
        """Before the end: when all jobs are done, parameters on the host leave the arena of second copies."""
        self._device.synchronize()
        for state in self.blocks.values():
            if home_tier(state.placement) is Tier.HOST:
                state.come_home()

    def close(self) -> None:
        """Frees arenas, files and device buffers. The caller has waited for all transfers."""
        self.standing.close()
        for state in self.blocks.values():
            if state.streamed is not None:
                state.streamed.deferred.drop()  # it holds the state that holds it
        if self.cells is not None:
            self.cells.close()
        self._territory = None
        # An arena is unmapped with the last tensor that looks into it. The user's optimizer goes on holding the
        # session; it must not go on holding the memory.
        self.blocks.clear()
        for depot in self.depots.values():
            depot.close()
        self.depots.clear()
        for buffer in (self._staging, self.workspace):
            buffer.set_(torch.UntypedStorage(0, device=buffer.device))
        self._stack.close()


def _put(state: BlockState, content: torch.Tensor, parameter: Parameter, value: torch.Tensor) -> None:
    """Writes the ``value`` of a parameter into ``content``, the parameters of its block, and to its master."""
    values, own = flat(value, parameter), elements(content, parameter, parameter.offset)
    # Part by part: on its way to an accelerator what has another dtype is converted in memory of its own.
    for target, source in zip(own.split(_PART), values.split(_PART), strict=True):
        target.copy_(source)
    if needs_master(parameter):
        state.write_streams({parameter.name: {MASTER: values}}, content)
