"""Requests for memory in the order in which they were made and given back, and what allocators did with them. No
torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from forebay.buffers import Buffer
from forebay.errors import ConfigError

__all__ = ["Box", "Holder", "Life", "Recording", "Replay", "Request", "events_of", "recording_of"]


@dataclass(frozen=True, slots=True)
class Request:
    """``nbytes`` that ``what`` asks for on ``stream``."""

    what: str
    nbytes: int
    stream: int = 0


@dataclass(frozen=True)
class Recording:
    """What a program asked of its allocator. An event of 0 or more is the number of a request that is made, -1 - n says
    that request n is given back; what is never given back stays. ``observed`` are the bytes that the program's own
    allocator had reserved at the end, where that is known.

    Raises ``ConfigError`` for a request that is made twice, or given back while it is not there.
    """

    requests: tuple[Request, ...]
    events: tuple[int, ...]
    notes: tuple[str, ...] = ()
    observed: int | None = None

    def __post_init__(self) -> None:
        made, gone = set[int](), set[int]()
        for event in self.events:
            number = event if event >= 0 else -1 - event
            seen = made if event >= 0 else gone
            if number >= len(self.requests) or number in seen or (event < 0 and number not in made):
                raise ConfigError(f"a recording makes each request once and then gives it back once; {number} does not")
            seen.add(number)

    @cached_property
    def live(self) -> tuple[int, ...]:
        """Bytes that are live after each event, as they were asked for."""
        total, levels = 0, []
        for event in self.events:
            total += self.requests[event].nbytes if event >= 0 else -self.requests[-1 - event].nbytes
            levels.append(total)
        return tuple(levels)

    @cached_property
    def lives(self) -> tuple[tuple[int, int], ...]:
        """Of each request the event that makes it and the one that gives it back (the number of events: none does)."""
        made, gone = [len(self.events)] * len(self.requests), [len(self.events)] * len(self.requests)
        for at, event in enumerate(self.events):
            if event >= 0:
                made[event] = at
            else:
                gone[-1 - event] = at
        return tuple(zip(made, gone, strict=True))

    def buffers(self) -> tuple[Buffer, ...]:
        """The requests as buffers of one memory, in the same order: live from one event to another. What no event makes
        is left out."""
        return tuple(
            Buffer(f"{number}", made, gone, request.nbytes)
            for number, (request, (made, gone)) in enumerate(zip(self.requests, self.lives, strict=True))
            if made < gone
        )


def events_of(lower: ArrayLike, upper: ArrayLike) -> list[int]:
    """The events of a ``Recording`` of requests that are live from ``lower`` up to ``upper``, points in time. At one of
    them what ends is given back before what begins is made."""
    at = np.concatenate([np.asarray(lower, np.int64), np.asarray(upper, np.int64)])
    numbers = np.arange(len(at) // 2)
    events = np.concatenate([numbers, -1 - numbers])
    found: list[int] = events[np.lexsort((events, events >= 0, at))].tolist()
    return found


def recording_of(buffers: Sequence[Buffer], steps: int = 1) -> Recording:
    """What a program asks for that makes ``buffers`` in the order of their lives, ``steps`` times. At one point in time
    what ends is given back before what begins is made. A request is called what its buffer's id begins with."""
    once = events_of([buffer.lower for buffer in buffers], [buffer.upper for buffer in buffers])
    count = len(buffers)
    every = [e + s * count if e >= 0 else e - s * count for s in range(steps) for e in once]
    requests = tuple(Request(buffer.id.rpartition("-")[0] or buffer.id, buffer.size) for buffer in buffers)
    return Recording(requests * steps, tuple(every))


@dataclass(frozen=True, slots=True)
class Box:
    """Where bytes of request ``number`` lie: ``nbytes`` from ``address`` on."""

    number: int
    address: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Life:
    """A box from one event to another."""

    box: Box
    made: int
    gone: int


@dataclass(frozen=True, slots=True)
class Holder:
    """Request ``what`` of ``nbytes`` is in a segment of ``segment`` bytes, of which ``free`` are nobody's and cannot be
    given back because of it."""

    what: str
    nbytes: int
    free: int
    segment: int


@dataclass(frozen=True)
class Replay:
    """What ``allocator`` did with a recording: ``reserved`` are its bytes after each event, ``live`` those that were
    asked for. ``worst`` is the event that took more memory from the device while most of what was reserved was nobody's
    (None: no event took any), and ``holders`` whose requests kept that from being given back then, those first that
    kept most. ``lives`` says where all of them lay."""

    allocator: str
    reserved: tuple[int, ...]
    live: tuple[int, ...]
    worst: int | None
    holders: tuple[Holder, ...]
    lives: tuple[Life, ...]

    @property
    def peak_reserved(self) -> int:
        """The most bytes reserved."""
        return max(self.reserved, default=0)

    @property
    def peak_live(self) -> int:
        """The most bytes live."""
        return max(self.live, default=0)

    @property
    def over(self) -> float:
        """By how much the one is more than the other, as a share of the latter."""
        return self.peak_reserved / self.peak_live - 1 if self.peak_live else 0.0

    @property
    def unused(self) -> int:
        """Bytes that were reserved and nobody's at the worst moment."""
        return 0 if self.worst is None else self.reserved[self.worst] - self.live[self.worst]
