"""The record of a run: the plan that was made, and the timeline that was measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from forebay.errors import ConfigError
from forebay.memory import ArenaUsage, Tier, TierUsage
from forebay.plans import Plan
from forebay.reporting.steps import for_keeping
from forebay.timeline import Lane, Timeline, typical_seconds

__all__ = ["RUN_SCHEMA", "RunReport"]

RUN_SCHEMA = 1


@dataclass(frozen=True)
class RunReport:
    """What was predicted and what happened.

    ``elapsed`` is the time in seconds since the first step began, ``steps`` the number of whole optimizer steps in
    it, ``tokens`` the number of tokens trained on (None: nobody counted). ``micro_batches`` is the number of forward
    and backward passes in a step, which the predicted step is scaled to, ``together`` the most that pass the model at a
    time (``forebay.accumulate``).
    """

    plan: Plan
    timeline: Timeline
    elapsed: float
    steps: int
    tokens: int | None = None
    micro_batches: int = 1
    together: int = 1
    schema: int = RUN_SCHEMA

    def __post_init__(self) -> None:
        if self.schema != RUN_SCHEMA:
            raise ConfigError(f"this report has schema {self.schema}, this forebay reads schema {RUN_SCHEMA}")
        if not 1 <= self.together <= self.micro_batches:
            raise ConfigError(
                f"a step has 1 micro-batch or more, and at most all of them at a time, got {self.micro_batches} and "
                f"{self.together}"
            )
        if self.elapsed < 0 or self.steps < 0:
            raise ConfigError(f"a run has 0 or more seconds and steps, got {self.elapsed} and {self.steps}")

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second over the whole run; None when nobody counted or no time has passed."""
        return self.tokens / self.elapsed if self.tokens is not None and self.elapsed > 0 else None

    @property
    def step_seconds(self) -> float | None:
        """Seconds of the median step (the first one records the order and is slower), or of one of the median round
        where blocks are updated in turns; None before the first."""
        if self.timeline.step_seconds:
            return typical_seconds(self.timeline.step_seconds, self.plan.streaming.update_every)
        return self.elapsed / self.steps if self.steps else None

    @property
    def seen_seconds(self) -> float:
        """Seconds of ``elapsed`` that the events cover: those of the first steps of a long run are forgotten."""
        steps, events = self.timeline.steps(), self.timeline.events
        if not steps or not events or events[0].start <= steps[0][1]:
            return self.elapsed
        return max(0.0, self.elapsed - (events[0].start - steps[0][0]))

    def busy_shares(self) -> dict[Lane, float]:
        """Share of ``seen_seconds`` during which each lane had something to do, 0 to 1."""
        busy, seconds = self.timeline.busy(), self.seen_seconds
        return {lane: busy[lane] / seconds if seconds > 0 else 0.0 for lane in Lane}

    def usage(self, tier: Tier) -> TierUsage | None:
        """The account of ``tier``, or None if the run has none."""
        return self.timeline.usage(tier)

    @property
    def disk_written(self) -> int:
        """Bytes written to disk, which is what a disk wears by."""
        return self.timeline.counters.get("disk_written", 0)

    def measured_peaks(self) -> dict[Tier, int]:
        """Peak of every tier in bytes; 0 for a tier that the run did not use."""
        return dict.fromkeys(Tier, 0) | self.timeline.peaks

    def reserved(self) -> dict[Tier, int]:
        """Bytes of every tier that were taken from the machine at its peak: what its ledger counted, and what the
        machine gave beside for the pieces of memory that are taken once."""
        return self._with_arenas(lambda arena: arena.reserved - arena.nbytes)

    def in_use(self) -> dict[Tier, int]:
        """Of these bytes those that were somebody's: neither padding nor a hole."""
        return self._with_arenas(lambda arena: arena.used - arena.nbytes)

    def gaps(self) -> dict[Tier, float]:
        """By how much ``reserved`` is more than ``in_use``, as a share of that, for every tier that was used."""
        reserved, used = self.reserved(), self.in_use()
        return {tier: reserved[tier] / used[tier] - 1 for tier in Tier if used[tier]}

    def _with_arenas(self, beside: Callable[[ArenaUsage], int]) -> dict[Tier, int]:
        found = self.measured_peaks()
        for arena in self.timeline.arenas:
            found[arena.tier] += beside(arena)
        return found

    def predicted_peaks(self) -> dict[Tier, int]:
        """Peak of every tier in bytes as the plan promises it."""
        return self.plan.peaks(self.together)

    @property
    def predicted_step_seconds(self) -> float | None:
        """Seconds of a step as the plan has it; None where no step was simulated."""
        return self.plan.seconds_of_step(self.micro_batches, self.together)

    @property
    def step_ratio(self) -> float | None:
        """Measured over predicted seconds of a step; None where one of them is missing."""
        return _ratio(self.step_seconds, self.predicted_step_seconds)

    def peak_ratios(self) -> dict[Tier, float | None]:
        """Measured over predicted peak of every tier; None for a tier that no byte was predicted for."""
        measured, predicted = self.measured_peaks(), self.predicted_peaks()
        return {tier: _ratio(measured[tier], predicted[tier]) for tier in Tier}

    def to_json_dict(self) -> dict[str, Any]:
        """The figures of the run for ``--json``: sizes are bytes, times seconds, rates per second."""
        return {
            "steps": self.steps,
            "tokens_per_second": self.tokens_per_second,
            "predicted": {"step_seconds": self.predicted_step_seconds, "peaks": _by_name(self.predicted_peaks())},
            "measured": {
                "step_seconds": self.step_seconds,
                "peaks": _by_name(self.measured_peaks()),
                "reserved": _by_name(self.reserved()),
                "in_use": _by_name(self.in_use()),
            },
        }

    def for_keeping(self) -> RunReport:
        """The record as the folder of a run keeps it: of the events those of the last steps (``steps.KEPT_EVENTS``)."""
        return replace(self, timeline=for_keeping(self.timeline))

    def to_json(self) -> str:
        """The whole record, events included, as one JSON object."""
        from forebay.records import dump

        # A ledger hands its account out as a read-only view, which JSON writers do not take for a mapping.
        tiers = tuple(replace(usage, at_peak=dict(usage.at_peak)) for usage in self.timeline.tiers)
        counters = dict(self.timeline.counters)
        return dump(replace(self, timeline=replace(self.timeline, tiers=tiers, counters=counters)))

    @classmethod
    def from_json(cls, text: str | bytes) -> RunReport:
        """Reads ``to_json``'s text. Raises ``ConfigError`` naming the field that is wrong."""
        from forebay.records import load

        return load(cls, text)


def _by_name(peaks: Mapping[Tier, int]) -> dict[str, int]:
    return {tier.value: nbytes for tier, nbytes in peaks.items()}


def _ratio(measured: float | None, predicted: float | None) -> float | None:
    return measured / predicted if measured is not None and predicted else None
