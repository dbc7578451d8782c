"""An NVIDIA GPU as a device: copies on streams of their own, memory from torch's caching allocator under a budget.

Vocabulary
    *issue*    what the host does: a lane's thread puts a copy on the lane's stream. The bytes move later.
    *order*    to make a stream wait for an event; the host goes on at once.
    *wait*     to make the host wait.

A job of a copy waits (host) until what it depends on has been issued, orders the lane's stream after it, and issues
the copy. Compute is ordered after a fetch in the same way, so the host runs ahead of the device all the time.

Lifetimes. ``record_stream`` is not used: it gives memory back at a time that depends on when the allocator polls
its events, and a budget cannot be promised on top of that. Instead
- a fetch (H2D) writes into a buffer that the caller holds until the completion is done;
- an offload (D2H) often reads a gradient that nobody else holds. Its job keeps the source and finishes only when
  the copy has, so the allocator cannot hand the bytes to the next kernel while they are still being read.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from types import MappingProxyType
from typing import Any, final

import torch

from forebay.device.base import Completion, Delays, Device, NoDelays
from forebay.device.completions import DONE, LaneCompletion, WorkerCompletion, dependency_failure
from forebay.device.cpu import as_bytes, copies_bytes
from forebay.device.cuda_clock import CudaClock
from forebay.device.cuda_limit import limit_of
from forebay.device.event_log import EventLog
from forebay.device.history import History
from forebay.device.lanes import WorkerLanes
from forebay.device.turn import Turn
from forebay.errors import BudgetExceeded, DeviceOutOfMemory, ModelError
from forebay.memory import Kind, Ledger, Tier, TierUsage
from forebay.timeline import Event, Lane
from forebay.units import format_bytes, parse_bytes

__all__ = ["CudaDevice", "configure_allocator", "requested_bytes"]


def configure_allocator() -> None:
    """Asks torch's allocator for ``expandable_segments``, unless the user has decided.

    A plan counts the bytes of tensors; segments of fixed size would add holes that no plan can foresee. The setting
    has an effect only on memory that is taken from now on: what a program has used of the device before lies as it lay.
    """
    # The variables in which torch takes the user's settings, the newer name first. The call below replaces all
    # settings, so what the user has set goes in again.
    settings = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    if "expandable_segments" not in settings:
        torch._C._accelerator_setAllocatorSettings(",".join(filter(None, [settings, "expandable_segments:True"])))


def requested_bytes(message: str) -> int | None:
    """Bytes that torch's out-of-memory ``message`` says were asked for, to the two decimals it prints; or None."""
    found = re.search(r"[Tt]ried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)", message)
    if found is None:
        return None
    number, unit = found.groups()
    return int(float(number)) if unit == "bytes" else parse_bytes(f"{number}{unit}")


@final
class _CudaCompletion(LaneCompletion):
    """Work on a stream: ``issued`` says that the host has put it there, ``event`` that the device has done it."""

    def __init__(self, issued: LaneCompletion, event: torch.cuda.Event) -> None:
        self._issued = issued
        self._event = event

    def wait(self) -> None:
        self._issued.wait()
        self._event.synchronize()

    def done(self) -> bool:
        if not self._issued.done():
            return False
        # An event that was never recorded answers True: a job that failed is done.
        return bool(self._event.query())

    def failure(self) -> BaseException | None:
        failure = self._issued.failure()
        if failure is None:
            try:
                self._event.synchronize()
            except RuntimeError as error:
                return error
        return failure

    def job(self) -> WorkerCompletion | None:
        return self._issued.job()

    def order(self, stream: torch.cuda.Stream) -> BaseException | None:
        """Work put on ``stream`` after this call starts after this. Waits for the issue only; returns its failure."""
        failure = self._issued.failure()
        if failure is None:
            stream.wait_event(self._event)
        return failure


def _order_after(stream: torch.cuda.Stream, completion: Completion) -> BaseException | None:
    """Orders ``stream`` after ``completion``; what has no event is waited for on the host. Returns its failure."""
    if isinstance(completion, _CudaCompletion):
        return completion.order(stream)
    return dependency_failure(completion)


def _issue_copy(target: torch.Tensor, source: torch.Tensor, whole_bytes: bool) -> None:
    if whole_bytes:
        target, source = as_bytes(target), as_bytes(source)
    # A strided copy goes through a temporary of torch's own, whose life ends when copy_ returns.
    target.copy_(source, non_blocking=whole_bytes)


def _prepare_thread(index: int) -> None:
    # Both are thread-local: a new thread starts on device 0 with grad mode enabled.
    torch.cuda.set_device(index)
    torch.set_grad_enabled(False)


@final
class CudaDevice(Device):
    """GPU number ``index`` with ``budget`` bytes of memory (None: all there is).

    The budget is torch's per-process limit, so that it holds for what the step allocates too, not only for what
    forebay places; it counts whole segments of the allocator. Of several devices on one GPU the limit is that of all
    (``SharedLimit``). Raises ``ModelError`` if there is no such GPU or the
    budget is more than it has.
    """

    def __init__(self, index: int = 0, budget: int | None = None, *, delays: Delays | None = None) -> None:
        configure_allocator()
        if not torch.cuda.is_available() or index >= torch.cuda.device_count():
            count = torch.cuda.device_count() if torch.cuda.is_available() else 0
            raise ModelError(f"there is no CUDA device {index}: torch sees {count}; use another index or device='cpu'")
        self.name = f"cuda:{index}"
        self.ledger = Ledger(Tier.DEVICE, budget)
        self.history = History()  # without an entry: torch's allocator keeps its own
        self.turn = Turn()
        self._index = index
        # torch versions multiply the fraction by one or the other; the larger keeps the limit at or under the budget.
        self._total = max(torch.cuda.get_device_properties(index).total_memory, torch.cuda.mem_get_info(index)[1])
        if budget is not None and budget > self._total:
            raise ModelError(
                f"device_memory is {format_bytes(budget)} and {self.name} has {format_bytes(self._total)}; "
                f"ask for {format_bytes(self._total)} or less"
            )
        # What torch keeps for later of tensors that are gone (a model that was on the device while it was made, say)
        # counts under the limit, in segments as they were before.
        torch.cuda.empty_cache()
        self._streams = {
            # Fetches must not queue behind compute: the next block arrives while this one is computed.
            Lane.H2D: torch.cuda.Stream(index),
            # Offloads must not queue behind fetches: a GPU has a copy engine for each direction.
            Lane.D2H: torch.cuda.Stream(index),
            # Updates must not queue behind the forward that they come under, nor the forward behind all of them.
            Lane.DEVICE_UPDATE: torch.cuda.Stream(index),
        }
        self._log = EventLog()
        self._clock = CudaClock(self._log, self._streams[Lane.H2D])
        self._lanes = WorkerLanes(
            self.now, self._log, delays or NoDelays(), prepare_thread=partial(_prepare_thread, index), turn=self.turn
        )
        self._lock = threading.Lock()
        self._buffers: dict[int, tuple[torch.Tensor, Kind]] = {}
        self._closed = False
        self._share = None if budget is None else budget / self._total
        limit_of(index).enter(self._share)

    @property
    def dropped_events(self) -> int:
        """Events lost because nobody drained them in time."""
        return self._log.dropped

    def allocate(self, nbytes: int, kind: Kind, what: str) -> torch.Tensor:
        """A 1-D uint8 tensor of ``nbytes`` on the GPU (aligned to 512 bytes), charged to the ledger until ``free``.

        Raises ``DeviceOutOfMemory`` over the budget.
        """
        headroom = self.ledger.headroom
        if headroom is not None and nbytes > headroom:
            raise self._with_snapshot(self.ledger.exceeded(kind, nbytes, what))
        with self.translate_oom(what or kind.value):
            buffer = torch.empty(nbytes, dtype=torch.uint8, device=self.name)
        self.ledger.charge(kind, nbytes, what)  # after: bytes that torch refuses must not show in the peak
        # The allocator may hand out bytes that queued kernels still use: it relies on the new owner's work coming
        # after them on the same stream. Copies run on other streams, so those are ordered after the kernels here.
        born = torch.cuda.Event()
        born.record(torch.cuda.current_stream(self._index))
        for stream in self._streams.values():
            stream.wait_event(born)
        with self._lock:
            self._buffers[id(buffer)] = (buffer, kind)
        return buffer

    def free(self, buffer: torch.Tensor) -> None:
        """Takes the buffer off the account; its memory goes back to the allocator with the last view of it."""
        with self._lock:
            held = self._buffers.pop(id(buffer), None)
        if held is None:
            raise ValueError("this tensor is not a buffer of this device, or was freed before")
        self.ledger.discharge(held[1], buffer.nbytes)

    @contextmanager
    def translate_oom(self, what: str) -> Iterator[None]:
        """Turns torch's out-of-memory error in the body into ``DeviceOutOfMemory``: ``what`` needed how much, how
        much is allowed, and what to change."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise self._with_snapshot(self._out_of_memory(what, str(error))) from error

    def submit(
        self,
        lane: Lane,
        job: Callable[[], Any],
        *,
        after: Sequence[Completion] = (),
        nbytes: int = 0,
        what: str = "",
    ) -> Completion:
        return self._lanes.submit(lane, job, after=after, nbytes=nbytes, what=what)

    def copy(
        self,
        lane: Lane,
        target: torch.Tensor,
        source: torch.Tensor,
        *,
        after: Sequence[Completion] = (),
        what: str = "",
        inline: bool = False,
    ) -> Completion:
        """Copies bytes between contiguous tensors of any dtype, or values between strided ones of the same dtype
        and shape (ValueError for anything else). Overlaps with compute only if the host's side is pinned."""
        if lane not in (Lane.H2D, Lane.D2H):
            raise ValueError(f"a copy between host and device runs on h2d or d2h, not on {lane.value}")
        issue = partial(_issue_copy, target, source, copies_bytes(target, source))
        return self._queue(lane, issue, after, source.nbytes, what)

    def launch(
        self, job: Callable[[], None], *, after: Sequence[Completion] = (), nbytes: int = 0, what: str = ""
    ) -> Completion:
        return self._queue(Lane.DEVICE_UPDATE, job, after, nbytes, what)

    def _queue(
        self, lane: Lane, issue: Callable[[], None], after: Sequence[Completion], nbytes: int, what: str
    ) -> Completion:
        """Queues what ``issue`` puts on the stream of ``lane``."""
        start = torch.cuda.Event(enable_timing=True)
        # blocking: a thread that waits for the event sleeps, instead of taking a core from the optimizer.
        end = torch.cuda.Event(enable_timing=True, blocking=True)
        issued = self._lanes.submit(
            lane,
            partial(self._issue, lane, issue, start, end, nbytes, what),
            after=after,
            what=what,
            await_one=partial(_order_after, self._streams[lane]),
            timed=False,
        )
        return _CudaCompletion(issued, end)

    def mark(self) -> Completion:
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(self._index))
        return _CudaCompletion(DONE, event)

    def hold_compute(self, completion: Completion) -> None:
        if completion.done():
            completion.wait()
            return
        stream = torch.cuda.current_stream(self._index)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record(stream)
        if _order_after(stream, completion) is not None:
            completion.wait()  # raises the failure, and counts it as told
        end.record(stream)
        # Nothing lies between the two events but the wait: their distance is what compute lost.
        self._clock.add(Lane.STALL, start, end, 0, "")

    def now(self) -> float:
        return self._clock.now()

    def record(self, event: Event) -> None:
        self._log.add(event)

    def drain_events(self) -> list[Event]:
        """The events that have ended since the last call. Work that the GPU has not done yet comes later."""
        self._clock.resolve()
        return self._log.drain()

    def usage(self) -> TierUsage:
        """The allocator's account of this GPU; what forebay did not place itself is ``TEMPORARY``.

        The kinds at the peak are those of the ledger's own peak, which the allocator's peak is never below.
        """
        placed = self.ledger.usage()
        peak = torch.cuda.max_memory_allocated(self._index)
        kinds = dict(placed.at_peak)
        kinds[Kind.TEMPORARY] += max(0, peak - placed.peak)
        live = torch.cuda.memory_allocated(self._index)
        return TierUsage(Tier.DEVICE, placed.limit, live, peak, MappingProxyType(kinds))

    def level(self) -> tuple[dict[Kind, int], int]:
        """What the allocator holds now; its peak since the last call nobody knows, without losing that of the run."""
        placed, high = self.ledger.level()
        held = torch.cuda.memory_allocated(self._index)
        placed[Kind.TEMPORARY] = placed.get(Kind.TEMPORARY, 0) + max(0, held - sum(placed.values()))
        return placed, max(high, held)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._index)
        self.ledger.reset_peak()

    def synchronize(self) -> None:
        try:
            self._lanes.synchronize()
        finally:
            torch.cuda.synchronize(self._index)

    def close(self) -> None:
        """Finishes what is queued, ends the threads, frees the buffers, and gives torch its earlier limit back."""
        self._lanes.close()
        with self._lock:
            closed, self._closed = self._closed, True
            held = list(self._buffers.values())
            self._buffers.clear()
        if closed:
            return
        for buffer, kind in held:
            self.ledger.discharge(kind, buffer.nbytes)
        limit_of(self._index).leave(self._share)
        # A fetch may still be writing into a buffer, which goes when this function returns.
        for stream in self._streams.values():
            stream.synchronize()

    def _issue(
        self,
        lane: Lane,
        issue: Callable[[], None],
        start: torch.cuda.Event,
        end: torch.cuda.Event,
        nbytes: int,
        what: str,
    ) -> None:
        stream = self._streams[lane]
        with torch.cuda.stream(stream):
            start.record(stream)
            issue()
            end.record(stream)
        self._clock.add(lane, start, end, nbytes, what)
        if lane is Lane.D2H:
            # This frame may hold the last reference to the source. Letting go of it before the copy has read it
            # would give its memory to the next kernel of the compute stream.
            end.synchronize()

    def _with_snapshot(self, error: BudgetExceeded) -> BudgetExceeded:
        if isinstance(error, DeviceOutOfMemory):
            # With a history only where the user has torch keep one, which takes time at every allocation. Some of its
            # allocators give no snapshot; what is told is that the device is full, with one or without.
            with suppress(RuntimeError):
                error.snapshot = torch.cuda.memory._snapshot(self._index)
        return error

    def _out_of_memory(self, what: str, message: str) -> DeviceOutOfMemory:
        allowed = self.ledger.limit if self.ledger.limit is not None else self._total
        used = torch.cuda.memory_allocated(self._index)
        asked = requested_bytes(message)
        more = "more" if asked is None else f"{format_bytes(asked)} more"
        return DeviceOutOfMemory(
            f"device memory: {what} needs {more}, {format_bytes(used)} of {format_bytes(allowed)} are in use; "
            f"{self.ledger.remedy}",
            # Holes in the allocator's segments can make a request fail that would fit by the sum of the bytes.
            needed=max(used + (asked or 0), allowed + 1),
            allowed=allowed,
        )
