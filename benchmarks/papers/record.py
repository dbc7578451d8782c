"""What is kept of one run over the papers' claims: one JSON file a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from benchmarks.archive import Archive
from benchmarks.provenance import Provenance

__all__ = ["ARCHIVE", "Comparison", "Point", "Row", "latest"]


@dataclass(frozen=True)
class Point:
    """What one policy's plan for one model comes to, simulated.

    ``step_seconds`` is None where nothing fits, and ``refusal`` says then why. ``flops`` are those of a step as papers
    count them (``shapes.Gpt.flops``). Peaks are bytes.
    """

    policy: str
    machine: str
    model: str
    parameters: int
    batch: int
    step_seconds: float | None
    flops: float
    device: int = 0
    host: int = 0
    disk: int = 0
    refusal: str = ""

    @property
    def fits(self) -> bool:
        """Whether there is a plan."""
        return self.step_seconds is not None

    @property
    def teraflops(self) -> float:
        """Of a second; 0 where nothing fits."""
        return self.flops / self.step_seconds / 1e12 if self.step_seconds else 0.0


@dataclass(frozen=True)
class Row:
    """One claim: the ``paper``'s figure and ``ours``, in words, from ``points``. ``agrees``: whether ours has the same
    order or is as large; ``why`` it differs, or what the comparison leaves out."""

    name: str
    system: str
    claim: str
    paper: str
    ours: str
    agrees: bool
    why: str
    points: tuple[Point, ...]


@final
@dataclass(frozen=True, kw_only=True)
class Comparison(Provenance):
    """One run. Nothing is timed: all figures are those of the simulator."""

    rows: tuple[Row, ...]


ARCHIVE = Archive("papers-", Comparison)


def latest(comparisons: Sequence[Comparison]) -> tuple[Row, ...]:
    """The newest row of every claim in ``comparisons``, which are in order of their dates."""
    return tuple({row.name: row for comparison in comparisons for row in comparison.rows}.values())
