"""From what a plan says of a block to where its bytes are: its homes, gradients and states, in the arenas and files."""

from __future__ import annotations

from typing import NamedTuple, final

import torch

from forebay.layout import gradient_offsets, residual_offsets, state_layout
from forebay.model import Block
from forebay.plans import Placement, Streaming, Update
from forebay.runtime.blockstate import BlockCopy, BlockState, InBackward, Passing, Streamed
from forebay.runtime.deferred import Deferred
from forebay.runtime.gradient_buffer import GradientBuffer
from forebay.runtime.landing import Landing
from forebay.runtime.places import Places
from forebay.runtime.sparse import residuals_in
from forebay.runtime.tensors import elements
from forebay.scheduling.gradients import GradientSlots
from forebay.tiers.arena import HostArena

__all__ = ["BlockPlacer", "OnHost"]


class OnHost(NamedTuple):
    """The arenas on the host that blocks have bytes in, and that of activations; None: no bytes."""

    parameters: HostArena | None
    second: HostArena | None
    gradients: HostArena | None
    activations: HostArena | None
    moved_states: HostArena | None
    states: HostArena | None
    unsent: HostArena | None


@final
class BlockPlacer:
    """Gives each block, in the order of the plan, the next regions of the arenas and files that are its own."""

    def __init__(
        self,
        streaming: Streaming,
        state_names: tuple[str, ...],
        places: Places,
        host: OnHost,
        slots: GradientSlots,
        landing: Landing,
    ) -> None:
        self._streaming = streaming
        self._state_names = state_names
        self._places = places
        self._host = host
        self._slots = slots
        self._landing = landing

    def placed(self, block: Block, placement: Placement) -> BlockState:
        """``block`` where ``placement`` has it."""
        places, host = self._places, self._host
        layout = state_layout(block, self._state_names, self._streaming.update_chunk, self._streaming.masters)
        parameters = places.parameters(block, placement, host.parameters)
        streams = placement.update in (Update.DEVICE, Update.STORAGE)
        states = places.states(block, placement, layout.nbytes, host.moved_states if streams else host.states)
        spare = None
        if placement.update is Update.AHEAD:
            copy = places.parameters(block, placement, host.second)
            spare = BlockCopy(copy, places.states(block, placement, layout.nbytes, host.states))
        streamed, early, gradients = None, None, dict[str, GradientBuffer]()
        if placement.update is Update.BACKWARD:
            trained = {p.name: p for p in block.parameters if p.trainable}
            passing = None if placement.resident else Passing(self._slots, *gradient_offsets(block))
            early = InBackward(trained, passing)
            if passing is not None:
                gradients = {name: GradientBuffer(p, None, self._landing) for name, p in trained.items()}
        else:
            gradients, streamed = self._gradients(block, placement)
        other = places.alternate(block, BlockCopy(parameters, states)) if self._streaming.disk_copies > 1 else None
        way = streamed if streams else None
        return BlockState(block, placement, layout, parameters, states, gradients, spare, way, early, other)

    def _gradients(self, block: Block, placement: Placement) -> tuple[dict[str, GradientBuffer], Streamed | None]:
        arena, unsent = self._host.gradients, self._host.unsent
        offsets, nbytes = gradient_offsets(block)
        if arena is None or not nbytes or placement.resident:
            return {}, None
        at_storage, residuals = placement.update is Update.STORAGE, dict[str, torch.Tensor]()
        if at_storage and unsent is not None:
            residuals = residuals_in(unsent.carve(residual_offsets(block)[1]), block)
        streamed = Streamed(arena.carve(nbytes), offsets, Deferred(), at_storage, residuals)
        by_name = {p.name: p for p in block.parameters}
        buffers = {
            name: GradientBuffer(
                by_name[name],
                elements(streamed.gradients, by_name[name], offset),
                self._landing,
                streamed.deferred,
            )
            for name, offset in offsets.items()
        }
        return buffers, streamed
