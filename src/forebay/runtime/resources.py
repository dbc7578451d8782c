"""What a session must give back."""

from __future__ import annotations

from contextlib import ExitStack
from typing import final

from forebay.device.base import Device, Watch
from forebay.kernels.team import Team
from forebay.runtime.host_arenas import Ledgers
from forebay.runtime.saved import take_off
from forebay.runtime.stash import Stash
from forebay.runtime.store import Store
from forebay.scheduling.slots import SlotPool
from forebay.tiers.lock import FolderLocks

__all__ = ["Resources"]


@final
class Resources:
    """What must be given back: threads, arenas, files, device buffers. Holds no reference to the model, so that a
    finalizer of the model can hold this."""

    def __init__(
        self,
        device: Device,
        watch: Watch,
        ledgers: Ledgers,
        store: Store,
        pool: SlotPool,
        stash: Stash,
        team: Team,
        *,
        owns_device: bool,
    ) -> None:
        self.device = device
        self.watch = watch
        self.ledgers = ledgers
        self.store = store
        self.pool = pool
        self.stash = stash
        self.team = team
        self.locks = FolderLocks()
        self._owns_device = owns_device
        self._closed = False

    def close(self) -> None:
        """Waits for what is queued, then frees everything. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        # From the last one to the first, each whatever those before it raised: no thread, file or arena outlives it.
        with ExitStack() as closing:
            closing.callback(self.locks.close)
            if self._owns_device:
                closing.callback(self.device.close)
            for held in (self.team, self.store, self.stash, self.pool):
                closing.callback(held.close)
            # Nothing is freed while a lane may still read or write it.
            closing.callback(self.device.synchronize)
            closing.callback(self.watch.close)
            closing.callback(take_off, self.watch)
