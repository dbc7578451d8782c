"""Activations that leave the device in forward, or take fewer bytes there, and how they come back for backward.

The copies of one storage that is treated
    its *origin*    the storage that an op has made on the device. It goes when nobody holds it any more: autograd holds
                    a handle in its place (``saved.py``), and the copy off the device holds it until it is done.
    its *codes*     of fewer bits an element, where the plan says so: they are what stays or leaves in its place.
    its *rest*      where the plan treats a part of it: a copy of what comes behind that part, in a storage of its own
                    on the device, so that the origin can go.
    its *range*     bytes of a depot (``depots.py``), on the host or on disk, from when it leaves until the last
                    reference to its *ticket* is gone and no job uses them any longer.
    its *arrival*   a device tensor that the range is copied back to. Without codes this is the replica: it has the size
                    of the origin, the range fills the beginning of it, and the rest is copied behind that.
    its *replica*   a fresh storage on the device, until the ticket is gone and nobody looks into it.

A ticket stands for all of them: every saved tensor over the storage holds the same one, so that bytes move once however
many views of them are saved. It dies wherever its last reference does, in a lane's thread too; what it leaves is only
noted then, and cleared away when the stash is asked for something the next time.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import final

import torch

from forebay.compression import MASK_BITS
from forebay.device.base import Completion, Device, Watch
from forebay.device.completions import dependency_failure
from forebay.errors import ForebayError, SessionClosed
from forebay.layout import MOVED_LEAST
from forebay.memory import Kind
from forebay.plans import Streaming
from forebay.runtime.codes import Coder, Form, decoded, is_codable
from forebay.runtime.depots import Depot, Range
from forebay.scheduling.activations import Reloads
from forebay.scheduling.window import TransferWindow
from forebay.treatments import Fate, Treatment

__all__ = ["Stash", "Ticket"]


@final
@dataclass(slots=True, eq=False, weakref_slot=True)
class _Treated:
    """One storage that was treated: where its bytes are, and in what form. Holds nothing of its ticket.

    ``arrival`` are the bytes on the device as they were kept or came back; ``nbytes`` is how many those are. ``rest``
    are those that were not treated. ``lost`` says in words why there are none any more.
    """

    what: str
    nbytes: int
    form: Form | None
    rest: torch.Tensor | None = None
    range: Range | None = None
    arrival: torch.Tensor | None = None
    reloaded: Completion | None = None
    replica: torch.Tensor | None = None
    demanded: bool = False
    lost: str = ""

    @property
    def at_rest(self) -> bool:
        """Whether no job uses its range or its arrival any longer."""
        left = self.range is None or self.range.at_rest
        return left and (self.reloaded is None or self.reloaded.done())

    def failure(self) -> BaseException | None:
        """Waits until it is at rest; what one of the jobs has raised, if one has."""
        moved = None if self.range is None else self.range.failure()
        back = None if self.reloaded is None else dependency_failure(self.reloaded)
        return moved or back

    def leave_device(self) -> None:
        """Lets go of its bytes on the device."""
        self.arrival = self.replica = self.rest = None


@final
class Ticket:
    """The bytes of one storage that was treated; ``version`` is torch's count of in-place changes to it until then."""

    __slots__ = ("__weakref__", "_saves", "_stash", "_treated", "version")

    def __init__(self, stash: Stash, treated: _Treated, version: int, saves: int | None) -> None:
        self._stash = stash
        self._treated = treated
        self._saves = saves
        self.version = version

    def admits(self) -> bool:
        """Whether one more tensor may be saved as this ticket. Of numbers of which only signs are left, one may be."""
        if self._saves is None:
            return True
        self._saves -= 1
        return self._saves >= 0

    def tensor(self) -> torch.Tensor:
        """The bytes on the device, 1-D uint8, the same tensor every time. Compute issued from here on has them.

        Raises what the jobs raised, ``SessionClosed`` after the stash was closed, and ``DeviceOutOfMemory`` (cpu) or
        torch's error where the device has no room for them.
        """
        return self._stash._demand(self._treated)

    def __del__(self) -> None:
        # Not weakref.finalize: its registry would hold what is treated for good once an error's frames hold the ticket.
        self._stash._let_go(self._treated)


@final
class Stash:
    """Everything of one session that was treated, and is still wanted.

    ``depots`` are where things go that leave the device, by fate; where there is none there is no room. ``kept`` counts
    what was to leave and found no room there, and what could not be made into codes. Used by one thread at a time; only
    tickets may be let go anywhere.
    """

    def __init__(
        self,
        device: Device,
        watch: Watch,
        torch_device: torch.device,
        depots: Mapping[Fate, Depot],
        streaming: Streaming,
    ) -> None:
        self._device = device
        self._watch = watch
        self._torch_device = torch_device
        self._depots = depots
        self.coder = Coder(torch_device)
        self._window = TransferWindow(device, streaming.offload_window)
        self._reloads = Reloads[_Treated](streaming.reload_window, self._reload)
        # The tickets of this forward, for as long as something may yet save what they stand for: each goes with its
        # storage, in whatever thread lets go of that last.
        self._made = weakref.WeakKeyDictionary[torch.UntypedStorage, Ticket]()
        # Weak: a job that failed holds its error, whose frames hold the ticket of whoever was told.
        self._live: weakref.WeakSet[_Treated] = weakref.WeakSet()
        # Of tickets that are gone: just so, and until the jobs that use them are done.
        self._dead: deque[_Treated] = deque()
        self._leaving: list[_Treated] = []
        self.kept = 0

    @property
    def taken(self) -> int:
        """Bytes of the depots that are in use."""
        self._clear_away()
        return sum(depot.taken for depot in self._depots.values())

    # Forward.

    def begin_forward(self) -> None:
        """A pass begins."""
        self._made.clear()
        self._clear_away()
        self._tidy()

    def end_forward(self) -> None:
        """A pass is over: what was treated and that nobody has saved is let go."""
        self._made.clear()
        self._clear_away()
        self._tidy()

    def treat(self, tensor: torch.Tensor, treatment: Treatment, what: str, *, signs: bool = False) -> Ticket | None:
        """Does with the storage of ``tensor``, which compute was asked to make, what ``treatment`` says: makes its
        codes, and queues the way off the device. ``what`` names it in the events. ``signs``: of the numbers in it only
        whether they are 0 will be asked, by the tensor that is saved next.

        None: it stays on the device as it is, because it is small, or elsewhere, or because there is no room or there
        are no such codes of it, which is counted in ``kept``. A storage that was treated already is not treated again.
        """
        storage, bits = tensor.untyped_storage(), treatment.bits
        if storage.nbytes() < MOVED_LEAST or tensor.device != self._torch_device or tensor.is_inference():
            return None
        known = self.ticket_of(tensor)
        if known is not None:
            return known
        if bits and not is_codable(tensor, bits, signs=signs):
            self.kept += 1
            return None
        leaves, whole = treatment.fate is not Fate.KEEP, storage.nbytes()
        part = treatment.treated_nbytes(whole)
        # On the device until it has left, and from when it is to come back: the codes, or the whole storage.
        in_transit = self.coder.nbytes(tensor, part, bits) if bits else whole
        if leaves:
            # Before the codes are made: they are part of what the window bounds.
            self._told(lambda: self._window.admit(in_transit))
        # Without codes a look of the copy's own at the storage: it holds the bytes until they have left, whoever lets
        # go before.
        look = _bytes_of(storage, self._torch_device)
        held, form = self.coder.encode(tensor, part, bits) if bits else (_first(look, part), None)
        treated = _Treated(what, in_transit, form)
        if not self._settles(treated, held, treatment.fate):
            return None
        ticket = Ticket(self, treated, tensor._version, 1 if bits == MASK_BITS and signs else None)
        del held
        self._live.add(treated)
        # Only now: what stays as it is needs no copy of a part. Where the device has no room for it, the ticket goes
        # with the error, and its range with the ticket.
        if part < whole:
            treated.rest = look[part:].clone()
            self._watch.found(treated.rest, Kind.ACTIVATION)
        del look
        self._made[storage] = ticket
        left = None if treated.range is None else treated.range.left
        if left is not None:
            self._reloads.offloaded(treated, in_transit)
            self._told(lambda: self._window.sent(left, in_transit))
        return ticket

    def _settles(self, treated: _Treated, held: torch.Tensor, fate: Fate) -> bool:
        """Whether ``held``, what was treated, is on its way to where ``fate`` says, or is codes, which may stay."""
        leaves = fate is not Fate.KEEP
        if leaves:
            treated.range = self._room(fate, held, treated.what)
        if treated.range is None:
            self.kept += leaves
            if treated.form is None:
                return False
            treated.arrival = held
            self._watch.found(held, Kind.ACTIVATION)
        return True

    def ticket_of(self, tensor: torch.Tensor) -> Ticket | None:
        """The ticket of the storage of ``tensor``, if it was treated in this pass and not changed since."""
        known = self._made.get(tensor.untyped_storage())
        # What was changed is not what was treated.
        return None if known is None or known.version != tensor._version else known

    def _room(self, fate: Fate, held: torch.Tensor, what: str) -> Range | None:
        depot = self._depots.get(fate)
        if depot is None:
            return None
        self._clear_away()
        found = depot.send(held, what)
        if found is None and self._leaving:
            # Of graphs that are gone: their bytes are free as soon as the jobs that use them are done.
            for treated in self._leaving:
                treated.failure()
            self._clear_away()
            found = depot.send(held, what)
        return found

    # Backward.

    def begin_backward(self) -> None:
        """Backward begins: it has the device to itself and what is kept, and what it will ask for first comes back."""
        self._clear_away()
        self._told(self._window.empty)
        self._reloads.begin_backward()
        self._fill()

    def _fill(self) -> None:
        for depot in self._depots.values():
            depot.fill()

    def _told(self, wait: Callable[[], object]) -> None:
        """Whoever waits may be told that a job has failed.

        The error then has frames that hold a graph, and so tickets; and what tickets stand for holds the job and its
        error. That circle leads through autograd's nodes, where the garbage collector does not look. So whatever failed
        with an error that is told lets go of it, and of its bytes.
        """
        try:
            wait()
        except BaseException as error:
            for treated in list(self._live):
                if treated.at_rest and treated.failure() is error:
                    self._lose(treated, str(error))
            self._tidy()
            raise

    def _lose(self, treated: _Treated, why: str) -> None:
        self._forget(treated)
        treated.leave_device()
        if treated.range is not None:
            treated.range.give_back()
        treated.range = treated.reloaded = None
        treated.lost = why

    def _tidy(self) -> None:
        for depot in self._depots.values():
            depot.tidy()

    def _demand(self, treated: _Treated) -> torch.Tensor:
        self._clear_away()
        if treated.lost:
            raise ForebayError(f"{treated.what} was lost on its way off the device or back: {treated.lost}")
        self._reloads.demand(treated)
        reloaded = treated.reloaded
        if reloaded is not None:
            self._told(lambda: self._device.hold_compute(reloaded))
        if treated.replica is None:
            treated.replica = self._replica(treated)
            # They have served; the memory comes after the compute that has read them.
            treated.arrival = treated.rest = None
        treated.demanded = True
        self._fill()
        return treated.replica

    def _replica(self, treated: _Treated) -> torch.Tensor:
        if treated.arrival is None:
            raise SessionClosed(f"{treated.what} went when the model was closed, before its backward; prepare it again")
        if treated.form is None:
            if treated.rest is not None:
                treated.arrival[treated.nbytes - treated.rest.numel() :] = treated.rest
            return treated.arrival
        replica = decoded(treated.arrival, treated.form, treated.rest)
        self._watch.found(replica, Kind.ACTIVATION)
        return replica

    def _reload(self, treated: _Treated) -> None:
        if treated.range is None:
            return
        arrival = torch.empty(treated.nbytes, dtype=torch.uint8, device=self._torch_device)
        self._watch.found(arrival, Kind.ACTIVATION)
        # Of a part that left as it was, its own bytes: the rest is put behind them when they are asked for.
        treated.reloaded = treated.range.back(_first(arrival, treated.range.nbytes))
        treated.arrival = arrival

    # What is over.

    def _let_go(self, treated: _Treated) -> None:
        """The last reference to a ticket is gone, in any thread, inside any call: nothing is waited for here."""
        if treated.demanded or treated.reloaded is None or treated.reloaded.done():
            # Demanded: compute is behind the copy, and so is whoever gets the memory next.
            treated.leave_device()
        self._dead.append(treated)

    def _clear_away(self) -> None:
        while self._dead:
            treated = self._dead.popleft()
            if treated.reloaded is None:
                self._forget(treated)
            self._leaving.append(treated)
        leaving, self._leaving = self._leaving, []
        for treated in leaving:
            if not treated.at_rest:
                self._leaving.append(treated)
                continue
            # Not before: what comes back for nobody takes its share of the reload window until the copy is done.
            self._forget(treated)
            treated.leave_device()
            if treated.range is not None:
                treated.range.give_back()

    def _forget(self, treated: _Treated) -> None:
        self._reloads.forget(treated)
        if treated.range is not None:
            treated.range.forget()

    def close(self) -> None:
        """Lets go of the depots and of everything on the device. The caller has waited for all jobs. A graph that is
        still there can no longer be run backward."""
        self._made.clear()
        self._clear_away()
        for treated in self._live:
            self._forget(treated)
            treated.leave_device()
        self._live.clear()
        for depot in self._depots.values():
            depot.close()


def _first(whole: torch.Tensor, nbytes: int) -> torch.Tensor:
    """The first ``nbytes`` of ``whole``, 1-D uint8."""
    return whole if nbytes == whole.numel() else whole[:nbytes]


def _bytes_of(storage: torch.UntypedStorage, device: torch.device) -> torch.Tensor:
    whole: torch.Tensor = torch.empty(0, dtype=torch.uint8, device=device)
    return whole.set_(storage, 0, (storage.nbytes(),), (1,))
