"""Delays for tests: each job, or one of them, is held back so that a missing synchronisation shows."""

from __future__ import annotations

import random
import threading
from collections.abc import Collection
from typing import final

from forebay.device.base import Delays
from forebay.timeline import Lane

__all__ = ["DelayOne", "RandomDelays"]


@final
class RandomDelays(Delays):
    """Every job of ``lanes`` is held back by 0 to ``max_seconds``, drawn from ``seed`` in the order of submission."""

    def __init__(self, seed: int, max_seconds: float, lanes: Collection[Lane] = tuple(Lane)) -> None:
        if max_seconds < 0:
            raise ValueError(f"max_seconds must be 0 or more, got {max_seconds}")
        self._lock = threading.Lock()
        self._random = random.Random(seed)
        self._max_seconds = max_seconds
        self._lanes = frozenset(lanes)

    def seconds(self, lane: Lane, what: str) -> float:
        if lane not in self._lanes:
            return 0.0
        with self._lock:
            return self._random.uniform(0.0, self._max_seconds)


@final
class DelayOne(Delays):
    """Holds back the job number ``index`` (from 0, over all lanes, in the order of submission) by ``seconds``.

    ``count`` is the number of jobs seen: a first run with an index that is never reached tells how many there are.
    """

    def __init__(self, index: int, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"seconds must be 0 or more, got {seconds}")
        self._lock = threading.Lock()
        self._index = index
        self._seconds = seconds
        self._count = 0

    @property
    def count(self) -> int:
        """Jobs seen so far."""
        return self._count

    def seconds(self, lane: Lane, what: str) -> float:
        with self._lock:
            mine = self._count == self._index
            self._count += 1
        return self._seconds if mine else 0.0
