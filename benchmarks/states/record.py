"""What is kept of one model under policies for its states: one JSON file a run. A run may be a part of all policies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final, final

from benchmarks.archive import Archive
from benchmarks.host import slug
from benchmarks.provenance import TimedProvenance

__all__ = ["ARCHIVE", "LEVELS", "NEAR", "Comparison", "Figures", "Refused", "Row", "Run", "Same", "latest"]

LEVELS: Final = ("host", "disk")
"""What the budgets are: with as much of the host as policies want, and with so little that half of the states have to
go to disk."""

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
    over the step foretold. ``busy`` are seconds of a step in which each lane had something to do, as foretold and as
    measured, by the lane's name. ``as_plain``: whether all losses were those of plain PyTorch to the last bit,
    ``exact`` whether the plan promises that."""

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
    def noise(self) -> float | None:
        """By what share its slowest round was slower than its fastest: the same plan on the same machine, moments
        apart. None where it ran once."""
        count = len(self.seconds) // len(self.ratios)
        rounds = [median(self.seconds[place : place + count]) for place in range(0, len(self.seconds), count)]
        return max(rounds) / min(rounds) - 1 if len(rounds) > 1 else None

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


@dataclass(frozen=True)
class Same:
    """A policy whose plan within the budgets of ``level`` is that of another one, which ``run`` names: its level and
    its policy."""

    level: str
    policy: str
    run: tuple[str, str]


@final
@dataclass(frozen=True, kw_only=True)
class Comparison(TimedProvenance):
    """One model under some policies: each of them is in one of the three."""

    model: str
    kind: str
    runs: tuple[Run, ...]
    refused: tuple[Refused, ...]
    same: tuple[Same, ...] = ()


ARCHIVE = Archive("states-", Comparison)


@final
@dataclass(frozen=True)
class Row:
    """What became of one policy, and the comparison that says so."""

    found: Run | Refused | Same
    source: Comparison


def latest(comparisons: Sequence[Comparison]) -> Mapping[tuple[str, str], Sequence[Row]]:
    """The newest row of every level and policy, by machine and model. ``comparisons`` are in order of their dates.

    A plan that was the same as one which has been run again since keeps its row: that run is of the newer plan.
    """
    kept: dict[tuple[str, str], dict[tuple[str, str], Row]] = {}
    for one in comparisons:
        rows = kept.setdefault((slug(one.hardware), one.model), {})
        rows.update({(found.level, found.policy): Row(found, one) for found in (*one.runs, *one.refused, *one.same)})
    levels = {level: place for place, level in enumerate(LEVELS)}
    return {topic: [rows[key] for key in sorted(rows, key=lambda key: levels[key[0]])] for topic, rows in kept.items()}
