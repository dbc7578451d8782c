"""Where on the device everything lies that stands there for as long as a session lives. No torch.

slab      one piece of device memory, taken at the start and given back at the end
region    what of it is one block's, or one slot

Parameters that stay on the device have a slab of their own: they outlive the session, and nothing else is to be held
with them. The order of regions is that of the plan, so that the same plan gives the same addresses on every machine.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from forebay.arenas import arenas_of
from forebay.layout import align, state_layout
from forebay.memory import Kind, Tier
from forebay.model import Model
from forebay.plans import Plan

__all__ = ["RESIDENT", "SLOTS", "STATES", "WINDOW", "Region", "Slab", "device_slabs"]

RESIDENT = "parameters that stay on the device"
STATES = "optimizer states on the device"
SLOTS = "slots"
WINDOW = "the window of updates on the device"


@dataclass(frozen=True)
class Region:
    """``nbytes`` from ``offset`` of a slab on. ``what`` says whose, in the words of error messages."""

    what: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Slab:
    """One piece of device memory of one ``kind``, and its regions in the order of their addresses."""

    what: str
    kind: Kind
    regions: tuple[Region, ...]

    @property
    def nbytes(self) -> int:
        """Bytes up to the end of the last region."""
        return max((region.offset + region.nbytes for region in self.regions), default=0)

    @property
    def used(self) -> int:
        """Bytes that are somebody's: all but what is between two regions."""
        return sum(region.nbytes for region in self.regions)


def device_slabs(model: Model, plan: Plan, state_names: tuple[str, ...]) -> tuple[Slab, ...]:
    """The slabs of ``plan`` for ``model``, with an optimizer that keeps ``state_names`` per element. Those that would
    have no byte are left out. Their bytes are those of ``Arenas.device`` but for gradients."""
    blocks = {block.name: block for block in model.blocks}
    resident, states, slots = [], [], []
    for placement in plan.placements:
        block = blocks[placement.block]
        if placement.resident:
            resident.append((f"block {block.name}", block.nbytes))
        elif placement.parameters is Tier.DEVICE:
            slots.append((f"the slot of block {block.name}", block.nbytes))
        if placement.states is Tier.DEVICE:
            nbytes = state_layout(block, state_names, plan.streaming.update_chunk, plan.streaming.masters).nbytes
            states.append((f"states of block {block.name}", nbytes))
    slots += [("a slot", nbytes) for nbytes in plan.streaming.slots]
    window = [(WINDOW, arenas_of(model, plan, state_names).device_updates)]
    slabs = (
        _slab(RESIDENT, Kind.PARAMETER, resident),
        _slab(STATES, Kind.STATE, states),
        _slab(SLOTS, Kind.PARAMETER, slots),
        _slab(WINDOW, Kind.STAGING, window),
    )
    return tuple(slab for slab in slabs if slab.nbytes)


def _slab(what: str, kind: Kind, pieces: Iterable[tuple[str, int]]) -> Slab:
    """``pieces``, each with its bytes, one behind the other at multiples of ``ALIGNMENT``."""
    regions, end = list[Region](), 0
    for owner, nbytes in pieces:
        regions.append(Region(owner, align(end), nbytes))
        end = align(end) + nbytes
    return Slab(what, kind, tuple(regions))
