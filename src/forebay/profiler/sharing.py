"""How much compute and a busy host lane slow each other where both run on the same cores."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import mean
from typing import Any, final

import torch

from forebay.device.base import Completion, Device
from forebay.kernels.team import cores
from forebay.profiler.effort import Effort, Layer
from forebay.profiler.stopwatch import medians, rate_within
from forebay.profiler.transfer_rates import Transfers
from forebay.profiler.update_rates import UpdateTrial
from forebay.timeline import Lane
from forebay.units import MiB

__all__ = ["Feed", "lost_beside", "lost_share", "shared_cores"]

Feed = Callable[[], Completion]
"""Queues a stretch of work on a lane and returns its end."""

_LAYER = Layer(256, 768, 768)
"""A product of a few milliseconds: many fit into one run, so that where it begins and ends does not matter."""

_RUN = 0.08
"""Seconds of one run."""


def shared_cores(transfers: Transfers, effort: Effort) -> float:
    """The share of its rate that compute loses beside a busy lane and the lane beside compute, in [0, 1].

    The mean over a lane of copies and the lane of updates. ``transfers`` are those of a ``cpu`` device.
    """
    with UpdateTrial(transfers.device, effort.update_elements, "float32", cores()) as update:
        size = min(4 * MiB, transfers.nbytes)
        lanes: dict[Lane, Feed] = {
            Lane.H2D: lambda: transfers.queue(Lane.H2D, size, max(1, transfers.nbytes // size))[-1],
            Lane.UPDATE: update.submit,
        }
        return lost_beside(transfers.device, lanes, effort)


def lost_beside(device: Device, lanes: Mapping[Lane, Feed], effort: Effort) -> float:
    """The share of its rate that compute on the host's cores loses beside each of ``lanes`` and that one beside
    compute, in [0, 1]: the mean over all. ``device`` has the lanes."""
    return mean(_Pair(device, lane, feed).loss(effort) for lane, feed in lanes.items())


@final
class _Pair:
    """Compute and one lane."""

    def __init__(self, device: Device, lane: Lane, feed: Feed) -> None:
        self._device = device
        self._lane = lane
        self._feed = feed
        self._inputs = torch.ones(_LAYER.tokens, _LAYER.width, dtype=torch.float32)
        self._weight = torch.ones(_LAYER.hidden, _LAYER.width, dtype=torch.float32)
        self._lane_beside = 0.0

    def loss(self, effort: Effort) -> float:
        cases: dict[str, Callable[[], float]] = {
            "compute": self._compute_alone,
            "lane": self._lane_alone,
            "compute beside": self._beside,
            # Measured in the run before it: the two rates belong to the same stretch of time.
            "lane beside": lambda: self._lane_beside,
        }
        taken = medians(cases, effort.rounds, effort.bound)
        return mean(
            (
                lost_share(taken["compute"], taken["compute beside"]),
                lost_share(taken["lane"], taken["lane beside"]),
            )
        )

    def _product(self) -> Any:
        return torch.mm(self._inputs, self._weight)

    def _compute_alone(self) -> float:
        count, start = 0, time.perf_counter()
        while (passed := time.perf_counter() - start) < _RUN:
            self._product()
            count += 1
        return count / passed

    def _lane_alone(self) -> float:
        self._device.drain_events()
        start = self._device.now()
        while self._device.now() - start < _RUN:
            self._feed().wait()
        return self._rate(start, self._device.now())

    def _beside(self) -> float:
        """Products per second while the lane is busy; the lane's rate is kept for ``lane beside``."""
        self._device.drain_events()
        # Two stretches ahead: the lane never waits for the loop below to look at it.
        queued = [self._feed(), self._feed()]
        count, start = 0, self._device.now()
        while (now := self._device.now()) - start < _RUN:
            self._product()
            count += 1
            if queued[0].done():
                queued = [queued[1], self._feed()]
        for completion in queued:
            completion.wait()
        self._lane_beside = self._rate(start, now)
        return count / (now - start)

    def _rate(self, start: float, end: float) -> float:
        events = [event for event in self._device.drain_events() if event.lane is self._lane]
        return rate_within(events, start, end)


def lost_share(alone: float, beside: float) -> float:
    """What is lost of a rate of ``alone`` that is ``beside`` in company, in [0, 1]."""
    return min(1.0, max(0.0, 1.0 - beside / alone)) if alone > 0 else 0.0
