"""What stands on the device for as long as a session lives: slabs, and the regions that the plan has in them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import final

import torch

from forebay.device.base import Completion, Device
from forebay.errors import ForebayError
from forebay.memory import ArenaUsage, Kind, Tier
from forebay.runtime.tensors import alone
from forebay.slabs import SLOTS, Region, Slab

__all__ = ["Standing"]


@final
class Standing:
    """Device memory of ``slabs``, which ``open`` takes and ``close`` gives back. Regions are given out in the order of
    their addresses, each as a storage of its own: what looks at one of them sees no other.

    It is a ``SlotDevice`` too, whose memory is that of the slab of slots.
    """

    def __init__(self, device: Device, slabs: Sequence[Slab]) -> None:
        self._device = device
        self._slabs = {slab.what: slab for slab in slabs}
        self._memory: dict[str, torch.Tensor] = {}
        self._waiting: dict[str, deque[Region]] = {slab.what: deque(slab.regions) for slab in slabs}
        self.regions: list[torch.Tensor] = []
        """All that was given out, but for slots."""

    def open(self) -> None:
        """Takes the memory; once. Raises ``DeviceOutOfMemory``; what was taken before that is for ``close``."""
        for slab in self._slabs.values():
            self._memory[slab.what] = self._device.allocate(slab.nbytes, slab.kind, slab.what)

    def region(self, slab: str, nbytes: int, what: str) -> torch.Tensor:
        """The next region of ``slab``: 1-D uint8. Raises ``ForebayError`` where that is another's, or of another
        size."""
        made = self._next(slab, nbytes, what)
        self.regions.append(made)
        return made

    def _next(self, slab: str, nbytes: int, what: str) -> torch.Tensor:
        waiting = self._waiting.get(slab)
        if not nbytes:
            if waiting and waiting[0].nbytes == 0:
                waiting.popleft()
            return torch.empty(0, dtype=torch.uint8, device=self._device.name)
        if not waiting or (waiting[0].what, waiting[0].nbytes) != (what, nbytes):
            planned = f"{waiting[0].what} of {waiting[0].nbytes} bytes" if waiting else "nothing more"
            raise ForebayError(f"the plan has {planned} next in {slab}, and {what} asks for {nbytes} bytes")
        found, memory = waiting.popleft(), self._memory[slab]
        if found.nbytes == memory.numel():
            return memory  # it has the storage to itself already
        return alone(memory[found.offset : found.offset + found.nbytes])

    def usages(self) -> tuple[ArenaUsage, ...]:
        """The slabs, and what of them is somebody's."""
        return tuple(ArenaUsage(Tier.DEVICE, s.what, s.nbytes, s.nbytes, s.used) for s in self._slabs.values())

    # A device for slots.

    def allocate(self, nbytes: int, kind: Kind, what: str) -> torch.Tensor:
        """The next slot."""
        return self._next(SLOTS, nbytes, what)

    def free(self, buffer: torch.Tensor) -> None:
        """A slot goes with the slab of all of them."""

    def mark(self) -> Completion:
        """A completion that is done when all compute issued so far is done."""
        return self._device.mark()

    def hold_compute(self, completion: Completion) -> None:
        """Compute that is issued after this call sees what ``completion`` stands for."""
        self._device.hold_compute(completion)

    def close(self) -> None:
        """Gives the slabs back; the memory of each goes with the last view of a region. The caller has waited for all
        transfers and compute. A second call does nothing."""
        self.regions.clear()
        while self._memory:
            self._device.free(self._memory.popitem()[1])
