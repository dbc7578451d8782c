"""A file system that does as a script says, for the tests of what is on disk; and bytes to put there."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

import torch

from forebay.calls import Calls
from forebay.memory import Ledger, Tier
from forebay.tiers.diskfile import DiskPolicy, TierFile
from forebay.tiers.io import Io, SystemIo
from forebay.tiers.kernel_queue import CallQueue
from forebay.units import MiB
from tests.faults.simulated_queue import SimulatedQueue

__all__ = ["PAGE", "SMALL", "ScriptedIo", "Tiers", "pattern", "round_trip", "tensor_at"]

PAGE = 4096
SMALL = DiskPolicy(reads=Calls(4 * PAGE), writes=Calls(4 * PAGE))  # several system calls in a small file


@final
@dataclass
class ScriptedIo(Io):
    """The real calls, except where ``faults`` says what happens instead of the n-th (from 0) call of a name.

    A fault is a negative error number, or the number of bytes that a transfer stops after. ``always`` holds for every
    call of a name. A queue makes its calls here too, under the same names; ``queues`` are all that were opened.
    """

    faults: dict[tuple[str, int], int] = field(default_factory=dict)
    always: dict[str, int] = field(default_factory=dict)
    calls: list[tuple[str, int]] = field(default_factory=list)
    free: int | None = None
    before_read: Callable[[], object] = lambda: None
    system: SystemIo = field(default_factory=SystemIo)
    queues: list[SimulatedQueue] = field(default_factory=list)

    def free_bytes(self, path: Path) -> int:
        return self.system.free_bytes(path) if self.free is None else self.free

    def make_folder(self, path: Path) -> None:
        self._fail("make_folder")
        self.system.make_folder(path)

    def open_new(self, path: Path, direct: bool) -> int:
        try:
            self._fail("open_direct" if direct else "open")
        except OSError:
            path.touch()  # as kernels do: the file is made, then O_DIRECT is refused
            raise
        return self.system.open_new(path, direct)

    def allocate(self, fd: int, nbytes: int) -> None:
        self._fail("allocate")
        self.system.allocate(fd, nbytes)

    def set_direct(self, fd: int, direct: bool) -> None:
        self.system.set_direct(fd, direct)

    def preadv(self, fd: int, buffer: memoryview, offset: int) -> int:
        self.before_read()
        return self._transfer("preadv", self.system.preadv, fd, buffer, offset)

    def pwritev(self, fd: int, buffer: memoryview, offset: int) -> int:
        return self._transfer("pwritev", self.system.pwritev, fd, buffer, offset)

    def open_queue(self, size: int) -> CallQueue:
        self._fail("open_queue")
        self.queues.append(SimulatedQueue(self, seed=len(self.queues)))
        return self.queues[-1]

    def _transfer(
        self, name: str, call: Callable[[int, memoryview, int], int], fd: int, buffer: memoryview, offset: int
    ) -> int:
        stop = self._next(name)
        if stop is None:
            return call(fd, buffer, offset)
        if stop < 0:
            raise OSError(-stop, os.strerror(-stop))
        # A transfer that stops early: all the bytes move, so that the test sees whether the caller believes the count.
        return min(stop, call(fd, buffer, offset))

    def _fail(self, name: str) -> None:
        code = self._next(name)
        if code is not None:
            raise OSError(-code, os.strerror(-code))

    def count(self, name: str) -> int:
        """How many calls of ``name`` there were."""
        return sum(1 for called, _ in self.calls if called == name)

    def _next(self, name: str) -> int | None:
        count = self.count(name)
        self.calls.append((name, count))
        return self.faults.get((name, count), self.always.get(name))


@dataclass
class Tiers:
    disk: Ledger = field(default_factory=lambda: Ledger(Tier.DISK, 64 * MiB))
    host: Ledger = field(default_factory=lambda: Ledger(Tier.HOST, 64 * MiB))


def pattern(nbytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def tensor_at(skew: int, nbytes: int) -> torch.Tensor:
    """A tensor whose memory starts ``skew`` bytes after a page."""
    return torch.frombuffer(mmap.mmap(-1, skew + nbytes + 1), dtype=torch.uint8)[skew : skew + nbytes]


def round_trip(file: TierFile, skew: int = 0) -> None:
    source, target = tensor_at(skew, file.nbytes), tensor_at(skew, file.nbytes)
    source.copy_(pattern(file.nbytes))
    file.write(0, source)
    file.read(0, target)
    assert torch.equal(source, target)
