"""What is kept of one run over the models: one JSON file a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import final

from benchmarks.archive import Archive
from benchmarks.provenance import Provenance

__all__ = ["ARCHIVE", "TARGET", "Comparison", "Played", "Sorted", "Way", "latest"]

TARGET = 0.01
"""Of the most bytes live at one time: by so much addresses may lie higher."""


class Way(StrEnum):
    """How a step is run."""

    KEPT = "as it is"
    RECOMPUTED = "blocks recomputed"


@dataclass(frozen=True)
class Played:
    """One step of ``model`` (``shape`` in words) played to every allocator and laid out: ``live`` bytes at one time at
    most in ``buffers`` buffers, ``reserved`` bytes by allocator, ``height`` bytes of addresses after ``solve_seconds``,
    by the processor ``cpu_seconds``."""

    model: str
    shape: str
    way: Way
    buffers: int
    live: int
    reserved: Mapping[str, int]
    height: int
    solve_seconds: float
    cpu_seconds: float

    def over(self, nbytes: int) -> float:
        """By how much so many bytes are more than what is live, as a share of that."""
        return nbytes / self.live - 1

    @property
    def missed(self) -> bool:
        """Whether addresses lie more than ``TARGET`` above what is live."""
        return self.over(self.height) > TARGET


@dataclass(frozen=True)
class Sorted:
    """The ``ops`` of one step of ``model`` in another order: the most bytes live in program order and in the order that
    was found in ``cpu_seconds`` of the processor, what no order can go below (``bound``), and how high the addresses of
    the new order are (``height``)."""

    model: str
    shape: str
    ops: int
    program: int
    found: int
    bound: int
    height: int
    cpu_seconds: float


@final
@dataclass(frozen=True, kw_only=True)
class Comparison(Provenance):
    """One run."""

    played: tuple[Played, ...]
    sorted: tuple[Sorted, ...]


ARCHIVE = Archive("traces-", Comparison)


def latest(comparisons: Sequence[Comparison]) -> tuple[tuple[Played, ...], tuple[Sorted, ...]]:
    """The newest rows of every model; ``comparisons`` are in order of their dates."""
    played = {(row.model, row.shape, row.way): row for one in comparisons for row in one.played}
    ordered = {(row.model, row.shape): row for one in comparisons for row in one.sorted}
    return tuple(played.values()), tuple(ordered.values())
