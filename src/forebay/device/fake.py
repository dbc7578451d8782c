"""A device that exists on paper: a scripted clock, so that a schedule can be checked in closed form. No torch.

Work takes the time that its bytes need at the lane's rate, and nothing else does. Jobs run at once, in the calling
thread, in the order of submission; only their times pretend to be concurrent. It is public: use it to test your own
schedule or planner without a machine.

    device = FakeDevice(budget=2**30, rates={Lane.H2D: 10e9, Lane.D2H: 10e9})
    fetched = device.copy(Lane.H2D, slot, block)
    device.compute(0.010, "block 0")
    device.hold_compute(fetched)              # what is still missing of the copy becomes a STALL
    device.drain_events()
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, final

from forebay.device.base import Completion, Delays, Device, NoDelays
from forebay.device.history import History
from forebay.device.lanes import WORKER_LANES
from forebay.device.turn import Turn
from forebay.errors import SessionClosed
from forebay.memory import Kind, Ledger, Tier, TierUsage
from forebay.timeline import Event, Lane

__all__ = ["FakeBuffer", "FakeCompletion", "FakeDevice"]


@final
@dataclass(frozen=True, eq=False)
class FakeBuffer:
    """A buffer without bytes: its size, its kind, and what it is for."""

    nbytes: int
    kind: Kind = Kind.STAGING
    what: str = ""


@final
class FakeCompletion(Completion):
    """A job of the fake device: ``end`` is when it is done, in seconds on the scripted clock."""

    def __init__(self, device: FakeDevice, end: float, result: Any = None, error: Exception | None = None) -> None:
        self._device = device
        self._result = result
        self.error = error
        self.end = end

    def wait(self) -> Any:
        """Moves the clock to the job's end."""
        self._device.advance_to(self.end)
        if self.error is not None:
            self._device.told(self.error)
            raise self.error
        return self._result

    def done(self) -> bool:
        return self.end <= self._device.now()


@final
class FakeDevice(Device):
    """``budget`` bytes of memory (None: no limit) and lanes of ``rates`` bytes per second.

    A lane without a rate moves its bytes in no time. ``latency`` is in seconds per job. Not for several threads.
    """

    def __init__(
        self,
        budget: int | None,
        rates: Mapping[Lane, float],
        latency: float = 0.0,
        delays: Delays | None = None,
    ) -> None:
        for lane, rate in rates.items():
            if rate <= 0:
                raise ValueError(f"the rate of {lane.value} must be more than 0 bytes/s, got {rate}")
        if latency < 0:
            raise ValueError(f"latency must be 0 seconds or more, got {latency}")
        self.name = "fake"
        self.ledger = Ledger(Tier.DEVICE, budget)
        self.history = History()
        self.turn = Turn()
        self._rates = dict(rates)
        self._latency = latency
        self._delays = delays or NoDelays()
        self._now = 0.0
        self._free_at = dict.fromkeys(WORKER_LANES, 0.0)
        self._events: list[Event] = []
        self._buffers: set[FakeBuffer] = set()
        self._untold: list[Exception] = []
        self._closed = False

    def allocate(self, nbytes: int, kind: Kind, what: str) -> FakeBuffer:
        self.ledger.charge(kind, nbytes, what)
        buffer = FakeBuffer(nbytes, kind, what)
        self._buffers.add(buffer)
        return buffer

    def free(self, buffer: FakeBuffer) -> None:
        if buffer not in self._buffers:
            raise ValueError(f"{buffer} is not a buffer of this device, or was freed before")
        self._buffers.remove(buffer)
        self.ledger.discharge(buffer.kind, buffer.nbytes)

    def translate_oom(self, what: str) -> AbstractContextManager[None]:
        return nullcontext()

    def submit(
        self,
        lane: Lane,
        job: Callable[[], Any],
        *,
        after: Sequence[Completion] = (),
        nbytes: int = 0,
        what: str = "",
    ) -> FakeCompletion:
        """Runs ``job`` now, and gives it the time from ``max(lane free, now, end of every after)`` on.

        It takes ``delay + latency + nbytes / rate`` seconds; a job that fails takes none.
        """
        if lane not in self._free_at:
            raise ValueError(f"{lane.value} takes no jobs; use compute()")
        if self._closed:
            raise SessionClosed(f"{what or 'a job'} was given to the {lane.value} lane of a device that is closed")
        delay = self._delays.seconds(lane, what)
        start = max(self._now, self._free_at[lane])
        for dependency in after:
            known = self._own(dependency)
            start = max(start, known.end)
            if known.error is not None:
                return FakeCompletion(self, start, error=known.error)
        try:
            result = job()
        except Exception as error:  # belongs to whoever waits
            self._untold.append(error)
            return FakeCompletion(self, start, error=error)
        seconds = nbytes / self._rates[lane] if lane in self._rates else 0.0
        end = start + delay + self._latency + seconds
        self._free_at[lane] = end
        self._events.append(Event(lane, start, end, nbytes, what))
        return FakeCompletion(self, end, result)

    def copy(
        self,
        lane: Lane,
        target: FakeBuffer,
        source: FakeBuffer,
        *,
        after: Sequence[Completion] = (),
        what: str = "",
        inline: bool = False,
    ) -> FakeCompletion:
        if lane not in (Lane.H2D, Lane.D2H):
            raise ValueError(f"a copy between host and device runs on h2d or d2h, not on {lane.value}")
        if target.nbytes != source.nbytes:
            raise ValueError(f"a copy of {source.nbytes} bytes into {target.nbytes}")
        return self.submit(lane, lambda: None, after=after, nbytes=source.nbytes, what=what)

    def launch(
        self, job: Callable[[], None], *, after: Sequence[Completion] = (), nbytes: int = 0, what: str = ""
    ) -> FakeCompletion:
        return self.submit(Lane.DEVICE_UPDATE, job, after=after, nbytes=nbytes, what=what)

    def compute(self, seconds: float, what: str = "") -> None:
        """Computes for ``seconds``: the clock moves on, and the lanes with it."""
        if seconds < 0:
            raise ValueError(f"seconds must be 0 or more, got {seconds}")
        start = self._now
        self._now += seconds
        self._events.append(Event(Lane.COMPUTE, start, self._now, 0, what))

    def mark(self) -> FakeCompletion:
        return FakeCompletion(self, self._now)

    def hold_compute(self, completion: Completion) -> None:
        start = self._now
        completion.wait()
        if self._now > start:
            self._events.append(Event(Lane.STALL, start, self._now))

    def now(self) -> float:
        return self._now

    def record(self, event: Event) -> None:
        self._events.append(event)

    def drain_events(self) -> list[Event]:
        events, self._events = self._events, []
        return sorted(events, key=lambda event: event.start)

    def usage(self) -> TierUsage:
        return self.ledger.usage()

    def level(self) -> tuple[dict[Kind, int], int]:
        return self.ledger.level()

    def reset_peak(self) -> None:
        self.ledger.reset_peak()

    def synchronize(self) -> None:
        self.advance_to(max(self._free_at.values()))
        untold, self._untold = self._untold, []
        if untold:
            raise untold[0]

    def close(self) -> None:
        self._closed = True
        self.advance_to(max(self._free_at.values()))
        for buffer in list(self._buffers):
            self.free(buffer)

    def advance_to(self, seconds: float) -> None:
        """Moves the clock to ``seconds``, never back."""
        self._now = max(self._now, seconds)

    def told(self, error: Exception) -> None:
        """Somebody has seen ``error``: ``synchronize`` does not raise it again."""
        self._untold = [known for known in self._untold if known is not error]

    def _own(self, completion: Completion) -> FakeCompletion:
        if not isinstance(completion, FakeCompletion):
            raise ValueError(f"the fake device cannot wait for a {type(completion).__name__}: it has no scripted end")
        return completion
