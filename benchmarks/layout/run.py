"""How low layouts are, and how long they take.

scripts/bench layout
scripts/bench layout hard
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from benchmarks.case import BenchmarkError
from benchmarks.layout.instances import Kind, instance, random_buffers
from forebay.buffers import BufferSet
from forebay.checking.addresses import check_addresses
from forebay.planners.layout import lay_out

__all__ = ["TOPICS", "compare"]

Say = Callable[[str], None]


def compare(topics: Sequence[str], say: Say) -> None:
    """Runs ``topics`` (none: all of them). Raises ``BenchmarkError`` for one that there is not."""
    for topic in topics or TOPICS:
        if topic not in TOPICS:
            raise BenchmarkError(f"there is no topic {topic!r}; topics are {', '.join(TOPICS)}")
        TOPICS[topic](say)


def _hard(say: Say) -> None:
    """Instances of a known layout at their capacity."""
    for count in (150, 250, 450):
        for seed in range(8):
            _say(f"hard-{count}-{seed}", instance(seed, Kind(count=count)), say)


def _large(say: Say) -> None:
    """Many buffers, of random lives and cut from a rectangle."""
    _say("random-20000", random_buffers(20000, seed=0), say, seconds=9.0)
    _say("dense-20000", random_buffers(20000, seed=1, times=2000), say, seconds=9.0)
    given = instance(0, Kind(count=20000), capacity=1 << 28)
    _say("cut-20000", BufferSet(given.buffers, given.lower_bound * 101 // 100), say, seconds=9.0)


def _say(name: str, given: BufferSet, say: Say, seconds: float | None = None) -> None:
    start = time.perf_counter()
    found = lay_out(given, seconds=seconds)
    spent = time.perf_counter() - start
    check_addresses(found)
    room = "" if given.capacity is None else f", capacity {given.capacity}: {'fits' if found.feasible else 'NOT FOUND'}"
    say(
        f"{name}: {len(given.buffers)} buffers in {spent:.2f} s, {found.gap:.2%} over the bound of "
        f"{found.lower_bound}{room} ({found.found_by})"
    )


TOPICS: Mapping[str, Callable[[Say], None]] = MappingProxyType({"hard": _hard, "large": _large})
