"""What happened, or is predicted to happen, in a run: events on lanes, and bytes per tier.

The simulator and the runtime emit the same ``Timeline``, so that a prediction error is a subtraction.
Its ``tiers`` are the accounts, its ``counters`` say how often things happened.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate
from operator import itemgetter
from statistics import median

from forebay.memory import ArenaUsage, Kind, Tier, TierUsage

__all__ = [
    "CROSSING",
    "Event",
    "Lane",
    "Level",
    "Timeline",
    "busy_of",
    "covered",
    "merge_busy",
    "moved_of",
    "typical_seconds",
]


class Lane(StrEnum):
    """A resource that does one thing at a time, in the order it was asked."""

    COMPUTE = "compute"
    STALL = "stall"  # compute that waits for another lane: what the plan failed to hide
    H2D = "h2d"
    D2H = "d2h"
    UPDATE = "update"  # on the host
    NORM = "norm"  # of landed gradients, on the host, before somebody asks
    DEVICE_UPDATE = "device_update"  # of what has come to the device for it, beside compute
    STORAGE_UPDATE = "storage_update"  # of states on disk, by whoever is beside them
    DISK_READ = "disk_read"
    DISK_WRITE = "disk_write"
    PEER_OUT = "peer_out"  # to other devices, past the host; one device alone has none
    PEER_IN = "peer_in"


CROSSING = (Lane.H2D, Lane.D2H, Lane.DISK_READ, Lane.DISK_WRITE)
"""The lanes that move bytes from one tier to another."""


@dataclass(frozen=True, slots=True)
class Event:
    """One action: ``start`` and ``end`` in seconds on the device's clock, ``nbytes`` moved, ``what`` in words."""

    lane: Lane
    start: float
    end: float
    nbytes: int = 0
    what: str = ""


@dataclass(frozen=True, slots=True)
class Level:
    """What a tier holds at ``time`` (seconds on the device's clock): ``live`` bytes by kind. ``high`` are the most
    bytes that it held since the level before."""

    time: float
    tier: Tier
    live: Mapping[Kind, int]
    high: int


@dataclass(frozen=True)
class Timeline:
    """Events in order of their start, the accounts of every tier, and the seconds of each step.

    ``levels`` are the bytes of tiers over time, in order, of some of the time: what is simulated has those of the
    device from beginning to end, what runs those of the last step that the byte ledger saw. ``step_starts`` are the
    times at which the steps began; empty where each begins when the one before has ended, the first at 0. ``arenas``
    are the pieces of memory that were taken once (none where they were not measured).
    """

    events: tuple[Event, ...]
    tiers: tuple[TierUsage, ...]
    step_seconds: tuple[float, ...] = ()
    counters: Mapping[str, int] = field(default_factory=dict)
    levels: tuple[Level, ...] = ()
    step_starts: tuple[float, ...] = ()
    arenas: tuple[ArenaUsage, ...] = ()

    def steps(self) -> tuple[tuple[float, float], ...]:
        """Start and end of every step in seconds on the device's clock."""
        starts = self.step_starts or accumulate(self.step_seconds, initial=0.0)
        return tuple((start, start + seconds) for start, seconds in zip(starts, self.step_seconds, strict=False))

    def usage(self, tier: Tier) -> TierUsage | None:
        """The account of ``tier``, or None if there is none."""
        return next((usage for usage in self.tiers if usage.tier is tier), None)

    @property
    def peaks(self) -> dict[Tier, int]:
        """Bytes of every tier of which there is an account, at its peak."""
        return {usage.tier: usage.peak for usage in self.tiers}

    def busy(self) -> dict[Lane, float]:
        """Seconds during which each lane had something to do (overlapping events counted once)."""
        return busy_of(self.events)

    def moved(self) -> dict[Lane, int]:
        """Bytes that each lane moved."""
        return moved_of(self.events)


def typical_seconds(step_seconds: Sequence[float], length: int = 1) -> float:
    """Seconds of a step, of those that took ``step_seconds``: the median. Where the steps of a round of ``length`` are
    not alike (``Streaming.update_every``) the median over whole rounds, counted from the last step back, of the mean of
    a round; of fewer steps than a round, their mean. Raises ``ValueError`` for no steps."""
    if not step_seconds:
        raise ValueError("no step has been timed")
    length = min(length, len(step_seconds))
    ends = range(len(step_seconds), length - 1, -length)
    return median(sum(step_seconds[end - length : end]) / length for end in ends)


def busy_of(events: Sequence[Event]) -> dict[Lane, float]:
    """Seconds during which each lane had something to do (overlapping events counted once)."""
    return {lane: merge_busy(event for event in events if event.lane is lane) for lane in Lane}


def moved_of(events: Iterable[Event]) -> dict[Lane, int]:
    """Bytes that each lane moved."""
    total = dict.fromkeys(Lane, 0)
    for event in events:
        total[event.lane] += event.nbytes
    return total


def merge_busy(events: Iterable[Event]) -> float:
    """Length in seconds of the union of the events' intervals."""
    return covered((event.start, event.end) for event in events)


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of ``spans`` (start, end)."""
    busy, reach = 0.0, float("-inf")
    for start, end in sorted(spans, key=itemgetter(0)):
        if end > reach:
            busy += end - max(start, reach)
            reach = end
    return busy
