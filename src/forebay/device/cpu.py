"""torch's ``cpu`` as a device: host memory played by two ledgers, so that a budget means something without a GPU.

The device tier is a ledger of its own beside the host's; a copy between them is a real copy of bytes, by the lane's
thread or by whoever asks for it (``CpuDevice``). Compute runs in the caller's thread and is done when it returns.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, final

import numpy as np
import torch

from forebay.device.base import Completion, Delays, Device, NoDelays
from forebay.device.completions import DONE
from forebay.device.event_log import EventLog
from forebay.device.history import History
from forebay.device.lanes import WorkerLanes
from forebay.device.turn import Turn
from forebay.errors import DeviceOutOfMemory
from forebay.kernels.team import cores
from forebay.memory import Kind, Ledger, Tier, TierUsage
from forebay.timeline import Event, Lane
from forebay.units import KiB, format_bytes

__all__ = ["BRIEF", "STALL_THRESHOLD", "CpuDevice", "as_bytes", "copies_bytes"]

STALL_THRESHOLD = 10e-6
"""Seconds: a shorter wait is the price of asking, not a stall."""


BRIEF = 64 * KiB
"""Bytes of a copy that its caller makes, if nothing else is asked for. A thread that is woken up for a gradient of a
bias takes a core from those that compute, who wait for each other: some 100 microseconds, in which 64 KiB are copied
ten times."""

_WORD = torch.int64
"""What whole words are copied as: with the same two threads torch copies 20.5 GB/s of it, and 16.7 of single bytes (an
AMD EPYC; docs/log.md, 2026-11-26)."""


@final
class _Thread(threading.local):
    """What a device knows of the calling thread: whether it serves one of its lanes."""

    is_lane = False


@final
class CpuDevice(Device):
    """The host's processor as a device with ``budget`` bytes of memory (None: counted, not limited).

    It may be a part ``of`` another: its bytes count there too, its lanes are its own, and its events are on the same
    clock; where it has no ``delays`` it has those of the other. Threads that train on parts of one device compute in
    turns.

    Copies of ``brief`` bytes or less are made by who asks for them, if their lane is idle. So are copies of any size
    that may be made ``inline``, where the threads that compute have all cores of this process: a lane's thread would
    take one of theirs, and fetch from memory what is in their cache. All others are handed over to their lane's thread.
    """

    def __init__(
        self,
        budget: int | None = None,
        *,
        delays: Delays | None = None,
        of: CpuDevice | None = None,
        brief: int = BRIEF,
    ) -> None:
        self.name = "cpu"
        self.ledger = Ledger(Tier.DEVICE, budget, None if of is None else of.ledger)
        self.history: History = History() if of is None else of.history
        self.turn = Turn() if of is None else of.turn
        self._delays: Delays = delays or (NoDelays() if of is None else of._delays)
        self._brief = brief
        self._inline = torch.get_num_threads() >= cores()
        self._here = _Thread()
        self._origin: float = time.perf_counter() if of is None else of._origin
        self._log = EventLog()
        self._lanes = WorkerLanes(
            self.now,
            self._log,
            self._delays,
            prepare_thread=partial(_prepare_lane, self._here),
            turn=self.turn,
        )
        self._lock = threading.Lock()
        self._buffers: dict[int, tuple[torch.Tensor, Kind, int]] = {}

    @property
    def dropped_events(self) -> int:
        """Events lost because nobody drained them in time."""
        return self._log.dropped

    def allocate(self, nbytes: int, kind: Kind, what: str) -> torch.Tensor:
        """A 1-D uint8 tensor of ``nbytes``, aligned to 64 bytes, charged to the ledger until ``free``.

        Raises ``DeviceOutOfMemory`` over the budget, and when the machine itself has no such memory.
        """
        headroom = self.ledger.headroom
        if headroom is not None and nbytes > headroom:
            raise self.history.told(self.ledger.exceeded(kind, nbytes, what), nbytes, what or kind.value)
        try:
            buffer = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        except RuntimeError as error:
            raise DeviceOutOfMemory(
                f"this machine has no {format_bytes(nbytes)} of memory for {what or kind.value}; lower device_memory",
                needed=self.ledger.live + nbytes,
                allowed=self.ledger.live,
            ) from error
        self.ledger.charge(kind, nbytes, what)  # after: bytes that the machine refuses must not show in the peak
        address = self.history.made(nbytes, what or kind.value)
        with self._lock:
            self._buffers[id(buffer)] = (buffer, kind, address)
        return buffer

    def free(self, buffer: torch.Tensor) -> None:
        """Takes the buffer off the account; its memory goes with the last view of it."""
        with self._lock:
            held = self._buffers.pop(id(buffer), None)
        if held is None:
            raise ValueError("this tensor is not a buffer of this device, or was freed before")
        self.ledger.discharge(held[1], buffer.nbytes)
        self.history.gone(held[2])

    def translate_oom(self, what: str) -> AbstractContextManager[None]:
        return nullcontext()  # the ledger refuses, with forebay's own error

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
        and shape. ValueError for anything else."""
        if lane not in (Lane.H2D, Lane.D2H):
            raise ValueError(f"a copy between host and device runs on h2d or d2h, not on {lane.value}")
        plain, nbytes = copies_bytes(target, source), source.nbytes
        job = partial(_copy_bytes, self._here, target, source) if plain else partial(_copy_values, target, source)
        here = nbytes <= self._brief or (inline and self._inline)
        return self._lanes.submit(lane, job, after=after, nbytes=nbytes, what=what, inline=here)

    def launch(
        self, job: Callable[[], None], *, after: Sequence[Completion] = (), nbytes: int = 0, what: str = ""
    ) -> Completion:
        return self._lanes.submit(Lane.DEVICE_UPDATE, job, after=after, nbytes=nbytes, what=what)

    def mark(self) -> Completion:
        return DONE

    def hold_compute(self, completion: Completion) -> None:
        if completion.done():
            completion.wait()  # it raises what the job has raised
            return
        start = self.now()
        completion.wait()
        end = self.now()
        if end - start > STALL_THRESHOLD:
            self.record(Event(Lane.STALL, start, end))

    def now(self) -> float:
        return time.perf_counter() - self._origin

    def record(self, event: Event) -> None:
        self._log.add(event)

    def drain_events(self) -> list[Event]:
        return self._log.drain()

    def usage(self) -> TierUsage:
        return self.ledger.usage()

    def level(self) -> tuple[dict[Kind, int], int]:
        return self.ledger.level()

    def reset_peak(self) -> None:
        self.ledger.reset_peak()

    def synchronize(self) -> None:
        self._lanes.synchronize()

    def close(self) -> None:
        self._lanes.close()
        with self._lock:
            held = list(self._buffers.values())
            self._buffers.clear()
        for buffer, kind, address in held:
            self.ledger.discharge(kind, buffer.nbytes)
            self.history.gone(address)


def copies_bytes(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether a copy moves bytes as they are (True) or has to follow strides (False); ValueError if neither works."""
    if target.nbytes != source.nbytes:
        raise ValueError(f"a copy of {source.nbytes} bytes into {target.nbytes}")
    if _is_plain(target) and _is_plain(source):
        return True
    if target.dtype != source.dtype or target.shape != source.shape:
        raise ValueError(
            f"a copy that is not contiguous needs one dtype and shape, got {source.dtype} {tuple(source.shape)} "
            f"into {target.dtype} {tuple(target.shape)}"
        )
    return False


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as 1-D uint8, without a copy."""
    if tensor.dtype is torch.uint8 and tensor.dim() == 1:
        return tensor
    # reshape first: a tensor without dimensions cannot be viewed in another dtype.
    return tensor.detach().reshape(-1).view(torch.uint8)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor's values are its bytes, one after the other."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _copy_values(target: torch.Tensor, source: torch.Tensor) -> None:
    target.detach().copy_(source.detach())


def _copy_bytes(here: _Thread, target: torch.Tensor, source: torch.Tensor) -> None:
    if here.is_lane:
        # torch would start a team of OpenMP threads for a lane, which fights for the cores with the team that computes.
        # np.copyto is one thread and lets go of the GIL.
        np.copyto(as_bytes(target).numpy(), as_bytes(source).numpy())
    elif target.dtype is source.dtype is not torch.uint8 and target.shape == source.shape:
        # By whoever computes, with the team that does. As few calls as there can be: behind a kernel or a copy nothing
        # of the interpreter is in the caches, and each is some microseconds.
        target.detach().copy_(source.detach())
    else:
        target, source = as_bytes(target), as_bytes(source)
        if _in_words(target) and _in_words(source):
            target, source = target.view(_WORD), source.view(_WORD)
        target.copy_(source)


def _in_words(tensor: torch.Tensor) -> bool:
    """Whether its bytes are whole words, from where one begins."""
    return not (tensor.nbytes % _WORD.itemsize or tensor.storage_offset() * tensor.itemsize % _WORD.itemsize)


def _prepare_lane(here: _Thread) -> None:
    # Grad mode is thread-local and starts enabled: a copy in a lane would otherwise be recorded by autograd.
    torch.set_grad_enabled(False)
    here.is_lane = True
