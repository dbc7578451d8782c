"""What is kept of one model under all policies for its states: one JSON file a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import final

from benchmarks.archive import Archive
from benchmarks.provenance import TimedProvenance

__all__ = ["ARCHIVE", "NEAR", "Comparison", "Figures", "Refused", "Run"]

NEAR = 0.15
"""A step is foretold well where it is measured within this share of what was foretold."""


@dataclass(frozen=True)
class Figures:
    """Seconds of a step, and peak bytes of the tiers."""

    step_seconds: float
    device: int
    host: int
    disk: int


@dataclass(frozen=True)
class Run:
    """The plan of one policy, foretold and run. ``level`` names the budgets, ``device`` and ``host`` are their bytes;
    ``micro_batches`` pass the model together in a step. ``promised`` are the bytes that the plan promises not to pass,
    of device, host and disk. ``seconds`` are the timed steps, ``ratios`` has for each round the step measured in it
    over the step foretold with the rates of that round. ``busy`` are seconds of a step in which each lane had something
    to do, as foretold and as measured, by the lane's name. ``as_plain``: whether all losses were those of plain PyTorch
    to the last bit, ``exact`` whether the plan promises that."""

    level: str
    policy: str
    device: int
    host: int
    micro_batches: int
    promised: tuple[int, int, int]
    predicted: Figures
    measured: Figures
    seconds: tuple[float, ...]
    ratios: tuple[float, ...]
    busy: Mapping[str, tuple[float, float]]
    exact: bool
    as_plain: bool

    @property
    def error(self) -> float:
        """Measured over foretold, less 1: above 0 the step took longer. The median of the rounds."""
        return median(self.ratios) - 1

    @property
    def near(self) -> bool:
        """Whether the step took what was foretold, within ``NEAR`` of it."""
        return abs(self.error) <= NEAR

    @property
    def kept(self) -> bool:
        """Whether no tier held more than the plan had promised."""
        measured, promised = self.measured, self.promised
        pairs = zip((measured.device, measured.host, measured.disk), promised, strict=True)
        return all(held <= allowed for held, allowed in pairs)


@dataclass(frozen=True)
class Refused:
    """A policy that has no plan within the budgets of ``level``, or whose run failed, and why."""

    level: str
    policy: str
    reason: str


@final
@dataclass(frozen=True, kw_only=True)
class Comparison(TimedProvenance):
    """One model."""

    model: str
    kind: str
    runs: tuple[Run, ...]
    refused: tuple[Refused, ...]

    @property
    def near(self) -> int:
        """How many runs took what was foretold, within ``NEAR``."""
        return sum(run.near for run in self.runs)


ARCHIVE = Archive("states-", Comparison, lambda comparison: comparison.model)
