"""Turns: everyone has one in each round, in rotating order.

A turn is one step that is not timed, to have the contender's pages and threads at hand, and ``STEPS`` that are.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from benchmarks.measure import in_rotation

__all__ = ["STEPS", "Contender", "race"]

STEPS = 3


class Contender(ABC):
    """``bytes_per_parameter`` is the least that a step has to move."""

    name: str
    bytes_per_parameter: float

    @abstractmethod
    def step(self) -> None:
        """One step over all parameters."""


def race(
    contenders: Sequence[Contender], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> list[list[float]]:
    """Seconds of a step: for each contender one entry a round."""
    seconds: list[list[float]] = [[] for _ in contenders]
    for number in range(rounds):
        for contender, taken in in_rotation(list(zip(contenders, seconds, strict=True)), number):
            contender.step()
            start = clock()
            for _ in range(STEPS):
                contender.step()
            taken.append((clock() - start) / STEPS)
    return seconds
