"""A home on disk: what waits for what."""

from __future__ import annotations

import threading
from pathlib import Path

import torch

from forebay.device.cpu import CpuDevice
from forebay.layout import PAGE
from forebay.memory import Kind, Ledger, Tier
from forebay.runtime.homes import DiskHome
from forebay.scheduling.staging import StagingRing
from forebay.tiers.disk import DiskFile, DiskFolder
from forebay.timeline import Lane


class Slow:
    """A file whose writes wait until they are let go."""

    def __init__(self, file: DiskFile) -> None:
        self.file = file
        self.go = threading.Event()

    def read(self, offset: int, buffer: torch.Tensor) -> None:
        self.file.read(offset, buffer)

    def write(self, offset: int, buffer: torch.Tensor) -> None:
        if not self.go.wait(60):
            raise TimeoutError("nobody let the writes go")
        self.file.write(offset, buffer)


def test_a_part_is_read_while_another_is_written_and_after_its_own_write(tmp_path: Path) -> None:
    device = CpuDevice(1 << 20)
    with DiskFolder(tmp_path, Ledger(Tier.DISK)) as folder:
        file = Slow(folder.create("states", 2 * PAGE, Kind.STATE))
        file.file.write(0, torch.zeros(2 * PAGE, dtype=torch.uint8))
        ring = StagingRing([torch.empty(PAGE, dtype=torch.uint8) for _ in range(3)])
        home = DiskHome(device, file, 0, 2 * PAGE, ring, "block")  # type: ignore[arg-type]
        loan = home.check_out(0, PAGE, "part 0", home)
        updated = device.submit(Lane.UPDATE, lambda: loan.buffer.fill_(7), after=loan.ready, nbytes=PAGE, what="update")
        written = home.check_in(loan, 0, updated, "write part 0")
        other = home.check_out(PAGE, PAGE, "part 1", home)
        for read in other.ready:
            read.wait()  # forever, if it waited for the write of part 0
        assert not written.done()
        again = home.check_out(0, PAGE, "part 0 again", home)
        assert not any(read.done() for read in again.ready)
        file.go.set()
        for read in again.ready:
            read.wait()
        assert again.buffer.eq(7).all() and other.buffer.eq(0).all()
        assert home.read().tolist() == PAGE * [7] + PAGE * [0]
        device.close()
