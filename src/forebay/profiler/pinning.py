"""How much host memory can be page-locked: tried, because no limit that can be read says it."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable

from forebay.errors import HostOutOfMemory
from forebay.layout import PAGE
from forebay.memory import Kind, Ledger, Tier
from forebay.tiers.arena import HostArena, Pinner
from forebay.units import MiB

__all__ = ["memlock_limit", "pinned_capacity", "tries_with"]

_FIRST = 64 * MiB

_PATIENCE = 0.6
"""Seconds: the next try takes twice as long as the last, so after one of this length there is no other."""


def pinned_capacity(tries: Callable[[int], bool], host: int, bound: int, limit: int | None) -> int:
    """Bytes that may be page-locked at one time, ``host`` bytes being there.

    ``tries(nbytes)`` page-locks so many, gives them back and says whether it could. Sizes double up to ``bound``. A
    refusal ends the search at the last size that worked. Without a refusal nothing is known of what is beyond, and
    the answer is ``host``, or ``limit`` (RLIMIT_MEMLOCK) if the tries did not go past it: a driver that pinned more
    than the limit does not count against it. At least one page, since 0 means that the device needs none.
    """
    largest, size = 0, min(_FIRST, host)
    while PAGE <= size <= min(bound, host):
        start = time.perf_counter()
        if not tries(size):
            return max(PAGE, largest)
        largest, size = size, size * 2
        if time.perf_counter() - start > _PATIENCE:
            break
    if limit is not None and largest <= limit:
        return max(PAGE, min(host, limit))
    return max(PAGE, host)


def tries_with(pinner: Pinner) -> Callable[[int], bool]:
    """A try for ``pinned_capacity``: an arena of that size, page-locked by ``pinner`` and closed again."""

    def tries(nbytes: int) -> bool:
        try:
            with HostArena(nbytes, Kind.STAGING, ledger=Ledger(Tier.HOST), pinner=pinner, what="probe") as arena:
                return arena.pinned
        except HostOutOfMemory:
            return False

    return tries


def memlock_limit() -> int | None:
    """Bytes that RLIMIT_MEMLOCK allows this process; None: no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft
