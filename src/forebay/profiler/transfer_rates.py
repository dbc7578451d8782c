"""How fast bytes move between host and device, measured by the copies that the runtime makes.

The copies go through ``Device.copy`` on its lanes, and their times are those of the events that the device records:
on a GPU CUDA events on the copy streams, on ``cpu`` the lane's thread. Nothing here knows which one it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import TracebackType
from typing import final

from forebay.device.base import Completion, Device
from forebay.layout import PAGE
from forebay.machine import Curve, Link
from forebay.memory import Kind, Ledger, Tier
from forebay.profiler.effort import Effort
from forebay.profiler.stopwatch import WallStopwatch, medians, rate_within, span
from forebay.tiers.arena import HostArena, Pinner
from forebay.timeline import Event, Lane
from forebay.units import KiB, MiB

__all__ = ["Transfers", "both_rates", "curve_of", "duplex", "host_bandwidth", "link"]

_TINY = 4 * KiB
"""Bytes of a copy whose time is all overhead."""

_BATCH = 64 * MiB
"""Bytes that a batch of copies moves, unless that would be fewer than one copy or more than ``_JOBS``."""

_JOBS = 64


@final
class Transfers:
    """``nbytes`` on the host (page-locked by ``pinner`` where it can) and as many on the device, to copy between."""

    def __init__(self, device: Device, pinner: Pinner, nbytes: int) -> None:
        self.device = device
        self.nbytes = nbytes
        self._arena = HostArena(nbytes, Kind.STAGING, ledger=Ledger(Tier.HOST), pinner=pinner, what="probe")
        self.host = self._arena.memory
        try:
            self.buffer = device.allocate(nbytes, Kind.STAGING, "probe")
        except BaseException:
            self._arena.close()
            raise
        # Pages come into being at their first touch, which must not be timed.
        self.host.fill_(1)
        self.buffer.fill_(0)

    def __enter__(self) -> Transfers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A copy that is still under way reads or writes both.
        self.device.synchronize()
        self.device.free(self.buffer)
        self._arena.close()

    def queue(
        self, lane: Lane, size: int, count: int, start: int = 0, room: int | None = None, *, inline: bool = False
    ) -> list[Completion]:
        """Queues ``count`` copies of ``size`` bytes, spread over ``room`` bytes from ``start``. ``inline``: see
        ``Device.copy``.

        Spread, because a copy of what the last one left in the processor's cache says nothing about memory.
        """
        room = self.nbytes - start if room is None else room
        stride = max(PAGE, (room - size) // count // PAGE * PAGE)
        places = (room - size) // stride + 1
        done = []
        for number in range(count):
            offset = start + number % places * stride
            host, buffer = self.host[offset : offset + size], self.buffer[offset : offset + size]
            target, source = (buffer, host) if lane is Lane.H2D else (host, buffer)
            done.append(self.device.copy(lane, target, source, what="probe", inline=inline))
        return done

    def finish(self, completions: Sequence[Completion]) -> list[Event]:
        """Waits for the copies and returns the events since the last call."""
        for completion in completions:
            completion.wait()
        return self.device.drain_events()

    def seconds(self, lane: Lane, size: int, *, inline: bool = False) -> float:
        """Seconds of one copy of ``size`` bytes among several that follow each other."""
        count = min(_JOBS, max(1, _BATCH // size))
        self.device.drain_events()
        return span(self.finish(self.queue(lane, size, count, inline=inline))) / count


def link(transfers: Transfers, lane: Lane, effort: Effort, *, inline: bool = False) -> Link:
    """The link of ``lane`` as a curve over size, alone and with its queue full; ``inline``: of copies that may be made
    between ops (``Device.copy``)."""
    sizes = [size for size in effort.copy_sizes if size <= transfers.nbytes]
    cases = {size: partial(transfers.seconds, lane, size, inline=inline) for size in (_TINY, *sizes)}
    taken = medians(cases, effort.rounds, effort.bound)
    latency = taken.pop(_TINY)
    return Link(curve_of(taken, latency), latency)


def curve_of(seconds: dict[int, float], latency: float) -> Curve:
    """Rates from the ``seconds`` of one transfer of each size, of which ``latency`` goes into no byte.

    At least a quarter of the time is left to the bytes: where a transfer is nearly all latency, the difference of two
    times is noise.
    """
    return Curve(tuple((size, size / max(t - latency, t / 4)) for size, t in sorted(seconds.items())))


def duplex(transfers: Transfers, effort: Effort) -> float:
    """The share of its rate that each direction keeps while both are busy: the mean of the two, in (0, 1]."""
    half = transfers.nbytes // 2 // PAGE * PAGE
    size = min(16 * MiB, half)
    count = max(2, min(16, 2 * _BATCH // size))

    def queue(lane: Lane) -> list[Completion]:
        return transfers.queue(lane, size, count, start=0 if lane is Lane.H2D else half, room=half)

    def alone() -> float:
        transfers.device.drain_events()
        return sum(size * count / span(transfers.finish(queue(lane))) for lane in (Lane.H2D, Lane.D2H))

    def together() -> float:
        transfers.device.drain_events()
        return both_rates(transfers.finish([*queue(Lane.H2D), *queue(Lane.D2H)]))

    taken = medians({"alone": alone, "together": together}, effort.rounds, effort.bound)
    return min(1.0, max(taken["together"] / taken["alone"], 0.01))


def both_rates(events: Sequence[Event], directions: tuple[Lane, Lane] = (Lane.H2D, Lane.D2H)) -> float:
    """The sum of the rates of both ``directions`` in bytes/s, during the time in which both were busy."""
    lanes = [[e for e in events if e.lane is lane] for lane in directions]
    start = max(min(e.start for e in lane) for lane in lanes)
    end = min(max(e.end for e in lane) for lane in lanes)
    if end <= start:
        # One direction was done before the other began: each had the link to itself.
        return sum(sum(e.nbytes for e in lane) / span(lane) for lane in lanes)
    return sum(rate_within(lane, start, end) for lane in lanes)


def host_bandwidth(transfers: Transfers, effort: Effort) -> float:
    """Bytes/s that a large copy inside the host reads and writes (each byte copied counts twice)."""
    half = transfers.nbytes // 2
    first, second = transfers.host[:half], transfers.host[half : 2 * half]
    watch = WallStopwatch()
    taken = medians({"copy": lambda: watch.seconds(lambda: first.copy_(second))}, effort.rounds, effort.bound)
    return 2 * half / taken["copy"]
