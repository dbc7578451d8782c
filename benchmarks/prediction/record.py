"""What is kept of one comparison of predictions with runs: one JSON file a day and a machine."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import final

from benchmarks.archive import Archive
from benchmarks.provenance import TimedProvenance

__all__ = ["ARCHIVE", "COMMAND", "Comparison", "Figures", "Run"]

COMMAND = "scripts/bench predict"
"""Runs all models of the zoo; the names of some may follow."""


@dataclass(frozen=True)
class Figures:
    """Peak bytes on the device and on the host, and seconds of a step."""

    device: int
    host: int
    step_seconds: float


@dataclass(frozen=True)
class Run:
    """One plan, foretold and run. ``budget`` is the device budget in bytes, ``level`` its name, ``promised`` the
    bytes that the plan promises not to pass, ``seconds`` the raw steps. ``ratios`` has for each round the step foretold
    with the rates of that round over the step measured in it; empty: there was one round."""

    model: str
    kind: str
    level: str
    budget: int
    policy: str
    plan: str
    promised: int
    predicted: Figures
    measured: Figures
    seconds: tuple[float, ...]
    measured_share: float
    ratios: tuple[float, ...] = ()

    @property
    def device_error(self) -> float:
        """Predicted over measured device peak, less 1: above 0 is too much."""
        return self.predicted.device / self.measured.device - 1

    @property
    def host_error(self) -> float:
        """The same for the host; 0 where both are 0."""
        return self.predicted.host / self.measured.host - 1 if self.measured.host else float(self.predicted.host > 0)

    @property
    def step_error(self) -> float:
        """The same for the step: the median of the rounds."""
        return median(self.ratios or (self.predicted.step_seconds / self.measured.step_seconds,)) - 1


@final
@dataclass(frozen=True, kw_only=True)
class Comparison(TimedProvenance):
    """All runs of one session. ``failed`` says in words which models did not run."""

    machine: str
    runs: tuple[Run, ...]
    failed: tuple[str, ...] = ()

    @property
    def is_whole(self) -> bool:
        """Whether all models of the zoo were to run."""
        return self.command == COMMAND

    def planned(self) -> tuple[Run, ...]:
        """The runs of ``auto``: what a user gets."""
        return tuple(run for run in self.runs if run.policy == "auto")

    def step_errors(self) -> tuple[float, float]:
        """Median and worst absolute error of the step's seconds over the runs of ``auto``."""
        errors = [abs(run.step_error) for run in self.planned()]
        return median(errors), max(errors)

    def pairs(self, apart: float) -> tuple[int, int]:
        """Pairs of policies for one model and budget whose measured steps differ by more than ``apart`` (a share), and
        how many of them the prediction puts in the same order."""
        same = total = 0
        for index, one in enumerate(self.runs):
            for other in self.runs[index + 1 :]:
                if (one.model, one.level) != (other.model, other.level):
                    continue
                ratio = one.measured.step_seconds / other.measured.step_seconds
                if max(ratio, 1 / ratio) <= 1 + apart:
                    continue
                total += 1
                same += (ratio > 1) == (one.predicted.step_seconds > other.predicted.step_seconds)
        return same, total


ARCHIVE = Archive("prediction-", Comparison, topic=lambda one: "all models" if one.is_whole else "some")
"""Where comparisons are kept."""
