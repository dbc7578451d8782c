"""Activations on the host: what forward puts there, and how it comes back for backward.

The copies of one storage that is moved
    its *origin*    the storage that an op has made on the device. It goes when nobody holds it any more: autograd holds
                    a handle in its place (``saved.py``), and the copy to the host holds it until it is done.
    its *range*     bytes of the arena on the host, from ``offload`` until the last reference to its *ticket* is gone
                    and no copy uses them any longer.
    its *replica*   a fresh storage on the device, from its reload until the ticket is gone and nobody looks into it.

A ticket stands for all three: every saved tensor over the storage holds the same one, so that bytes move once however
many views of them are saved. It dies wherever its last reference does, in a lane's thread too; what it leaves is only
noted then, and cleared away when the stash is asked for something the next time.
"""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass
from typing import final

import torch

from forebay.device.base import Completion, Device, Watch
from forebay.errors import SessionClosed
from forebay.layout import MOVED_LEAST
from forebay.memory import Kind
from forebay.plans import Streaming
from forebay.scheduling.activations import HostRanges, OffloadWindow, Reloads
from forebay.timeline import Lane

__all__ = ["Stash", "Ticket"]


@final
@dataclass(slots=True, eq=False)
class _Moved:
    """One storage that was moved: where in the arena it is, the copies, the replica. Holds nothing of its ticket."""

    offset: int
    nbytes: int
    what: str
    offloaded: Completion
    reloaded: Completion | None = None
    replica: torch.Tensor | None = None
    demanded: bool = False

    @property
    def at_rest(self) -> bool:
        """Whether no copy uses its range or its replica any longer."""
        return self.offloaded.done() and (self.reloaded is None or self.reloaded.done())

    def settle(self) -> None:
        """Waits until it is at rest."""
        self.offloaded.wait()
        if self.reloaded is not None:
            self.reloaded.wait()


@final
class Ticket:
    """The bytes of one storage that were moved to the host; ``version`` is torch's count of in-place changes to it when
    they were copied."""

    __slots__ = ("__weakref__", "_moved", "_stash", "version")

    def __init__(self, stash: Stash, moved: _Moved, version: int) -> None:
        self._stash = stash
        self._moved = moved
        self.version = version

    @property
    def nbytes(self) -> int:
        """Bytes of the storage."""
        return self._moved.nbytes

    def tensor(self) -> torch.Tensor:
        """The bytes on the device, 1-D uint8, the same tensor every time. Compute issued from here on has them.

        Raises what the copies raised, ``SessionClosed`` after the stash was closed, and ``DeviceOutOfMemory`` (cpu) or
        torch's error where the device has no room for them.
        """
        return self._stash._demand(self._moved)

    def __del__(self) -> None:
        # Not weakref.finalize: its registry would hold what is moved for good once an error's frames hold the ticket.
        self._stash._let_go(self._moved)


@final
class Stash:
    """Everything of one session that is on the host, or on its way there or back.

    ``arena`` (1-D uint8) is where, or None: there is no room for anything. ``kept`` counts what was to be moved and
    found no room there. Used by one thread at a time; only tickets may be let go anywhere.
    """

    def __init__(
        self, device: Device, watch: Watch, torch_device: torch.device, arena: torch.Tensor | None, streaming: Streaming
    ) -> None:
        self._device = device
        self._watch = watch
        self._torch_device = torch_device
        self._arena = arena
        self._ranges = HostRanges(0 if arena is None else arena.numel())
        self._window = OffloadWindow(device, streaming.offload_window)
        self._reloads = Reloads[_Moved](streaming.reload_window, self._reload)
        # By storage; the tickets of this forward, for as long as something may yet save what they stand for.
        self._made: dict[int, tuple[weakref.ref[torch.UntypedStorage], Ticket]] = {}
        self._live: set[_Moved] = set()
        # Of tickets that are gone: just so, and until the copies that use them are done.
        self._dead: deque[_Moved] = deque()
        self._leaving: list[_Moved] = []
        self.kept = 0

    @property
    def taken(self) -> int:
        """Bytes of the arena that are in use."""
        self._clear_away()
        return self._ranges.taken

    # Forward.

    def begin_forward(self) -> None:
        """A pass begins."""
        self._made.clear()
        self._clear_away()

    def end_forward(self) -> None:
        """A pass is over: what was moved and that nobody has saved is let go."""
        self._made.clear()
        self._clear_away()

    def offload(self, tensor: torch.Tensor, what: str) -> Ticket | None:
        """Queues the copy to the host of the storage of ``tensor``, which compute was asked to make; ``what`` names it
        in the events.

        None: it stays on the device, because it is small, or elsewhere, or because the arena has no room, which is
        counted in ``kept``. A storage that was moved already is not moved again.
        """
        storage = tensor.untyped_storage()
        nbytes = storage.nbytes()
        if nbytes < MOVED_LEAST or tensor.device != self._torch_device or tensor.is_inference():
            return None
        known = self.ticket_of(tensor)
        if known is not None:
            return known
        self._window.admit(nbytes)
        offset = self._room(nbytes)
        if offset is None or self._arena is None:
            self.kept += 1
            return None
        # The copy's own look at the storage: it holds the bytes until they are on the host, whoever lets go before.
        origin = _bytes_of(storage, self._torch_device)
        target = self._arena[offset : offset + nbytes]
        try:
            # The mark: the copy must not start before the kernel that makes the bytes is done.
            done = self._device.copy(Lane.D2H, target, origin, after=(self._device.mark(),), what=f"offload {what}")
        except BaseException:
            self._ranges.give_back(offset)  # no lane has taken it
            raise
        del origin
        moved = _Moved(offset, nbytes, what, done)
        ticket = Ticket(self, moved, tensor._version)
        self._live.add(moved)
        self._reloads.offloaded(moved, nbytes)
        self._made[storage._cdata] = weakref.ref(storage), ticket
        self._window.sent(done, nbytes)
        return ticket

    def ticket_of(self, tensor: torch.Tensor) -> Ticket | None:
        """The ticket of the storage of ``tensor``, if it was moved in this pass and not changed since."""
        storage = tensor.untyped_storage()
        known = self._made.get(storage._cdata)
        # An address is used again when its storage is gone; and what was changed is not what is on the host.
        if known is None or known[0]() is not storage or known[1].version != tensor._version:
            return None
        return known[1]

    def _room(self, nbytes: int) -> int | None:
        self._clear_away()
        offset = self._ranges.take(nbytes)
        if offset is None and self._leaving:
            # Of graphs that are gone: their bytes are free as soon as the copies that use them are done.
            for moved in self._leaving:
                moved.settle()
            self._clear_away()
            offset = self._ranges.take(nbytes)
        return offset

    # Backward.

    def begin_backward(self) -> None:
        """Backward begins: it has the device to itself and what is kept, and what it will ask for first comes back."""
        self._clear_away()
        self._window.empty()
        self._reloads.begin_backward()

    def _demand(self, moved: _Moved) -> torch.Tensor:
        self._clear_away()
        self._reloads.demand(moved)
        replica, reloaded = moved.replica, moved.reloaded
        if replica is None or reloaded is None:
            raise SessionClosed(f"{moved.what} went when the model was closed, before its backward; prepare it again")
        self._device.hold_compute(reloaded)
        moved.demanded = True
        return replica

    def _reload(self, moved: _Moved) -> None:
        if self._arena is None:
            return
        replica = torch.empty(moved.nbytes, dtype=torch.uint8, device=self._torch_device)
        self._watch.count(replica, Kind.ACTIVATION)
        # The mark: the memory may have been given back by an op that compute has not come to yet. And the bytes must be
        # on the host before they are read there.
        after = (moved.offloaded, self._device.mark())
        source = self._arena[moved.offset : moved.offset + moved.nbytes]
        moved.reloaded = self._device.copy(Lane.H2D, replica, source, after=after, what=f"reload {moved.what}")
        moved.replica = replica

    # What is over.

    def _let_go(self, moved: _Moved) -> None:
        """The last reference to a ticket is gone, in any thread, inside any call: nothing is waited for here."""
        if moved.demanded or moved.reloaded is None or moved.reloaded.done():
            # Demanded: compute is behind the copy, and so is whoever gets the memory next.
            moved.replica = None
        self._dead.append(moved)

    def _clear_away(self) -> None:
        while self._dead:
            moved = self._dead.popleft()
            self._reloads.forget(moved)
            self._leaving.append(moved)
        leaving, self._leaving = self._leaving, []
        for moved in leaving:
            if not moved.at_rest:
                self._leaving.append(moved)
                continue
            moved.replica = None
            self._live.discard(moved)
            self._ranges.give_back(moved.offset)

    def close(self) -> None:
        """Lets go of the arena and of everything that came back. The caller has waited for all copies. A graph that is
        still there can no longer be run backward."""
        self._made.clear()
        self._arena = None
        self._clear_away()
        for moved in self._live:
            self._reloads.forget(moved)
            moved.replica = None
        self._live.clear()


def _bytes_of(storage: torch.UntypedStorage, device: torch.device) -> torch.Tensor:
    whole: torch.Tensor = torch.empty(0, dtype=torch.uint8, device=device)
    return whole.set_(storage, 0, (storage.nbytes(),), (1,))
