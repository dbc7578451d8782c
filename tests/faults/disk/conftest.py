from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.residue import kernel_queues
from tests.faults.scripted_io import Tiers


@pytest.fixture
def tiers() -> Tiers:
    return Tiers()


@pytest.fixture(autouse=True)
def nothing_left_behind(tmp_path: Path, tiers: Tiers) -> Iterator[None]:
    """Whatever a test does: no descriptor, no queue, no file, no byte in a ledger survives it."""
    before, queues = set(os.listdir("/proc/self/fd")), kernel_queues()

    def left() -> list[object]:
        folders = [p for p in tmp_path.iterdir() if p.name.startswith("forebay-")]
        return [
            *folders,
            *(set(os.listdir("/proc/self/fd")) - before),
            *range(queues, kernel_queues()),
            *filter(None, [tiers.disk.live, tiers.host.live]),
        ]

    yield
    if left():  # a traceback in a reference cycle may hold a file; only what survives the collector is left behind
        gc.collect()
    assert left() == []
