"""What is kept of runs over the policies that change the numbers: one JSON file for each task and seed of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

from benchmarks.archive import Archive
from benchmarks.host import slug
from benchmarks.provenance import Provenance

__all__ = ["ARCHIVE", "EXACT", "Comparison", "Course", "Joined", "joined"]

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

    @property
    def key(self) -> tuple[str, str, int, int]:
        """What a newer course takes the place of an older one for. Of as many steps: one of more would be held against
        an exact course of fewer."""
        return self.task, self.way, self.seed, self.steps


@final
@dataclass(frozen=True, kw_only=True)
class Comparison(Provenance):
    """One run of the benchmark. ``before`` is, by task and seed, what the model makes of the unseen text before it is
    trained (loss and accuracy)."""

    courses: tuple[Course, ...]
    before: Mapping[str, tuple[float, float]]


@final
@dataclass(frozen=True)
class Joined:
    """The newest courses of one machine, of all ``runs`` that have one of them; those without an exact course of the
    same task, seed and steps are left out."""

    runs: tuple[Comparison, ...]
    courses: tuple[Course, ...]
    before: Mapping[str, tuple[float, float]]

    def exact(self, course: Course) -> Course:
        """The exact course of the same task, seed and steps."""
        return next(c for c in self.courses if c.key == replace(course, way=EXACT).key)


def joined(comparisons: Sequence[Comparison]) -> tuple[Joined, ...]:
    """``comparisons``, in order of their dates, for each machine."""
    return tuple(
        _joined([one for one in comparisons if slug(one.hardware) == machine])
        for machine in dict.fromkeys(slug(one.hardware) for one in comparisons)
    )


def _joined(comparisons: Sequence[Comparison]) -> Joined:
    newest = {course.key: course for one in comparisons for course in one.courses}
    whole = {key: course for key, course in newest.items() if replace(course, way=EXACT).key in newest}
    runs = tuple(one for one in comparisons if any(whole.get(course.key) is course for course in one.courses))
    return Joined(runs, tuple(whole.values()), {name: pair for one in runs for name, pair in one.before.items()})


ARCHIVE = Archive("losses-", Comparison)
