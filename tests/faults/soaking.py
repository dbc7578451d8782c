"""Many steps in a row: ``python -m tests.faults.soaking FOLDER STEPS``. Prints what the process had at times, as JSON.

Parameters and states are on disk, gradients on the host, and blocks stream through slots on the device. A step is two
micro-batches, clipped; every 25th is followed by an evaluation and by a checkpoint. The steps are cut into 8 parts, at
whose ends is noted what there is.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import threading
from pathlib import Path

import torch
from torch import nn

import forebay
from forebay.runtime.hooks import prepared_session
from tests.faults.trained import AMPLE, WIDTH, adamw, disk_plan, network

PARTS = 8
KEEP_EVERY = 25


def resident() -> int:
    """Bytes of memory that the process has now, when all that is free has been given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main(folder: Path, steps: int) -> None:
    torch.set_num_threads(1)
    disk, kept = folder / "disk", folder / "kept"
    disk.mkdir()
    model = network()
    plan = disk_plan(disk)
    model, optimizer = forebay.prepare(
        model, adamw(model), plan=plan, device_memory=AMPLE, disk=f"{disk}:64MiB", device="cpu"
    )
    session = prepared_session(model)
    found = []
    for step in range(1, steps + 1):
        for micro in range(2):
            inputs = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(2 * step + micro))
            nn.functional.dropout(model(inputs), 0.1).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        if step % KEEP_EVERY == 0:
            with torch.no_grad():
                model(inputs)
            forebay.save(model, optimizer, kept, step=step)
        if step % (steps // PARTS) == 0:
            forebay.synchronize(model)
            # The timeline keeps the events of the last steps, up to a number that many steps take to reach.
            session.measure.forget()
            ledgers = session.resources.ledgers
            tiers = {ledger.tier.value: ledger.live for ledger in (session.device.ledger, ledgers.host, ledgers.disk)}
            things = {"descriptors": len(os.listdir("/proc/self/fd")), "threads": threading.active_count()}
            found.append({"resident": resident(), **things, **tiers})
    forebay.close(model)
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
