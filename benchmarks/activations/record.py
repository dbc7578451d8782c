"""What is kept of one run of the rivals: one JSON file a day and a machine."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from statistics import median
from typing import final

from benchmarks.archive import Archive
from benchmarks.prediction.record import Figures
from benchmarks.provenance import TimedProvenance

__all__ = ["ARCHIVE", "Comparison", "Field", "Row", "State"]


class State(StrEnum):
    """How a contender came out."""

    MEASURED = "measured"
    OUT_OF_MEMORY = "out of memory"
    NO_PLAN = "no plan fits"
    FAILED = "failed"
    LEFT_OUT = "left out"


@dataclass(frozen=True)
class Row:
    """One contender. ``budget`` is in bytes (None: it has none), ``label`` what it is called. ``seconds`` are per step
    and ``ratios`` to plain in the same round, one entry a round; ``rounds`` numbers them: who has a number in common
    took turns. ``exact`` says that its first loss must be plain's to
    the last bit; else up to rounding. ``detail`` says why there is no figure. A plan that is that of another row ran
    once: ``measured_as`` names that row.
    """

    name: str
    series: str
    what: str
    label: str
    budget: int | None
    state: State
    exact: bool = True
    detail: str = ""
    device: int | None = None
    host: int | None = None
    seconds: tuple[float, ...] = ()
    ratios: tuple[float, ...] = ()
    rounds: tuple[int, ...] = ()
    predicted: Figures | None = None
    measured_as: str | None = None

    @property
    def step_seconds(self) -> float | None:
        """Median seconds of a step; None without a round."""
        return median(self.seconds) if self.seconds else None

    @property
    def ratio(self) -> float | None:
        """Median of the per-round ratios; None without one."""
        return median(self.ratios) if self.ratios else None

    def beside(self, other: Row) -> tuple[float, ...]:
        """Seconds of this row over those of ``other``, for every round that both took part in."""
        theirs = dict(zip(other.rounds, other.seconds, strict=False))
        mine = zip(self.rounds, self.seconds, strict=False)
        return tuple(seconds / theirs[number] for number, seconds in mine if number in theirs)


@dataclass(frozen=True)
class Field:
    """All contenders on one model. ``plain_peak`` are device bytes, ``batch`` the rows of a step."""

    model: str
    batch: int
    plain_peak: int
    rows: tuple[Row, ...]

    def row(self, name: str) -> Row:
        """The row called ``name``; KeyError if there is none."""
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(name)


@final
@dataclass(frozen=True, kw_only=True)
class Comparison(TimedProvenance):
    """One session. ``failed`` says in words which models did not run. ``beside`` names the rivals that
    alone ran; empty: all did. ``held``: whether all processes kept the memory that they freed (``allocator``)."""

    rounds: int
    warmup: int
    steps: int
    fields: tuple[Field, ...]
    failed: tuple[str, ...] = ()
    beside: str = ""
    held: bool = False

    @property
    def subject(self) -> str:
        """The models compared, and beside whom, where not beside all."""
        return ", ".join(field.model for field in self.fields) + (f" beside {self.beside}" if self.beside else "")


ARCHIVE = Archive("activations-", Comparison, topic=lambda comparison: comparison.subject)
"""Where comparisons are kept."""
