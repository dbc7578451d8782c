"""The seam between forebay and a machine: memory of the device tier, lanes of work, and their order.

Vocabulary
    *lane*        a queue of jobs that run one at a time in the order of submission (``timeline.Lane``).
    *job*         a function that a lane runs. It may wait for the jobs named in ``after``.
    *completion*  the handle of a job. ``wait`` blocks the caller until the bytes are there.
    *mark*        a completion that stands for "all compute issued so far".
    *buffer*      device memory, opaque to whoever schedules. For torch devices a 1-D uint8 tensor.

Deadlock cannot happen as long as a job names only jobs submitted before it: the oldest unfinished job is at the
head of its lane and everything it waits for is done.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from forebay.device.history import History
from forebay.device.turn import Turn
from forebay.memory import Kind, Ledger, TierUsage
from forebay.timeline import Event, Lane

__all__ = ["Completion", "Delays", "Device", "NoDelays", "NoWatch", "Watch"]


class Completion(ABC):
    """The handle of a job."""

    @abstractmethod
    def wait(self) -> Any:
        """Blocks the calling thread until the job is done and its bytes are there; returns the job's result.

        Raises what the job raised.
        """

    @abstractmethod
    def done(self) -> bool:
        """Whether ``wait`` would return at once."""


class Delays(ABC):
    """Seconds by which a job is held back before it starts: how tests make races likely."""

    @abstractmethod
    def seconds(self, lane: Lane, what: str) -> float:
        """Delay of the next job of ``lane`` that is described by ``what``."""


class NoDelays(Delays):
    """Nothing is held back."""

    def seconds(self, lane: Lane, what: str) -> float:
        return 0.0


class Device(ABC):
    """One device: its memory, its lanes, its clock.

    ``name`` is what torch calls it (``cpu``, ``cuda:0``). ``ledger`` counts what forebay allocates on it and, where
    the device can see it, what the step allocates too; ``history`` has the single pieces of that, where no allocator
    does. ``turn`` is whose it is to compute, where several threads train on it.
    """

    name: str
    ledger: Ledger
    history: History
    turn: Turn

    @abstractmethod
    def allocate(self, nbytes: int, kind: Kind, what: str) -> Any:
        """A buffer of ``nbytes`` on the device, charged to the ledger until ``free``.

        Raises ``DeviceOutOfMemory``.
        """

    @abstractmethod
    def free(self, buffer: Any) -> None:
        """Gives back a buffer of ``allocate``. Whoever calls has waited for its last reader."""

    @abstractmethod
    def translate_oom(self, what: str) -> AbstractContextManager[None]:
        """Turns an out-of-memory error that is not forebay's own in the body, which is ``what``, into
        ``DeviceOutOfMemory``."""

    @abstractmethod
    def submit(
        self,
        lane: Lane,
        job: Callable[[], Any],
        *,
        after: Sequence[Completion] = (),
        nbytes: int = 0,
        what: str = "",
    ) -> Completion:
        """Queues a host job on ``lane``; it starts when everything in ``after`` is done."""

    @abstractmethod
    def copy(
        self,
        lane: Lane,
        target: Any,
        source: Any,
        *,
        after: Sequence[Completion] = (),
        what: str = "",
        inline: bool = False,
    ) -> Completion:
        """Queues a copy between host and device on ``Lane.H2D`` or ``Lane.D2H``.

        ``target`` and ``source`` have the same number of bytes. Both stay untouched by others until the completion
        is done: the caller holds them. ``inline``: compute has just made the bytes, or is about to read them; a
        device whose copies take cores from compute may make this one here and now.
        """

    @abstractmethod
    def launch(
        self, job: Callable[[], None], *, after: Sequence[Completion] = (), nbytes: int = 0, what: str = ""
    ) -> Completion:
        """Queues work of the device itself on ``Lane.DEVICE_UPDATE``, beside the compute of the caller; ``job`` issues
        it. It starts when everything in ``after`` is done, and what it reads and writes stays untouched by others until
        the completion is done.
        """

    @abstractmethod
    def mark(self) -> Completion:
        """A completion that is done when all compute issued so far by the calling thread is done."""

    @abstractmethod
    def hold_compute(self, completion: Completion) -> None:
        """Compute that the calling thread issues after this call sees what ``completion`` stands for.

        On a device with queues of its own the host does not block. Time that compute loses here is recorded as
        ``Lane.STALL``.
        """

    @abstractmethod
    def now(self) -> float:
        """Seconds on the clock of ``events``."""

    @abstractmethod
    def record(self, event: Event) -> None:
        """Adds an event of the caller's own (compute of a block, say)."""

    @abstractmethod
    def drain_events(self) -> list[Event]:
        """The events recorded since the last call, in order of their start."""

    @abstractmethod
    def usage(self) -> TierUsage:
        """The device tier's account: exact peak since ``reset_peak``."""

    @abstractmethod
    def level(self) -> tuple[dict[Kind, int], int]:
        """Bytes of the device tier that are live now by kind, and the most that were live at a time since the last
        call, as far as the device can see that."""

    @abstractmethod
    def reset_peak(self) -> None:
        """Starts a new measurement of the peak."""

    @abstractmethod
    def synchronize(self) -> None:
        """Waits for everything submitted so far; raises the first error that a job raised and nobody waited for."""

    @abstractmethod
    def close(self) -> None:
        """Finishes what is queued, ends the threads, frees the buffers. A second call does nothing."""


class Watch(ABC):
    """Sees the memory that a step takes on the device beside what forebay allocates there.

    Where the device's own allocator keeps an exact account there is nothing to see: ``NoWatch``.
    """

    @abstractmethod
    def install(self) -> None:
        """Starts to see the ops of the calling thread; a second call does nothing, nor does one after ``close``."""

    @abstractmethod
    def uninstall(self) -> None:
        """Stops seeing ops."""

    @abstractmethod
    def close(self) -> None:
        """Stops seeing ops for good, in all threads. May be called in any of them, and wherever a finalizer runs."""

    @abstractmethod
    def activate(self, active: bool) -> None:
        """Whether what ops make from now on is charged to the device."""

    @abstractmethod
    def adopt(self, storage: Any) -> None:
        """Says that ``storage`` (a slot, a lease of one) is charged already."""

    @abstractmethod
    def mark_released(self, tensor: Any, name: str) -> None:
        """Refuses ops that read ``tensor``, the stand-in for parameter ``name`` whose bytes are elsewhere."""

    @abstractmethod
    def attribute(self, tensor: Any, kind: Kind) -> None:
        """Counts the storage of ``tensor`` as ``kind`` from now on, if it is counted."""

    @abstractmethod
    def count(self, tensor: Any, kind: Kind) -> None:
        """Counts the storage of ``tensor``, which an op has made that was not seen, as ``kind``."""

    @abstractmethod
    def found(self, tensor: Any, kind: Kind) -> None:
        """The same, if what ops make is charged now: of what compiled code has made, and of what forebay makes between
        ops."""


class NoWatch(Watch):
    """Sees nothing."""

    def install(self) -> None:
        return

    def uninstall(self) -> None:
        return

    def close(self) -> None:
        return

    def activate(self, active: bool) -> None:
        return

    def adopt(self, storage: Any) -> None:
        return

    def mark_released(self, tensor: Any, name: str) -> None:
        return

    def attribute(self, tensor: Any, kind: Kind) -> None:
        return

    def found(self, tensor: Any, kind: Kind) -> None:
        return

    def count(self, tensor: Any, kind: Kind) -> None:
        return
