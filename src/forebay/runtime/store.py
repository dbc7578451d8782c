"""The store: every block's home copies, gradients and states, in the tiers that the plan names."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch

from forebay.arenas import DISK_BLOCK, DISK_BOUNCE, UPDATE_RING, Arenas, arenas, home_tier
from forebay.device.base import Completion, Device
from forebay.errors import ConfigError, ForebayError
from forebay.layout import MASTER, PAGE, StateLayout, gradient_offsets, needs_master, state_layout
from forebay.memory import Kind, Ledger, Tier
from forebay.plans import Fate, Placement, Plan, Streaming
from forebay.runtime.depots import Depot, DiskDepot, HostDepot
from forebay.runtime.gradients import GradientBuffer, Landing
from forebay.runtime.homes import Home
from forebay.runtime.places import Places
from forebay.runtime.tensors import alone, elements, shaped
from forebay.scheduling.staging import StagingRing
from forebay.tiers.arena import HostArena, NoPinner, Pinner
from forebay.tiers.disk import DiskFile, DiskFolder, DiskPolicy
from forebay.trace import Block, Model, Parameter

__all__ = ["BlockCopy", "BlockState", "Ledgers", "Store"]


@final
class Ledgers:
    """The accounts of the tiers beside the device."""

    def __init__(self, host: Ledger, pinned: Ledger, disk: Ledger) -> None:
        self.host = host
        self.pinned = pinned
        self.disk = disk


@dataclass(frozen=True)
class BlockCopy:
    """A block's parameters and optimizer states at home: what an update reads, or what it makes."""

    parameters: Home
    states: Home


@final
class BlockState:
    """One block at run time: its homes, its landed gradients, and how many steps each parameter has taken.

    ``current`` is the copy that everybody reads. A block that speculates has a ``spare`` one, in which the outcome of
    the next step may be made before the step is asked for.
    """

    def __init__(
        self,
        block: Block,
        placement: Placement,
        layout: StateLayout,
        parameters: Home,
        states: Home,
        gradients: Mapping[str, GradientBuffer],
        spare: BlockCopy | None = None,
    ) -> None:
        self.block = block
        self.placement = placement
        self.layout = layout
        self.current = self._first = BlockCopy(parameters, states)
        self.spare = spare
        self.gradients = gradients
        self.steps = {p.name: 0 for p in block.parameters if p.trainable}

    @property
    def parameters(self) -> Home:
        """The current copy of the parameters."""
        return self.current.parameters

    @property
    def states(self) -> Home:
        """The current copy of the optimizer states."""
        return self.current.states

    def exchange(self) -> None:
        """The spare copy becomes the current one, and the current one the spare."""
        if self.spare is None:
            raise ForebayError(f"block {self.block.name} has one copy at home, the plan does not speculate on it")
        self.current, self.spare = self.spare, self.current

    def come_home(self) -> None:
        """Has the parameters in the copy that was the current one at first. Only for a session that ends: the states do
        not come with them. The caller has waited for all jobs."""
        if self.current is not self._first:
            self._first.parameters.write(self.parameters.read())
            self.current = self._first

    def settle(self) -> None:
        """Waits until every update of this block has been written to its homes."""
        self.parameters.settle()
        self.states.settle()

    def streams_of(self, parameter: Parameter) -> tuple[str, ...]:
        """Names of the state streams that mean something for ``parameter``."""
        return tuple(s for s in self.layout.streams if s != MASTER or needs_master(parameter))

    def stream(self, name: str, parameter: Parameter, states: torch.Tensor) -> torch.Tensor:
        """A copy of one state stream of ``parameter`` (1-D fp32), gathered from ``states`` (``self.states.read()``)."""
        parts = [view for owner, view in self._stream_views(name, states) if owner == parameter.name]
        return torch.cat(parts)

    def write_stream(self, name: str, parameter: Parameter, states: torch.Tensor, value: torch.Tensor) -> None:
        """Writes ``value`` (1-D) as one state stream of ``parameter`` into ``states``."""
        start = 0
        for owner, view in self._stream_views(name, states):
            if owner == parameter.name:
                view.copy_(value[start : start + view.numel()])
                start += view.numel()

    def _stream_views(self, name: str, states: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        position = self.layout.streams.index(name)
        for chunk in self.layout.chunks:
            typed = states[chunk.offset : chunk.offset + chunk.nbytes].view(torch.float32)
            for piece in chunk.pieces:
                start = position * chunk.elements + piece.offset
                yield piece.parameter.name, typed[start : start + piece.stop - piece.start]


@final
class Store:
    """All blocks of a model in their tiers. Owns the arenas, the files and the resident device buffers."""

    def __init__(
        self,
        device: Device,
        model: Model,
        plan: Plan,
        state_names: tuple[str, ...],
        ledgers: Ledgers,
        pinner: Pinner | None = None,
    ) -> None:
        self._device = device
        self._ledgers = ledgers
        self._pinner = pinner or NoPinner()
        self._device_buffers: list[torch.Tensor] = []
        self._stack = contextlib.ExitStack()
        # The model's buffers stay on the device for as long as the session lives.
        device.ledger.charge(Kind.BUFFER, model.buffer_nbytes, "the model's buffers")
        self._stack.callback(device.ledger.discharge, Kind.BUFFER, model.buffer_nbytes)
        self.notes: list[str] = []
        self.blocks: dict[str, BlockState] = {}
        self.workspace = self._staging = torch.empty(0, dtype=torch.uint8)
        # Where activations go that leave the device, by fate.
        self.depots: dict[Fate, Depot] = {}
        self.sizes = arenas(model, plan.placements, plan.streaming, state_names, plan.speculate)
        # Whatever was opened before a failure is closed again: a refused plan leaves no file and no pinned page.
        with contextlib.ExitStack() as opened:
            opened.callback(self.close)
            self._open(model, plan, state_names)
            opened.pop_all()

    def _open(self, model: Model, plan: Plan, state_names: tuple[str, ...]) -> None:
        sizes, streaming = self.sizes, plan.streaming
        on_host = {p.block for p in plan.placements if home_tier(p) is Tier.HOST}
        again = sum(model.block(name).nbytes for name in plan.speculate if name in on_host)
        host_parameters = self._arena(sizes.host_parameters - again, Kind.PARAMETER, "parameters", pinned=True)
        # An arena of their own: when the session ends, parameters stay where they are, and these go.
        second = self._arena(again, Kind.PARAMETER, "second copies of parameters", pinned=True)
        host_gradients = self._arena(sizes.host_gradients, Kind.GRADIENT, "gradients", pinned=True)
        activations = self._arena(sizes.host_activations, Kind.ACTIVATION, "activations", pinned=True)
        host_states = self._arena(sizes.host_states, Kind.STATE, "optimizer states", pinned=False)
        files = self._files(plan, sizes)
        slot_ring = self._open_staging(sizes, streaming, files)
        chunk_ring = self._open_update_staging(sizes)
        self.landing = Landing(self._device, streaming.gradient_window, self._staging)
        if activations is not None:
            self.depots[Fate.OFFLOAD] = HostDepot(self._device, activations.memory)
        places = Places(self._device, self._on_device, host_states, files, slot_ring, chunk_ring)
        for placement in plan.placements:
            block = model.block(placement.block)
            layout = state_layout(block, state_names, streaming.update_chunk)
            parameters = places.parameters(block, placement, host_parameters)
            states = places.states(block, placement, layout.nbytes)
            spare = None
            if block.name in plan.speculate:
                copy = places.parameters(block, placement, second)
                spare = BlockCopy(copy, places.states(block, placement, layout.nbytes))
            gradients = {} if placement.resident else self._gradients(block, host_gradients)
            self.blocks[block.name] = BlockState(block, placement, layout, parameters, states, gradients, spare)

    def _open_update_staging(self, sizes: Arenas) -> StagingRing:
        """Opens what updates need beside gradients and states; returns the ring through which states on disk pass."""
        working = self._arena(sizes.update_workspace + sizes.update_ring, Kind.STAGING, "update staging", pinned=False)
        if working is None:
            return StagingRing([])
        largest = sizes.update_ring // UPDATE_RING
        # Aligned carves first: what follows them needs no padding.
        ring = StagingRing([working.carve(largest, PAGE) for _ in range(UPDATE_RING)] if largest else [])
        if sizes.update_workspace:
            self.workspace = alone(working.carve(sizes.update_workspace))
        return ring

    def _open_staging(self, sizes: Arenas, streaming: Streaming, files: Mapping[str, DiskFile]) -> StagingRing:
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

    def _arena(self, nbytes: int, kind: Kind, what: str, *, pinned: bool) -> HostArena | None:
        if nbytes == 0:
            return None
        arena = HostArena(
            nbytes,
            kind,
            ledger=self._ledgers.host,
            pinned_ledger=self._ledgers.pinned if pinned else None,
            pinner=self._pinner if pinned else None,
            what=what,
        )
        self._stack.enter_context(arena)
        if arena.note:
            self.notes.append(arena.note)
        return arena

    def _files(self, plan: Plan, sizes: Arenas) -> dict[str, DiskFile]:
        if not sizes.disk:
            return {}
        if plan.budget.disk is None:
            raise ConfigError("the plan puts something on disk and its budget names no disk; give disk=PATH:SIZE")
        folder = self._stack.enter_context(
            DiskFolder(
                plan.budget.disk.path,
                ledger=self._ledgers.disk,
                needed=sizes.disk,
                host_ledger=self._ledgers.host,
                policy=DiskPolicy(block=DISK_BLOCK, bounce_buffers=DISK_BOUNCE),
            )
        )
        files = {}
        for name, nbytes, kind in (
            ("parameters", sizes.disk_parameters, Kind.PARAMETER),
            ("states", sizes.disk_states, Kind.STATE),
            ("activations", sizes.disk_activations, Kind.ACTIVATION),
        ):
            if nbytes:
                files[name] = folder.create(name, nbytes, kind)
        return files

    def _on_device(self, nbytes: int, kind: Kind, what: str) -> torch.Tensor:
        buffer: torch.Tensor = self._device.allocate(nbytes, kind, what)
        self._device_buffers.append(buffer)
        return buffer

    def _gradients(self, block: Block, arena: HostArena | None) -> dict[str, GradientBuffer]:
        offsets, nbytes = gradient_offsets(block)
        if arena is None or not nbytes:
            return {}
        buffer = arena.carve(nbytes)
        by_name = {p.name: p for p in block.parameters}
        return {
            name: GradientBuffer(by_name[name], elements(buffer, by_name[name], offset), self.landing)
            for name, offset in offsets.items()
        }

    @property
    def resident_buffers(self) -> Sequence[torch.Tensor]:
        """Device buffers of resident blocks: parameters and states."""
        return self._device_buffers

    def fetch(self, block: str, target: torch.Tensor, after: Sequence[Completion]) -> Completion:
        """Queues the copy of a block's home into a slot (``slots.BlockSource``)."""
        return self.blocks[block].parameters.fetch(target[: self.blocks[block].block.nbytes], after)

    def fill(self, block: str, content: Callable[[Parameter], torch.Tensor | None]) -> None:
        """Writes parameters of ``block`` to their home, and to the fp32 master if there is one.

        ``content`` gives a parameter's value in its shape, or None to leave it as it is. One block's bytes are in
        memory at a time, whatever the tier.
        """
        state = self.blocks[block]
        values = {p.name: content(p) for p in state.block.parameters}
        target = state.parameters.staging_for_write()
        if any(value is None for value in values.values()):
            target[: state.block.nbytes].copy_(state.parameters.read()[: state.block.nbytes])
        masters: list[tuple[Parameter, torch.Tensor]] = []
        for parameter in state.block.parameters:
            value = values.pop(parameter.name)
            if value is None:
                continue
            shaped(elements(target, parameter, parameter.offset), parameter).copy_(value)
            if needs_master(parameter):
                masters.append((parameter, value))
        state.parameters.write(target)
        if masters:
            self._fill_masters(state, masters)

    def _fill_masters(self, state: BlockState, masters: Sequence[tuple[Parameter, torch.Tensor]]) -> None:
        with self.edit_states(state) as states:
            for parameter, value in masters:
                wide = torch.empty_strided(parameter.shape, parameter.stride, dtype=torch.float32).copy_(value)
                state.write_stream(MASTER, parameter, states, wide.as_strided((parameter.numel,), (1,)))

    @contextlib.contextmanager
    def edit_states(self, state: BlockState) -> Iterator[torch.Tensor]:
        """All state bytes of one block, to be changed in place; written back at the end."""
        content = state.states.read()
        yield content
        state.states.write(content)

    def read(self, block: str) -> Iterator[tuple[Parameter, torch.Tensor]]:
        """The parameters of ``block`` in their own dtype, as they are at home once all updates are done."""
        for parameter in self.blocks[block].block.parameters:
            yield parameter, self.value(block, parameter)

    def value(self, block: str, parameter: Parameter) -> torch.Tensor:
        """``parameter`` in its own dtype once its updates are done: the home bytes themselves, or a copy from disk."""
        content = self.blocks[block].parameters.read(parameter.offset, parameter.nbytes)
        return shaped(elements(content, parameter, 0), parameter)

    def full_precision(self, block: str, parameter: Parameter) -> torch.Tensor:
        """A copy of ``parameter`` on the host: its fp32 master if it has one, else its own value."""
        state = self.blocks[block]
        if needs_master(parameter):
            master = state.stream(MASTER, parameter, state.states.read())
            return shaped(master.cpu(), parameter)
        return self.value(block, parameter).clone().cpu()

    def settle(self) -> None:
        """Waits until every update of every block is at home."""
        for state in self.blocks.values():
            state.settle()

    def come_home(self) -> None:
        """Before the end, when all jobs are done: parameters on the host leave the arena of second copies."""
        for state in self.blocks.values():
            if home_tier(state.placement) is Tier.HOST:
                state.come_home()

    def close(self) -> None:
        """Frees arenas, files and device buffers. The caller has waited for all transfers."""
        while self._device_buffers:
            self._device.free(self._device_buffers.pop())
        # An arena is unmapped with the last tensor that looks into it. The user's optimizer goes on holding the
        # session; it must not go on holding the memory.
        self.blocks.clear()
        for depot in self.depots.values():
            depot.close()
        self.depots.clear()
        for buffer in (self._staging, self.workspace):
            buffer.set_(torch.UntypedStorage(0, device=buffer.device))
        self._stack.close()
