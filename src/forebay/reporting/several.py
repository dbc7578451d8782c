"""The record of several models that share a device: each one's own, and what they took together. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from forebay.memory import Tier, TierUsage
from forebay.reporting.run import RunReport

__all__ = ["SeveralReport"]


@dataclass(frozen=True)
class SeveralReport:
    """``runs`` of the models, whose steps last from one step to the next, turns of the others included, as predicted
    too. ``tiers`` are the accounts of all of them together; of a model that was closed they have the peak still."""

    runs: tuple[RunReport, ...]
    tiers: tuple[TierUsage, ...]

    def measured_peaks(self) -> dict[Tier, int]:
        """Peak of every tier in bytes, of all models at the same instant."""
        return {usage.tier: usage.peak for usage in self.tiers}

    def predicted_peaks(self) -> dict[Tier, int]:
        """What the plans promise: in the worst case the peaks of all models are at the same instant."""
        return {tier: sum(run.predicted_peaks()[tier] for run in self.runs) for tier in Tier}

    def to_json_dict(self) -> dict[str, Any]:
        """The figures for JSON: sizes are bytes, times seconds, rates per second."""
        return {
            "models": [run.to_json_dict() for run in self.runs],
            "budgets": {usage.tier.value: usage.limit for usage in self.tiers},
            "predicted": {"peaks": {tier.value: nbytes for tier, nbytes in self.predicted_peaks().items()}},
            "measured": {"peaks": {tier.value: nbytes for tier, nbytes in self.measured_peaks().items()}},
        }
