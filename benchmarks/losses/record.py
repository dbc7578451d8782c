"""What is kept of one run over the policies that change the numbers: one JSON file a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from benchmarks.archive import Archive
from benchmarks.provenance import Provenance

__all__ = ["ARCHIVE", "EXACT", "Comparison", "Course"]

EXACT = "exact"
"""The course that all others are held against."""


@dataclass(frozen=True)
class Course:
    """One run. ``task`` is what is trained, ``way`` how the states are updated ("exact", or the policy and what it
    sends), ``seed`` that of weights and of the order of the text. ``losses`` are means of ``every`` steps in a row;
    ``unseen_loss`` (nats a byte) and ``unseen_accuracy`` (share of bytes that are guessed) are those of text that it
    was not trained on, after the last step."""

    task: str
    way: str
    seed: int
    steps: int
    every: int
    losses: tuple[float, ...]
    unseen_loss: float
    unseen_accuracy: float


@final
@dataclass(frozen=True, kw_only=True)
class Comparison(Provenance):
    """One run of the benchmark. ``before`` is, by task and seed, what the model makes of the unseen text before it is
    trained (loss and accuracy)."""

    courses: tuple[Course, ...]
    before: Mapping[str, tuple[float, float]]

    def exact(self, course: Course) -> Course:
        """The exact course of the same task and seed."""
        return next(c for c in self.courses if (c.task, c.seed, c.way) == (course.task, course.seed, EXACT))


ARCHIVE = Archive("losses-", Comparison)
