"""What is kept of a run: one JSON file a case, a day and a machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from benchmarks.case import Account, Case, Facts
from benchmarks.host import slug
from benchmarks.measure import Outcome, Score
from benchmarks.provenance import TimedProvenance
from forebay.records import dump, load

__all__ = ["RESULTS", "Result", "Row", "Shape", "collect", "load_all", "save"]

RESULTS = Path(__file__).resolve().parent / "results"
"""Where results are kept."""


@dataclass(frozen=True)
class Shape:
    """What was trained, and how often: sizes in elements and tokens."""

    model: str
    parameters: int
    dtype: str
    batch: int
    seq: int
    rounds: int
    warmup: int
    steps: int


@dataclass(frozen=True)
class Row:
    """One contender: raw seconds per step and ratios to the baseline, one entry a round, and their medians.

    ``alone`` holds the baseline's rounds before any other contender existed. ``detail`` says why a contender is out.
    """

    name: str
    what: str
    outcome: Outcome
    detail: str
    median_seconds: float | None
    median_ratio: float | None
    tokens_per_second: float | None
    seconds: tuple[float, ...]
    ratios: tuple[float, ...]
    alone: tuple[float, ...]
    budgets: Mapping[str, str]
    account: Account


@final
@dataclass(frozen=True, kw_only=True)
class Result(TimedProvenance):
    """One run of one case."""

    case: str
    question: str
    device: str
    metric: str
    baseline: str
    subject: str
    control: str
    target: float | None
    shape: Shape
    limit: str
    limit_seconds: float | None
    facts: Facts
    rows: tuple[Row, ...]

    def row(self, name: str) -> Row:
        """The row of contender ``name``; KeyError if there is none."""
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(name)

    @property
    def file_name(self) -> str:
        """The name of the file that keeps it."""
        return f"{self.case}-{self.date:%Y%m%dT%H%M%SZ}-{slug(self.hardware)}.json"


def collect(case: Case, scores: Sequence[Score], facts: Facts, origin: Mapping[str, Any]) -> Result:
    """Puts a run's figures together; ``origin``: the fields of ``TimedProvenance``."""
    shape = Shape(
        case.model.name,
        case.model.parameters,
        case.model.dtype,
        case.batch,
        case.seq,
        case.rounds,
        case.warmup,
        case.steps,
    )
    return Result(
        **origin,
        case=case.name,
        question=case.question,
        device=case.device.value,
        metric=case.metric,
        baseline=case.baseline,
        subject=case.subject,
        control=case.control,
        target=case.target,
        shape=shape,
        limit=case.limit.words,
        limit_seconds=None if case.limit.seconds is None else case.limit.seconds(facts),
        facts=facts,
        rows=tuple(_row(case, score) for score in scores),
    )


def _row(case: Case, score: Score) -> Row:
    return Row(
        name=score.contender.name,
        what=score.contender.what,
        outcome=score.outcome,
        detail=score.detail,
        median_seconds=score.median,
        median_ratio=score.ratio,
        tokens_per_second=None if score.median is None else case.tokens / score.median,
        seconds=score.seconds,
        ratios=score.ratios,
        alone=score.alone,
        budgets=score.contender.budgets,
        account=score.account,
    )


def save(result: Result, folder: Path = RESULTS) -> Path:
    """Writes ``result`` into ``folder`` and returns the file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / result.file_name
    path.write_text(dump(result) + "\n")
    return path


def load_all(folder: Path = RESULTS) -> list[Result]:
    """Every result in ``folder``, oldest first. Raises ``ConfigError`` on a file that is none."""
    results = [load(Result, path.read_bytes()) for path in sorted(folder.glob("*.json"))]
    return sorted(results, key=lambda result: result.date)
