"""How fast a folder's disk is read and written, by the files and lanes of the disk tier."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import final

import torch

from forebay.calls import Calls
from forebay.device.base import Completion, Device
from forebay.layout import PAGE, align
from forebay.machine import Disk, Link
from forebay.memory import Kind, Ledger, Tier
from forebay.profiler.effort import Effort
from forebay.profiler.sharing import Feed, lost_beside
from forebay.profiler.stopwatch import WallStopwatch, in_turns, medians, span
from forebay.profiler.storage_trial import by_turns
from forebay.profiler.transfer_rates import both_rates, curve_of
from forebay.tiers.arena import HostArena
from forebay.tiers.diskfile import DiskPolicy, TierFile
from forebay.tiers.host import available_disk
from forebay.tiers.stripes import DiskTier, Folder
from forebay.timeline import Event, Lane
from forebay.units import MiB

__all__ = ["WAYS", "DiskFound", "DiskTrial", "fastest", "measure_disk"]

_BATCH = 16 * MiB

_TRIED = ((4, 4), (4, 2), (2, 4), (2, 2), (1, 2), (1, 1), (2, 1), (4, 1), (16, 1))
WAYS = tuple(Calls(block * MiB, depth) for block, depth in _TRIED)
"""Tried for reads and for writes; the first stands unless another is faster by ``_BETTER``.

The first, because most of a chunk is with the disk at one time then, as in one long call, and the disk has others left
while the thread wakes up for one. Small calls wait for their thread more often, and lose most where updates have the
cores, which a trial alone does not see. It counts most where a disk tells of all that it was asked for together, at
their end, as virtual ones do that serve their queue until it is empty: whoever reads and whoever writes wake up at one
time then, and the disk has nothing to do until they ask again. In the kernel's queue a depth takes no thread, and no
more of the cores than one long call; where there is none it takes three threads more (``tiers.callers``; docs/log.md,
2026-11-23).
"""

_BETTER = 1.05

_PATIENCE = 2
"""Times the rounds of other figures: of many ways in few rounds the luckiest would be taken for the fastest."""

_MOST = 0.9
"""Of its rate that compute can lose to a disk: what is slower still was disturbed by somebody else."""

_DIRECTIONS = (Lane.DISK_READ, Lane.DISK_WRITE)


@dataclass(frozen=True)
class DiskFound:
    """A disk as measured, and whether its file system took O_DIRECT."""

    disk: Disk
    direct: bool

    @property
    def remark(self) -> str:
        """In words, what the figures cannot say."""
        way = "past the page cache (O_DIRECT)" if self.direct else "through the page cache: it refuses O_DIRECT"
        return (
            f"{self.disk.path} was read and written {way}: read in {self.disk.reads}, written in {self.disk.writes}, "
            f"each the fastest of {len(WAYS)} ways"
        )


def measure_disk(device: Device, path: str, effort: Effort) -> DiskFound:
    """Measures the disk of the folder ``path`` with a file of ``effort.disk_file`` bytes that is gone afterwards.

    Raises ``ConfigError`` for a folder that cannot be used, ``DiskFull`` where there is no room, ``StorageError`` where
    no process can be started beside it.
    """
    free = available_disk(path)
    with HostArena(effort.disk_sizes[-1], Kind.STAGING, ledger=Ledger(Tier.HOST), what="probe") as arena:
        # Zeros would be stored as holes by some disks, and compressed by others.
        arena.memory.random_(generator=torch.Generator().manual_seed(0))
        reads, writes = _best_ways(device, path, effort, arena.memory)
        with _opened(path, effort, reads, writes) as tier:
            file = tier.create("probe", effort.disk_file)
            trial = DiskTrial(device, file, arena.memory)
            trial.fill()
            write, read = trial.link(Lane.DISK_WRITE, effort), trial.link(Lane.DISK_READ, effort)
            duplex, direct = trial.duplex(effort), tier.direct
            # A GPU computes with cores of its own.
            shared = trial.shared_cores(effort) if torch.device(device.name).type == "cpu" else 0.0
            order, alternation = by_turns(device, file, read, write, effort)
    there = str(Path(path).absolute())
    disk = Disk(
        capacity=free,
        read=read,
        write=write,
        path=there,
        reads=reads,
        writes=writes,
        duplex=duplex,
        shared_cores=shared,
        alternation=alternation,
        order_seconds=order,
    )
    return DiskFound(disk, direct)


def _opened(path: str, effort: Effort, reads: Calls, writes: Calls) -> DiskTier:
    policy = DiskPolicy(reads=reads, writes=writes)
    return DiskTier([Folder(path)], Ledger(Tier.DISK), needed=effort.disk_file, policy=policy)


def _best_ways(device: Device, path: str, effort: Effort, buffer: torch.Tensor) -> tuple[Calls, Calls]:
    """The calls in which a chunk is read fastest, and those in which it is written fastest."""
    length = min(buffer.numel(), align(effort.disk_file // len(WAYS), PAGE))
    with contextlib.ExitStack() as stack:
        cases: dict[tuple[Lane, Calls], Callable[[], float]] = {}
        for way in WAYS:
            tier = stack.enter_context(_opened(path, effort, way, way))
            trial = DiskTrial(device, tier.create("probe", length), buffer[:length])
            cases |= {(lane, way): partial(trial.alone, lane) for lane in _DIRECTIONS}
        # All are written before the first is read: what is read must have been written, and not a moment ago.
        order = sorted(cases, key=lambda case: case[0] is Lane.DISK_READ)
        taken = in_turns({case: cases[case] for case in order}, _PATIENCE * effort.rounds, _PATIENCE * effort.bound)
    read, written = ({way: taken[lane, way] for way in WAYS} for lane in _DIRECTIONS)
    return fastest(read), fastest(written)


def fastest(seconds: Mapping[Calls, Sequence[float]]) -> Calls:
    """The way that takes the smallest share of the seconds of a round, in the median of all rounds: what a disk can do
    changes from one moment to the next, for all ways alike. The first of ``seconds`` unless it is slower by
    ``_BETTER``."""
    usual = [median(of_round) for of_round in zip(*seconds.values(), strict=True)]
    shares = {way: median(s / u for s, u in zip(taken, usual, strict=True)) for way, taken in seconds.items()}
    first, best = next(iter(shares)), min(shares, key=lambda way: shares[way])
    return best if shares[first] > _BETTER * shares[best] else first


@final
class DiskTrial:
    """Transfers on the lanes of the disk, each of other bytes than the one before, in the file as in memory.

    A step reads and writes all that it has on disk once. The same few bytes again and again stay in caches, those of
    the processor and, on a virtual machine, those of its host: that is up to 1.8 times as fast (docs/log.md,
    2026-11-22).
    """

    def __init__(self, device: Device, file: TierFile, buffer: torch.Tensor) -> None:
        self._device = device
        self._file = file
        self._buffer = buffer
        self._next = dict.fromkeys(_DIRECTIONS, (0, 0))

    def link(self, lane: Lane, effort: Effort) -> Link:
        taken = medians(
            {size: partial(self._seconds, lane, size) for size in effort.disk_sizes}, effort.rounds, effort.bound
        )
        # What one call costs beside its bytes: the line through the two smallest sizes, at no bytes at all.
        (small, t0), (large, t1) = sorted(taken.items())[:2] if len(taken) > 1 else (*taken.items(), *taken.items())
        slope = (t1 - t0) / (large - small) if large > small else t0 / small
        latency = min(max(t0 - slope * small, 0.0), t0 / 2)
        return Link(curve_of(taken, latency), latency)

    def _seconds(self, lane: Lane, size: int) -> float:
        """Seconds of one transfer of ``size`` bytes among several that follow each other on the lane."""
        count = max(1, _BATCH // size)
        self._device.drain_events()
        completions = [self._device.submit(lane, self._job(lane, size), nbytes=size) for _ in range(count)]
        for completion in completions:
            completion.wait()
        return span([event for event in self._device.drain_events() if event.lane is lane]) / count

    def _job(self, lane: Lane, size: int) -> Callable[[], None]:
        """The next transfer of a lane. What is read comes to one end of the buffer, what is written is at the other,
        as far as there is room for both."""
        there, here = self._next[lane]
        there = there if there + size <= self._file.nbytes else 0
        room = max(size, self._buffer.numel() // 2 // PAGE * PAGE)
        here = here if here + size <= room else 0
        self._next[lane] = there + size, here + size
        if lane is Lane.DISK_READ:
            return partial(self._file.read, there, self._buffer[here : here + size])
        end = self._buffer.numel() - here
        return partial(self._file.write, there, self._buffer[end - size : end])

    def duplex(self, effort: Effort) -> float:
        """The share of its rate that each direction keeps while both are busy: the mean of the two, in (0, 1]."""
        queue, size = self._queue, self._part

        def finished(completions: list[Completion]) -> list[Event]:
            for completion in completions:
                completion.wait()
            return self._device.drain_events()

        def alone() -> float:
            self._device.drain_events()
            return sum(8 * size / span(finished(queue(lane))) for lane in _DIRECTIONS)

        def together() -> float:
            self._device.drain_events()
            return both_rates(finished([c for lane in _DIRECTIONS for c in queue(lane)]), _DIRECTIONS)

        taken = medians({"alone": alone, "together": together}, effort.rounds, effort.bound)
        return min(1.0, max(taken["together"] / taken["alone"], 0.01))

    def shared_cores(self, effort: Effort) -> float:
        """The share of its rate that compute loses while this disk is read or written, and the disk to compute, in
        [0, ``_MOST``]."""
        feeds: dict[Lane, Feed] = {lane: partial(self._feed, lane) for lane in _DIRECTIONS}
        return min(_MOST, lost_beside(self._device, feeds, effort))

    @property
    def _part(self) -> int:
        """Bytes of a transfer of which several are queued."""
        return align(min(_BATCH, self._buffer.numel(), self._file.nbytes) // 4, PAGE)

    def _queue(self, lane: Lane) -> list[Completion]:
        size = self._part
        return [self._device.submit(lane, self._job(lane, size), nbytes=size) for _ in range(8)]

    def _feed(self, lane: Lane) -> Completion:
        return self._queue(lane)[-1]

    def fill(self) -> None:
        """Has real bytes in real blocks, before the first read of them."""
        length = self._buffer.numel()
        for start in range(0, self._file.nbytes - length + 1, length):
            self._file.write(start, self._buffer)

    def alone(self, lane: Lane) -> float:
        """Seconds in which the whole buffer is read or written, with nothing beside it."""
        return WallStopwatch().seconds(self._job(lane, self._buffer.numel()))
