"""What is kept of one run over the planners: one JSON file a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import final

from benchmarks.archive import Archive
from benchmarks.provenance import Provenance
from forebay.planners.search import TIE

__all__ = ["ARCHIVE", "AUTO", "TARGET", "Comparison", "Room", "Solved", "latest"]

AUTO = "auto"

TARGET = 2.0
"""Seconds of the processor that a planner may take for a model of any of these depths, but for the exact ones."""


class Room(StrEnum):
    """What the device has room for beside a share of the activations."""

    ALL = "all on the device"
    """Parameters, gradients and states: the papers' case."""

    SLOTS = "all streaming"
    """The slots that parameters stream through."""


@dataclass(frozen=True)
class Solved:
    """One planner's answer for a model of ``layers`` layers, from a trace to a plan: the least of a few.

    ``device`` bytes are the budget, by what there is ``room`` for; ``cpu_seconds`` those of the processor, ``seconds``
    those on the wall. ``step_seconds`` is None where nothing fits. ``exact``: the policy is an integer programme, which
    stops at a limit; ``proof`` is then what it says of its answer.
    """

    policy: str
    layers: int
    room: Room
    device: int
    cpu_seconds: float
    seconds: float
    step_seconds: float | None
    exact: bool = False
    proof: str = ""

    def behind(self, other: Solved) -> bool:
        """Whether its step is longer than that of ``other`` by more than a tie."""
        return (self.step_seconds or inf) > (1 + TIE) * (other.step_seconds or inf)

    @property
    def slow(self) -> bool:
        """Whether it takes more than ``TARGET``, and is none that may."""
        return self.cpu_seconds > TARGET and not self.exact


@final
@dataclass(frozen=True, kw_only=True)
class Comparison(Provenance):
    """One run."""

    rows: tuple[Solved, ...]


ARCHIVE = Archive("solving-", Comparison)


def latest(comparisons: Sequence[Comparison]) -> tuple[Solved, ...]:
    """The newest row of every policy, depth and room in ``comparisons``, which are in order of their dates."""
    found = {(row.policy, row.layers, row.room): row for comparison in comparisons for row in comparison.rows}
    return tuple(found.values())
