"""Who else had the cores while something was measured."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import final

__all__ = ["Company", "busy_of"]


@final
class Company:
    """Other programs on ``cores`` (their numbers), from when this is made on.

    Times are in seconds: ``busy`` of all of these cores together, ``own`` of this process and of its children that
    have ended, ``clock`` of the wall.
    """

    def __init__(
        self,
        cores: Collection[int],
        busy: Callable[[], float] | None = None,
        own: Callable[[], float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._count = len(cores)
        self._busy, self._own, self._clock = busy or partial(busy_of, cores), own or _own, clock
        self._start = self._busy(), self._own(), self._clock()

    def share(self) -> float:
        """The share of the cores' time that others have had, in [0, 1]. What a hypervisor gave to somebody else counts
        as theirs."""
        busy, own, clock = self._start
        elapsed = (self._clock() - clock) * self._count
        used = (self._busy() - busy) - (self._own() - own)
        return min(1.0, max(0.0, used / elapsed)) if elapsed > 0 else 0.0


def busy_of(cores: Collection[int], stat: Path = Path("/proc/stat")) -> float:
    """Seconds that all programs have had of ``cores`` since the system began; 0 where it does not say."""
    try:
        lines = stat.read_text().splitlines()
    except OSError:
        return 0.0
    wanted = {f"cpu{core}" for core in cores}
    rows = [line.split() for line in lines]
    # User, nice, system, idle, waiting for a disk, interrupts (two), stolen; guests come next and are in user and nice.
    ticks = [list(map(int, row[1:9])) for row in rows if row and row[0] in wanted]
    return sum(sum(row) - row[3] - row[4] for row in ticks) / os.sysconf("SC_CLK_TCK")


def _own() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
