"""Device slots: which block is where, who reads it, what is fetched next. No torch.

This is the scheduling core of block streaming. It knows blocks by name and size and moves them through a
``Device``; what a buffer is (a torch tensor, a fake one, one on paper) it does not look at.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum
from typing import Any, Protocol, final

from forebay.device.base import Completion
from forebay.errors import DeviceOutOfMemory, ForebayError, SessionClosed
from forebay.memory import Kind
from forebay.scheduling.order import AccessOrder
from forebay.units import format_bytes

__all__ = ["BlockSource", "Residency", "Slot", "SlotDevice", "SlotPool"]


class Residency(Enum):
    """What the bytes of a slot are."""

    EMPTY = "empty"  # nobody's bytes
    FETCHING = "fetching"  # a copy from the occupant's home is queued or under way
    READY = "ready"  # the occupant's parameters: compute issued from now on sees them


class SlotDevice(Protocol):
    """What a pool asks of a ``Device``: memory, and the order between its copies and compute."""

    def allocate(self, nbytes: int, kind: Kind, what: str) -> Any:
        """A buffer of ``nbytes`` on the device."""

    def free(self, buffer: Any) -> None:
        """Gives back a buffer of ``allocate``."""

    def mark(self) -> Completion:
        """A completion that is done when all compute issued so far is done."""

    def hold_compute(self, completion: Completion) -> None:
        """Compute that is issued after this call sees what ``completion`` stands for."""


class BlockSource(Protocol):
    """Where blocks come from."""

    def fetch(self, block: str, target: Any, after: Sequence[Completion]) -> Completion:
        """Queues the copy of the home of ``block`` into the device buffer ``target``."""


@final
class Slot:
    """One device buffer. ``readers`` counts whoever may still read it: it is not overwritten before that is 0."""

    def __init__(self, nbytes: int, buffer: Any, dedicated_to: str | None) -> None:
        self.nbytes = nbytes
        self.buffer = buffer
        self.dedicated_to = dedicated_to
        self.occupant: str | None = None
        self.residency = Residency.EMPTY
        self.readers = 0
        self.arrival: Completion | None = None

    def expect(self, *allowed: Residency) -> None:
        """Raises if the slot is not in one of the states that the caller's transition starts from."""
        if self.residency not in allowed:
            raise ForebayError(f"slot of {self.occupant} is {self.residency.value}, expected {allowed}")

    def begin_fetch(self, block: str, arrival: Completion) -> None:
        """EMPTY to FETCHING."""
        self.expect(Residency.EMPTY)
        self.occupant, self.arrival, self.residency = block, arrival, Residency.FETCHING

    def arrive(self) -> None:
        """FETCHING to READY."""
        self.expect(Residency.FETCHING)
        self.arrival, self.residency = None, Residency.READY

    def expect_unread(self) -> None:
        """Raises if somebody may still read the slot, in words for who holds what reads it."""
        if self.readers:
            raise ForebayError(
                f"the parameters of block {self.occupant} are about to change, and something still looks at their "
                f"bytes on the device: a view that a module or the loop has kept (self.seen = self.weight[:2]), or a "
                f"graph that is not freed; let go of it before the step, or keep a copy (.detach().clone())"
            )

    def vacate(self) -> None:
        """Any state to EMPTY; there must be no reader."""
        self.expect_unread()
        self.occupant, self.arrival, self.residency = None, None, Residency.EMPTY


@final
class SlotPool:
    """Brings blocks on to the device, on demand and ahead of demand, and lets them go.

    ``sizes`` are the blocks' bytes. ``shared`` are slot sizes, largest first; ``dedicated`` names blocks that keep a
    slot of their own. ``on_vacate`` is called with a slot's buffer when its block goes (poison in debug mode).
    """

    def __init__(
        self,
        device: SlotDevice,
        source: BlockSource,
        sizes: Mapping[str, int],
        shared: Sequence[int],
        dedicated: Sequence[str] = (),
        prefetch_distance: int = 1,
        on_vacate: Callable[[Any], None] | None = None,
    ) -> None:
        self.order = AccessOrder()
        self._device = device
        self._source = source
        self._sizes = sizes
        self._distance = prefetch_distance
        self._on_vacate = on_vacate
        self._where: dict[str, Slot] = {}
        self._fitting: dict[str, list[Slot]] = {}  # the slots that hold a block
        # Readers are taken and given back by finalizers too, in whatever thread drops the last view of a slot; the
        # lock is re-entrant because a garbage collection may run a finalizer while this thread holds it.
        self._lock = threading.RLock()
        self.on_demand = 0
        self.prefetched = 0
        self.slots: list[Slot] = []
        try:
            for name in dedicated:
                self.slots.append(self._make(sizes[name], name))
            for nbytes in shared:
                self.slots.append(self._make(nbytes, None))
        except ForebayError:
            self.close()
            raise

    def _make(self, nbytes: int, block: str | None) -> Slot:
        what = f"the slot of block {block}" if block else "a slot"
        return Slot(nbytes, self._device.allocate(nbytes, Kind.PARAMETER, what), block)

    def acquire(self, block: str) -> Slot:
        """The slot with the parameters of ``block``, ready for compute; the caller counts as a reader.

        Fetches on demand what was not prefetched, then prefetches what comes next. Raises ``DeviceOutOfMemory`` if
        every slot that could hold the block has readers.
        """
        self.order.note(block)
        slot = self._where.get(block)
        if slot is None:
            self.on_demand += 1
            slot = self._slot_for(block, NO_BLOCKS)
            if slot is None:
                raise self._no_slot(block)
            self._fetch(block, slot)
        with self._lock:
            slot.readers += 1
        if slot.residency is Residency.FETCHING:
            # Everything that compute issues from here on must see the copied bytes, hence the wait before the state
            # says READY. A copy that failed raises here, in the training thread.
            try:
                if slot.arrival is not None:
                    self._device.hold_compute(slot.arrival)
            except BaseException:
                self.release(slot)
                slot.arrival = None  # it is over: waiting for it again would raise again
                self._vacate(slot)
                raise
            slot.arrive()
        try:
            self.prefetch()
        except BaseException:
            self.release(slot)  # the caller never sees the slot
            raise
        return slot

    def release(self, slot: Slot) -> None:
        """One reader less. The bytes stay until the slot is wanted for another block."""
        with self._lock:
            slot.readers -= 1

    def goes_on(self, block: str) -> bool:
        """Whether ``acquire`` of ``block``, which has a reader, would change nothing else: it was the last to be used,
        and what comes next is there or on its way."""
        if self.order.latest != block:
            return False
        return all([ahead in self._where or ahead not in self._sizes for ahead in self.upcoming()])

    def upcoming(self) -> Sequence[str]:
        """The blocks that ``prefetch`` is about."""
        return self.order.upcoming(self._distance)

    def prefetch(self, changing: Collection[str] = ()) -> None:
        """Starts the fetches of the next blocks in the recorded order, as far as slots can be had for them, and
        up to the first that is ``changing``: an update of its home is still to be queued."""
        ahead = self.upcoming()
        for block in ahead:
            if block in changing:
                return
            if block in self._where or block not in self._sizes:
                continue
            slot = self._slot_for(block, frozenset(ahead))
            if slot is None:
                return
            self.prefetched += 1
            self._fetch(block, slot)

    def invalidate(self, block: str) -> None:
        """The home of ``block`` changes: what a slot holds of it is stale and is fetched again at the next use."""
        slot = self._where.get(block)
        if slot is not None:
            self._vacate(slot)

    def bring(self, block: str) -> None:
        """Starts the fetch of ``block`` if no slot holds or receives it, whatever the record says comes next. Raises
        ``DeviceOutOfMemory`` where ``acquire`` would."""
        if block in self._where:
            return
        slot = self._slot_for(block, NO_BLOCKS)
        if slot is None:
            raise self._no_slot(block)
        self.prefetched += 1
        self._fetch(block, slot)

    def slot_of(self, block: str) -> Slot | None:
        """The slot that holds or receives ``block``, if any."""
        return self._where.get(block)

    def close(self) -> None:
        """Gives the slots' memory back. The caller has waited for all transfers and compute."""
        self._where.clear()
        self._fitting.clear()
        while self.slots:
            slot = self.slots.pop()
            self._device.free(slot.buffer)
            slot.buffer = None  # whoever holds the slot does not hold its memory

    def _fetch(self, block: str, slot: Slot) -> None:
        # The slot's last reader may be a kernel that is issued but not finished: the copy waits for all compute
        # issued so far.
        arrival = self._source.fetch(block, slot.buffer, (self._device.mark(),))
        slot.begin_fetch(block, arrival)
        self._where[block] = slot

    def _vacate(self, slot: Slot) -> None:
        occupant, arrival = slot.occupant, slot.arrival
        slot.vacate()  # first: a slot with readers is refused before anything has changed
        if occupant is not None:
            del self._where[occupant]
        try:
            if arrival is not None:
                # A copy into the slot may still be queued; whatever writes to the slot next must come after it.
                # Waiting is the rare path: a prefetched block that the pass then skipped. A copy that failed raises
                # here, once, since the slot has forgotten it.
                arrival.wait()
        finally:
            if self._on_vacate is not None:
                self._on_vacate(slot.buffer)

    def _slot_for(self, block: str, keep: frozenset[str]) -> Slot | None:
        """An empty slot for ``block``, made so by evicting the block whose next use is furthest (Belady).

        Nothing with readers and nothing in ``keep`` goes; a prefetch (``keep`` not empty) evicts nothing that is
        needed sooner than ``block`` itself.
        """
        if block not in self._fitting:
            nbytes = self._sizes[block]
            self._fitting[block] = [s for s in self.slots if s.dedicated_to == block] or [
                s for s in self.slots if s.dedicated_to is None and s.nbytes >= nbytes
            ]
        fitting = self._fitting[block]
        free = [s for s in fitting if s.readers == 0 and s.occupant not in keep]
        if not free:
            return None
        tightest = min(s.nbytes for s in fitting)
        # The smallest slots that hold the block come first, so that a large slot stays for the large blocks.
        best = min(free, key=lambda s: (s.nbytes > tightest, s.occupant is not None, s.nbytes, -self._next_use(s)))
        if keep and (best.nbytes > tightest or self._next_use(best) <= self.order.distance(block)):
            return None
        self._vacate(best)
        return best

    def _next_use(self, slot: Slot) -> int:
        return self.order.distance(slot.occupant) if slot.occupant is not None else NEVER_USED

    def _no_slot(self, block: str) -> ForebayError:
        if not self.slots:
            return SessionClosed(f"block {block} went when the model was closed, before its backward; prepare it again")
        need = self._sizes[block]
        held = ", ".join(f"{s.occupant} ({format_bytes(s.nbytes)})" for s in self.slots if s.readers) or "none"
        return DeviceOutOfMemory(
            f"no device slot for block {block}: it needs {format_bytes(need)} and every slot that holds as much is in "
            f"use ({held}); raise device_memory so that the plan has one slot more",
            needed=need,
            allowed=max((s.nbytes for s in self.slots if not s.readers), default=0),
        )


NO_BLOCKS: frozenset[str] = frozenset()
NEVER_USED = 1 << 31
