"""How fast a folder's disk is read and written, by the files and lanes of the disk tier."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import final

import torch

from forebay.device.base import Device
from forebay.machine import Disk, Link
from forebay.memory import Kind, Ledger, Tier
from forebay.profiler.effort import Effort
from forebay.profiler.stopwatch import WallStopwatch, medians, span
from forebay.profiler.transfer_rates import curve_of
from forebay.tiers.arena import HostArena
from forebay.tiers.disk import DiskFile, DiskFolder
from forebay.tiers.host import available_disk
from forebay.timeline import Lane
from forebay.units import MiB, format_rate

__all__ = ["DiskFound", "measure_disk"]

_BATCH = 16 * MiB
_DEPTH = 2


@dataclass(frozen=True)
class DiskFound:
    """A disk as measured, whether its file system took O_DIRECT, and bytes/s read with two calls in flight."""

    disk: Disk
    direct: bool
    two_deep: float

    @property
    def remark(self) -> str:
        """In words, what the figures cannot say."""
        way = "past the page cache (O_DIRECT)" if self.direct else "through the page cache: it refuses O_DIRECT"
        return (
            f"{self.disk.path} was read and written {way}, one call of at most 4 MiB at a time as the runtime does; "
            f"{_DEPTH} at a time read {format_rate(self.two_deep)}"
        )


def measure_disk(device: Device, path: str, effort: Effort) -> DiskFound:
    """Measures the disk of the folder ``path`` with a file of ``effort.disk_file`` bytes that is gone afterwards.

    Raises ``ConfigError`` for a folder that cannot be used and ``DiskFull`` where there is no room.
    """
    free = available_disk(path)
    ledger = Ledger(Tier.DISK)
    with (
        DiskFolder(path, ledger, needed=effort.disk_file) as folder,
        folder.create("probe", effort.disk_file) as file,
        HostArena(effort.disk_sizes[-1], Kind.STAGING, ledger=Ledger(Tier.HOST), what="probe") as arena,
    ):
        # Zeros would be stored as holes by some disks, and compressed by others.
        arena.memory.random_(generator=torch.Generator().manual_seed(0))
        for start in range(0, effort.disk_file - arena.nbytes + 1, arena.nbytes):
            file.write(start, arena.memory)  # real bytes in real blocks, before the first read of them
        trial = _Trial(device, file, arena.memory)
        write, read = trial.link(Lane.DISK_WRITE, effort), trial.link(Lane.DISK_READ, effort)
        two_deep = medians({"read": trial.two_deep}, effort.rounds, effort.bound)["read"]
        direct = file.direct
    return DiskFound(Disk(free, read, write, str(Path(path).absolute())), direct, two_deep)


@final
class _Trial:
    def __init__(self, device: Device, file: DiskFile, buffer: torch.Tensor) -> None:
        self._device = device
        self._file = file
        self._buffer = buffer

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
        completions = [self._device.submit(lane, self._job(lane, n, size), nbytes=size) for n in range(count)]
        for completion in completions:
            completion.wait()
        return span([event for event in self._device.drain_events() if event.lane is lane]) / count

    def _job(self, lane: Lane, number: int, size: int) -> Callable[[], None]:
        offset = number % (self._file.nbytes // size) * size
        move = self._file.read if lane is Lane.DISK_READ else self._file.write
        return partial(move, offset, self._buffer[:size])

    def two_deep(self) -> float:
        """Bytes/s read by two threads, each its own half of the buffer."""
        block = min(4 * MiB, self._buffer.numel() // _DEPTH)
        count = max(1, min(_BATCH, self._file.nbytes // _DEPTH) // block)

        def read(thread: int) -> None:
            for number in range(count):
                offset = (thread * count + number) * block
                self._file.read(offset, self._buffer[thread * block : (thread + 1) * block])

        with ThreadPoolExecutor(_DEPTH) as pool:
            seconds = WallStopwatch().seconds(lambda: list(pool.map(read, range(_DEPTH))))
        return _DEPTH * count * block / seconds
