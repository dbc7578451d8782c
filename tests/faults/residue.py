"""What a session leaves behind: threads, descriptors, queues, files and mapped memory.

The fixture is imported where used.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

__all__ = ["descriptors", "kernel_queues", "mapped", "nothing_left_behind"]


def descriptors() -> list[str]:
    found = []
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself
            found.append(os.readlink(f"/proc/self/fd/{entry}"))
    return sorted(path for path in found if "/proc/" not in path)


def mapped() -> int:
    """Bytes of anonymous memory that are not for children: host arenas, and nothing else, are mapped so."""
    nbytes, size = 0, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.startswith("Size:"):
            size = int(line.split()[1]) * 1024
        elif line.startswith("VmFlags:") and "dc" in line.split():
            nbytes += size
    return nbytes


def kernel_queues() -> int:
    """Queues for calls that the kernel keeps for this process: the memory of each is in its map."""
    return sum("/[aio]" in line for line in Path("/proc/self/maps").read_text().splitlines())


@pytest.fixture(autouse=True)
def nothing_left_behind(tmp_path: Path) -> Iterator[None]:
    threads, before, queues = set(threading.enumerate()), descriptors(), kernel_queues()
    yield
    gc.collect()
    assert set(threading.enumerate()) <= threads
    assert descriptors() == before
    assert kernel_queues() == queues
    assert not any(tmp_path.iterdir())
