"""What is kept of one comparison of policies: one JSON file a run. A run may be a part of all instances."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import final

from benchmarks.archive import Archive
from benchmarks.provenance import Provenance

__all__ = ["ARCHIVE", "AUTO", "MORE", "Comparison", "Instance", "Outcome", "latest"]

AUTO = "auto"

MORE = 0.01
"""``auto`` is behind where its step is longer than the best published one by more than this share, and ties where
neither is longer by more."""


@dataclass(frozen=True)
class Outcome:
    """What one policy answers: seconds of its simulated step; None where it has no plan, and ``refusal`` says why.
    ``exact``: whether its numbers are those of plain PyTorch."""

    policy: str
    step_seconds: float | None
    exact: bool = True
    refusal: str = ""


@dataclass(frozen=True)
class Instance:
    """One model on one machine within ``device`` bytes, which are ``share`` of what the machine has.

    ``batch`` sequences of ``seq`` tokens. ``why`` is what ``auto`` says of its own plan: what binds, and how far the
    step is from what no plan can beat; ``simulations`` are those of its search.
    """

    model: str
    batch: int
    seq: int
    machine: str
    share: float
    device: int
    auto: Outcome
    published: tuple[Outcome, ...]
    why: tuple[str, ...] = ()
    simulations: int = 0

    @property
    def key(self) -> tuple[str, int, int, str, float]:
        """What tells it from every other instance."""
        return self.model, self.batch, self.seq, self.machine, self.share

    @property
    def best(self) -> Outcome | None:
        """The published policy with the shortest step, of those that compute what plain PyTorch computes; None where
        none fits."""
        able = [one for one in self.published if one.step_seconds is not None and one.exact]
        return min(able, key=lambda one: one.step_seconds or 0.0, default=None)

    @property
    def ratio(self) -> float | None:
        """The step of ``auto`` in terms of the best published one: infinite where only the latter fits, None where
        there is none to compare with."""
        if self.best is None or not self.best.step_seconds:
            return None
        return inf if self.auto.step_seconds is None else self.auto.step_seconds / self.best.step_seconds

    @property
    def behind(self) -> bool:
        """Whether ``auto`` is behind."""
        return self.ratio is not None and self.ratio > 1 + MORE

    @property
    def ties(self) -> bool:
        """Whether neither is behind."""
        return self.ratio is not None and 1 / (1 + MORE) <= self.ratio <= 1 + MORE


@final
@dataclass(frozen=True, kw_only=True)
class Comparison(Provenance):
    """One run. Nothing is timed but planning: steps are those of the simulator."""

    instances: tuple[Instance, ...]


ARCHIVE = Archive("policies-", Comparison)


def latest(comparisons: Sequence[Comparison]) -> tuple[Instance, ...]:
    """The newest of every instance in ``comparisons``, which are in order of their dates."""
    found = {one.key: one for comparison in comparisons for one in comparison.instances}
    return tuple(found[key] for key in sorted(found))
