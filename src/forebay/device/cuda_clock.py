"""Times of work on streams: CUDA events turned into events on the host's clock."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import final

import torch

from forebay.device.cpu import STALL_THRESHOLD
from forebay.device.event_log import EventLog
from forebay.timeline import Event, Lane

__all__ = ["CudaClock"]

_PENDING_LIMIT = 1024
"""Timed events that may wait for their times before somebody looks which of them have ended."""

_REBASE_SECONDS = 5.0
"""torch gives times between events as 32-bit floats in ms: 5 s after the base they are good to half a microsecond."""


@final
@dataclass(frozen=True, slots=True)
class _Pending:
    lane: Lane
    start: torch.cuda.Event
    end: torch.cuda.Event
    nbytes: int
    what: str


@final
class CudaClock:
    """Turns pairs of CUDA events into ``Event``s on the host's clock, once the device has passed them."""

    def __init__(self, log: EventLog, stream: torch.cuda.Stream) -> None:
        self._log = log
        self._stream = stream
        self._lock = threading.Lock()
        self._origin = time.perf_counter()
        self._pending: deque[_Pending] = deque()
        self._set_base()

    def now(self) -> float:
        return time.perf_counter() - self._origin

    def add(self, lane: Lane, start: torch.cuda.Event, end: torch.cuda.Event, nbytes: int, what: str) -> None:
        """Notes work between two recorded events."""
        with self._lock:
            self._pending.append(_Pending(lane, start, end, nbytes, what))
            if len(self._pending) > _PENDING_LIMIT:
                self._resolve()

    def resolve(self) -> None:
        """Logs what has ended; what is still running stays for the next call."""
        with self._lock:
            self._resolve()
            if not self._pending and self.now() - self._base_seconds > _REBASE_SECONDS:
                self._set_base()

    def _resolve(self) -> None:
        for _ in range(len(self._pending)):
            work = self._pending.popleft()
            if not work.end.query():
                self._pending.append(work)
                continue
            seconds = work.start.elapsed_time(work.end) / 1e3
            if work.lane is Lane.STALL and seconds <= STALL_THRESHOLD:
                continue
            start = self._base_seconds + self._base.elapsed_time(work.start) / 1e3
            self._log.add(Event(work.lane, start, start + seconds, work.nbytes, work.what))

    def _set_base(self) -> None:
        self._base = torch.cuda.Event(enable_timing=True)
        self._base.record(self._stream)
        self._base.synchronize()  # so that the host reads its own clock when the device passes the event
        self._base_seconds = self.now()
