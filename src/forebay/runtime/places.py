"""Which bytes of a tier are whose: gives every block the homes that its placement names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import torch

from forebay.arenas import home_nbytes, home_tier
from forebay.device.base import Device
from forebay.memory import Tier
from forebay.model import Block
from forebay.plans import Placement, Update
from forebay.runtime.blockstate import BlockCopy
from forebay.runtime.holds import Alternate
from forebay.runtime.homes import DiskHome, Home, MemoryHome, StorageHome
from forebay.runtime.standing import Standing
from forebay.scheduling.staging import StagingRing
from forebay.slabs import RESIDENT, STATES
from forebay.tiers.arena import HostArena
from forebay.tiers.diskfile import TierFile

__all__ = ["Places"]


@final
class Places:
    """Hands out ranges of what a store has opened, each once: of ``files`` by name, of the slabs that stand on the
    device, of the arenas that are named where they are asked for. What is on disk passes through ``slots`` (parameters)
    or ``chunks`` (states), states that are updated there through ``cells``."""

    def __init__(
        self,
        device: Device,
        standing: Standing,
        files: Mapping[str, TierFile],
        slots: StagingRing,
        chunks: StagingRing,
        cells: StagingRing,
    ) -> None:
        self._device = device
        self._standing = standing
        self._files = files
        self._ends = dict.fromkeys(files, 0)
        self._others = {name: file.nbytes for name, file in files.items()}
        self._slots = slots
        self._chunks = chunks
        self._cells = cells

    def parameters(self, block: Block, placement: Placement, arena: HostArena | None) -> Home:
        """A home for the parameters of ``block``; on the host in ``arena``."""
        tier = home_tier(placement)
        if tier is Tier.DEVICE:
            buffer = self._standing.region(RESIDENT, block.nbytes, f"block {block.name}")
            return MemoryHome(self._device, buffer, block.name)
        if tier is Tier.HOST and arena is not None:
            return MemoryHome(self._device, arena.carve(block.nbytes), block.name)
        return self._on_disk("parameters", home_nbytes(block), self._slots, block.name)

    def states(self, block: Block, placement: Placement, nbytes: int, arena: HostArena | None) -> Home:
        """A home for the ``nbytes`` of optimizer state of ``block``; on the host in ``arena``."""
        what = f"states of {block.name}"
        if placement.states is Tier.DEVICE:
            buffer = self._standing.region(STATES, nbytes, f"states of block {block.name}")
            return MemoryHome(self._device, buffer.zero_(), what)
        if placement.states is Tier.DISK and nbytes:
            if placement.update is Update.STORAGE:
                return StorageHome(self._on_disk("states", nbytes, self._cells, what))
            return self._on_disk("states", nbytes, self._chunks, what)
        if arena is None or not nbytes:
            return MemoryHome(self._device, torch.empty(0, dtype=torch.uint8, device="cpu"), what)
        return MemoryHome(self._device, arena.carve(nbytes), what)

    def alternate(self, block: Block, homes: BlockCopy) -> Alternate | None:
        """The other place of what ``block`` has on disk, at ``homes``; None if that is nothing. All other places are
        at the end of their file, behind those of all copies that are there without a checkpoint."""
        parameters = self._beside(homes.parameters, "parameters", self._slots, block.name)
        states = self._beside(homes.states, "states", self._chunks, f"states of {block.name}")
        return None if parameters is None and states is None else Alternate(parameters, states)

    def _beside(self, home: Home, file: str, ring: StagingRing, what: str) -> Home | None:
        if not isinstance(home, DiskHome):
            return None
        self._others[file] -= home.nbytes
        return DiskHome(self._device, self._files[file], self._others[file], home.nbytes, ring, what)

    def _on_disk(self, file: str, nbytes: int, ring: StagingRing, what: str) -> DiskHome:
        start = self._ends[file]
        self._ends[file] += nbytes
        return DiskHome(self._device, self._files[file], start, nbytes, ring, what)
