"""What somebody who reads the report of a run should know first: where it was not as it should be. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from forebay.memory import Tier
from forebay.reporting.losses import StepLine
from forebay.reporting.run import RunReport
from forebay.timeline import Lane
from forebay.units import format_apart, format_bytes, format_seconds

__all__ = ["cautions"]

FAR = 0.25
"""A step is worth a word that took so much longer, or less long, than was predicted, as a share of the prediction."""

WAITING = 0.2
"""And one of which compute waits for other lanes for such a share."""


def cautions(report: RunReport | None, losses: Sequence[StepLine], steps: int | None = None) -> tuple[str, ...]:
    """In words, of a run that was to take ``steps`` steps (None: nobody said)."""
    found = [*_of_losses(losses, steps)]
    if report is None:
        return (*found, "the run has left no report.json: it was killed, or trains still")
    return (*found, *_of_numbers(report), *_of_memory(report), *_of_speed(report), *_of_order(report))


def _of_losses(losses: Sequence[StepLine], steps: int | None) -> Iterator[str]:
    if steps is not None and len(losses) < steps:
        yield f"the run has taken {len(losses)} of {steps} steps"
    skipped = [line.step for line in losses if line.skipped]
    if skipped:
        yield f"{_steps(skipped)} had no update: a loss or gradients that were not finite"
    odd = [line.step for line in losses if line.loss is None]
    if odd and not skipped:
        yield f"{_steps(odd)} had a loss that was not finite"


def _of_numbers(report: RunReport) -> Iterator[str]:
    for change in report.plan.changes_numbers:
        yield f"the numbers are not those of plain PyTorch: {change}"


def _of_memory(report: RunReport) -> Iterator[str]:
    measured, promised = report.measured_peaks(), report.predicted_peaks()
    for tier in Tier:
        of_the_loop = report.plan.budget.reserve(tier)
        if promised[tier] and measured[tier] > promised[tier] + of_the_loop:
            over, said = format_apart(measured[tier], promised[tier])
            beside = f" beside the loop's {format_bytes(of_the_loop)}" if of_the_loop else ""
            yield f"{tier.value}: the peak was {over}, and the plan had promised {said}{beside}"


def _of_speed(report: RunReport) -> Iterator[str]:
    ratio = report.step_ratio
    if ratio is not None and abs(ratio - 1) > FAR and report.step_seconds and report.predicted_step_seconds:
        took, said = format_seconds(report.step_seconds), format_seconds(report.predicted_step_seconds)
        yield f"a step took {took}, and {said} were predicted: run forebay doctor while nothing else runs here"
    waited = report.busy_shares()[Lane.STALL]
    if waited > WAITING:
        yield f"compute waited for other lanes {100 * waited:.0f} % of the time: see which of them is full"


def _of_order(report: RunReport) -> Iterator[str]:
    counters = report.timeline.counters
    deviations = counters.get("deviations from the recorded order", 0)
    if deviations:
        yield f"blocks came in another order than in the first step, {_times(deviations)}: they were fetched when asked"
    redone = counters.get("redone", 0)
    if redone:
        yield f"updates ahead of their step were made again, {_times(redone)}: something changed before the step"


def _steps(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"step {numbers[0]}"
    named = ", ".join(str(number) for number in numbers[:5])
    return f"{len(numbers)} steps ({named}{', ...' if len(numbers) > 5 else ''})"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
