"""Contenders keep the memory that they free: what was there once is no page fault again."""

from __future__ import annotations

import multiprocessing
import resource
import sys

import pytest

from benchmarks.allocator import hold_freed_memory

NBYTES = 256 << 20
PAGES = NBYTES // resource.getpagesize()

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only glibc is asked")


def faults(hold: bool) -> list[int]:
    """Page faults of taking and filling as many bytes, twice. Huge pages would be fewer."""
    if hold:
        assert hold_freed_memory()
    found = []
    for _ in range(2):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        filled = bytearray(b"1") * NBYTES
        del filled
        found.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return found


@pytest.mark.parametrize("hold", [True, False])
def test_what_was_freed_is_at_hand(hold: bool) -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        first, again = pool.apply(faults, (hold,))
    assert first > PAGES // 512
    assert again < first // 10 if hold else again > first // 2
