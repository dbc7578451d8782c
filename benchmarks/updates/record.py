"""What is kept of one comparison of updates: one JSON file a run."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import final

from benchmarks.archive import Archive
from benchmarks.provenance import TimedProvenance

__all__ = ["ARCHIVE", "BASELINE", "MEMORY", "Comparison", "Row"]

BASELINE = "torch cast + fused + cast"
"""The contender that ratios are taken to."""

MEMORY = "memory"
"""The row that updates nothing: how fast bytes are read and written back in place."""


@dataclass(frozen=True)
class Row:
    """One contender: ``bytes_per_parameter`` is the least that it has to move, ``seconds`` are one entry a round."""

    name: str
    bytes_per_parameter: float
    seconds: tuple[float, ...]

    def parameters_per_second(self, elements: int) -> float:
        """In the median round."""
        return elements / median(self.seconds)

    def bytes_per_second(self, elements: int) -> float:
        """The least bytes over the seconds of the median round."""
        return self.bytes_per_parameter * self.parameters_per_second(elements)


@final
@dataclass(frozen=True, kw_only=True)
class Comparison(TimedProvenance):
    """One run over ``elements`` parameters. ``left_out`` says in words who could not take part."""

    elements: int
    rows: tuple[Row, ...]
    left_out: tuple[str, ...] = ()

    def row(self, name: str) -> Row:
        """The row of ``name``; ``KeyError`` if there is none."""
        return {row.name: row for row in self.rows}[name]

    def ratios(self, row: Row) -> tuple[float, ...]:
        """How many times as fast as the baseline, round by round."""
        pairs = zip(self.row(BASELINE).seconds, row.seconds, strict=True)
        return tuple(baseline / own for baseline, own in pairs)


ARCHIVE = Archive("update-", Comparison)
