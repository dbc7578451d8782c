"""What is kept of one comparison: one JSON file a run and topic."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import final

from benchmarks.archive import Archive
from benchmarks.provenance import TimedProvenance

__all__ = ["ARCHIVE", "Comparison", "Row"]


@dataclass(frozen=True)
class Row:
    """One contender. ``seconds`` and ``ratios`` are one entry a round; what a ratio is says the comparison.

    ``target`` is the most that the median ratio may be, the least with ``at_least``. ``nbytes`` are the bytes moved in
    ``seconds`` (0: nothing to say), ``memory`` the peak of the process's resident memory in bytes.
    """

    name: str
    what: str
    seconds: tuple[float, ...]
    ratios: tuple[float, ...] = ()
    target: float | None = None
    at_least: bool = False
    nbytes: int = 0
    memory: int | None = None
    note: str = ""

    @property
    def median_seconds(self) -> float:
        """Of the rounds."""
        return median(self.seconds)

    @property
    def ratio(self) -> float | None:
        """The median of the rounds' ratios; None where there is nothing to compare with."""
        return median(self.ratios) if self.ratios else None

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None without one."""
        ratio = self.ratio
        if ratio is None or self.target is None:
            return None
        return ratio >= self.target if self.at_least else ratio <= self.target


@final
@dataclass(frozen=True, kw_only=True)
class Comparison(TimedProvenance):
    """One run of ``topic``. ``ratio`` says in words what the rows' ratios are, ``setting`` what was run, ``left_out``
    who could not take part."""

    topic: str
    question: str
    ratio: str
    setting: str
    rows: tuple[Row, ...]
    left_out: tuple[str, ...] = ()

    def row(self, name: str) -> Row:
        """The row of ``name``; ``KeyError`` if there is none."""
        return {row.name: row for row in self.rows}[name]


ARCHIVE = Archive("host-", Comparison, lambda comparison: comparison.topic)
