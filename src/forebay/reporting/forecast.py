"""The record of a plan before it runs: whether it fits, what it needs, how long a step takes, what else there is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from forebay.errors import ConfigError
from forebay.memory import Tier, TierUsage
from forebay.phases import PhasePeaks
from forebay.plans import Plan
from forebay.timeline import Lane

__all__ = ["AccumulationForecast", "Alternative", "PlanReport", "StepForecast"]


@dataclass(frozen=True)
class StepForecast:
    """One step as it is predicted: seconds, with the band that the error of its sources gives, and what lanes do.

    ``limit_seconds`` is the least that physics leaves, ``limits`` the same per lane; ``busy`` are seconds and
    ``moved`` bytes of each lane in a step. ``measured_share`` is the share of op seconds that were measured,
    ``disk_written`` are bytes that go to disk in a step, whoever writes them.
    """

    seconds: float
    low: float
    high: float
    tokens_per_second: float
    limit_seconds: float
    binding: Lane
    limits: Mapping[Lane, float]
    busy: Mapping[Lane, float]
    moved: Mapping[Lane, int]
    measured_share: float = 0.0
    disk_written: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.seconds <= self.high:
            raise ConfigError(f"a step of {self.seconds} s is not between {self.low} and {self.high}")

    @property
    def limit_share(self) -> float:
        """The physical limit over the step, 0 to 1: how near the step comes to it."""
        return self.limit_seconds / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class AccumulationForecast:
    """A step of several micro-batches under the plan of the report, which leaves room for all of them together
    (``forebay.accumulate``), beside PyTorch's loop over them under the plan that has all the room for one at a time.

    Each: predicted ``seconds``, and the bytes that cross in a step by lane (``moved``). ``peaks`` are the most bytes of
    each tier that they take together. Where nothing streams, ``accumulate`` is the loop.
    """

    micro_batches: int
    seconds: float
    moved: Mapping[Lane, int]
    peaks: Mapping[Tier, int]
    loop_seconds: float
    loop_moved: Mapping[Lane, int]

    def to_json_dict(self) -> dict[str, Any]:
        """The figures for ``--json``."""
        return {
            "micro_batches": self.micro_batches,
            "step_seconds": self.seconds,
            "moved": {lane.value: nbytes for lane, nbytes in self.moved.items()},
            "peaks": {tier.value: nbytes for tier, nbytes in self.peaks.items()},
            "loop": {
                "step_seconds": self.loop_seconds,
                "moved": {lane.value: nbytes for lane, nbytes in self.loop_moved.items()},
            },
        }


@dataclass(frozen=True)
class Alternative:
    """Another answer: what is different, in words, and what it needs (bytes per tier) and takes (seconds), if known."""

    words: str
    step_seconds: float | None = None
    peaks: Mapping[Tier, int] = field(default_factory=dict)

    def to_json_dict(self) -> dict[str, Any]:
        """The figures for ``--json``."""
        peaks = {tier.value: nbytes for tier, nbytes in self.peaks.items()} or None
        return {"change": self.words, "step_seconds": self.step_seconds, "peaks": peaks}


@dataclass(frozen=True)
class PlanReport:
    """What a user wants to know before a run.

    ``plan``, ``step``, ``tiers`` and ``phases`` are None or empty where nothing fits; ``alternatives`` are then the
    nearest things that would. ``second_copies`` are the bytes that updates ahead of their step take in each tier, which
    ``tiers`` count too. ``accumulation`` is a step of several micro-batches, None where none was asked for: ``step``
    and ``tiers`` are those of one. ``budgets`` are the bytes that each tier may have: the budget, or what the machine
    has. ``notes`` say how the figures came about. ``solve_seconds`` is the time that the planner took.
    """

    model: str
    machine: str
    policy: str
    budgets: Mapping[Tier, int]
    solve_seconds: float
    plan: Plan | None = None
    step: StepForecast | None = None
    tiers: tuple[TierUsage, ...] = ()
    second_copies: Mapping[Tier, int] = field(default_factory=dict)
    phases: Mapping[str, PhasePeaks] = field(default_factory=dict)
    accumulation: AccumulationForecast | None = None
    alternatives: tuple[Alternative, ...] = ()
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if (self.plan is None) != (self.step is None):
            raise ConfigError("a plan that fits has a predicted step, and one that does not has none")

    @property
    def fits(self) -> bool:
        """Whether there is a plan within all budgets."""
        return self.plan is not None

    @property
    def seconds(self) -> float | None:
        """Predicted seconds of a step of all micro-batches; None where nothing fits."""
        if self.accumulation is not None:
            return self.accumulation.seconds
        return None if self.step is None else self.step.seconds

    def usage(self, tier: Tier) -> TierUsage | None:
        """The predicted account of ``tier`` in a step, or None if there is none."""
        return next((usage for usage in self.tiers if usage.tier is tier), None)

    def peak(self, tier: Tier) -> int:
        """Bytes of ``tier`` at its peak in a step; 0 for a tier that is not used."""
        usage = self.usage(tier)
        return 0 if usage is None else usage.peak

    def to_json_dict(self) -> dict[str, Any]:
        """The object that ``--json`` prints: sizes are bytes, times seconds, rates per second."""
        step, plan = self.step, self.plan
        return {
            "fits": self.fits,
            "policy": self.policy,
            "step_seconds": step.seconds if step else None,
            "step_seconds_low": step.low if step else None,
            "step_seconds_high": step.high if step else None,
            "tokens_per_second": step.tokens_per_second if step else None,
            "limit_seconds": step.limit_seconds if step else None,
            "binding": step.binding.value if step else None,
            "exact": not plan.changes_numbers if plan else None,
            "peaks": {tier.value: self.peak(tier) for tier in Tier} if plan else None,
            "budgets": {tier.value: self.budgets.get(tier) for tier in Tier},
            "accumulation": self.accumulation.to_json_dict() if self.accumulation else None,
            "phases": {name: _phase(peaks) for name, peaks in self.phases.items()} if plan else None,
            "solve_seconds": self.solve_seconds,
            "alternatives": [alternative.to_json_dict() for alternative in self.alternatives],
            "reasons": [*self.reasons, *self.notes],
        }


def _phase(peaks: PhasePeaks) -> dict[str, int]:
    return {
        "device": peaks.device,
        "host": peaks.host,
        "pinned": peaks.pinned,
        "disk": peaks.disk,
        "host_beside": peaks.beside,
    }
