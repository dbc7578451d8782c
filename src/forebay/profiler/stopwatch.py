"""Seconds of a piece of work, on a clock that sees it end; and medians of several pieces that take turns."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from statistics import median
from typing import Any, TypeVar, final

import torch

from forebay.timeline import Event
from forebay.units import MiB

__all__ = ["ColdStopwatch", "CudaStopwatch", "Stopwatch", "WallStopwatch", "in_turns", "medians", "rate_within", "span"]

K = TypeVar("K", bound=Hashable)


class Stopwatch(ABC):
    """Measures compute that the calling thread issues."""

    @abstractmethod
    def seconds(self, work: Callable[[], Any]) -> float:
        """Seconds from the start of ``work`` until the device has done all that it issued; never 0."""


@final
class WallStopwatch(Stopwatch):
    """For devices whose compute is done when the call returns."""

    def seconds(self, work: Callable[[], Any]) -> float:
        start = time.perf_counter()
        work()
        return max(time.perf_counter() - start, 1e-9)


@final
class ColdStopwatch(Stopwatch):
    """A wall clock for one op of a step on ``cpu``: what comes before it there has used the caches for other things.

    Alone and again and again, an op finds its arguments in the cache: summed up, such times were 6 to 18 % below the
    steps of six models. With caches full of other bytes, all of them, an op also waits for the code that every op
    runs through, which a step keeps warm: models of many small ops were foretold 10 to 28 % too slow. So the
    arguments are cold here, and the code is not (docs/log.md, 2026-11-21; 2 cores of an AMD EPYC, 32 MiB of L3).
    """

    def __init__(self, nbytes: int = 96 * MiB) -> None:
        self._elsewhere = torch.zeros(nbytes // 4, dtype=torch.float32)
        self._small = torch.ones(8, 8, dtype=torch.float32)
        self._parallel = torch.ones(256, 256, dtype=torch.float32)

    def cool(self) -> None:
        """Fills the caches with other bytes, on all cores."""
        self._elsewhere.add_(1.0)

    def seconds(self, work: Callable[[], Any]) -> float:
        self.cool()
        self._wake()
        start = time.perf_counter()
        work()
        return max(time.perf_counter() - start, 1e-9)

    def _wake(self) -> None:
        """Runs ops of the kinds that every step has, on a few bytes: dispatcher, allocator and threads are awake."""
        small, parallel = self._small, self._parallel
        for _ in range(3):
            torch.softmax((small @ small + small) * 2, -1).sum(0)
            small.t().contiguous().to(torch.float64)
            torch.empty(parallel.numel(), dtype=torch.float32)
            (parallel @ parallel).add(1.0)


@final
class CudaStopwatch(Stopwatch):
    """For a GPU: two events on the current stream around the work."""

    def __init__(self, index: int) -> None:
        self._index = index

    def seconds(self, work: Callable[[], Any]) -> float:
        stream = torch.cuda.current_stream(self._index)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        # An idle device: what was issued before must not stand between the two events.
        torch.cuda.synchronize(self._index)
        start.record(stream)
        work()
        end.record(stream)
        end.synchronize()
        return max(float(start.elapsed_time(end)) / 1e3, 1e-9)


def in_turns(cases: Mapping[K, Callable[[], float]], rounds: int, bound: float) -> dict[K, list[float]]:
    """What each of ``cases`` returns in ``rounds`` rounds.

    The cases take turns, so that a moment in which the machine is slow hits all of them alike. The first round warms
    up and is left out if there is another. After ``bound`` seconds no further round begins, but two are always made.
    """
    taken: dict[K, list[float]] = {key: [] for key in cases}
    start = time.perf_counter()
    for number in range(rounds):
        if number >= 2 and time.perf_counter() - start > bound:
            break
        for key, case in cases.items():
            taken[key].append(case())
    return {key: values[1:] or values for key, values in taken.items()}


def medians(cases: Mapping[K, Callable[[], float]], rounds: int, bound: float) -> dict[K, float]:
    """The median of what each of ``cases`` returns, ``in_turns``."""
    return {key: median(values) for key, values in in_turns(cases, rounds, bound).items()}


def span(events: Sequence[Event]) -> float:
    """Seconds from the start of the first event to the end of the last; never 0."""
    return max(max(e.end for e in events) - min(e.start for e in events), 1e-9)


def rate_within(events: Sequence[Event], start: float, end: float) -> float:
    """Bytes/s that ``events`` moved between ``start`` and ``end``; an event that is cut counts by its share."""
    moved = 0.0
    for event in events:
        inside = min(event.end, end) - max(event.start, start)
        if inside > 0:
            moved += event.nbytes * inside / (event.end - event.start)
    return moved / (end - start) if end > start else 0.0
