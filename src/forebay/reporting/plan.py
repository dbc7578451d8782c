"""The table that ``forebay plan`` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from forebay.memory import Tier
from forebay.reporting.rows import NONE, lane_rows, share_of, size, wear
from forebay.reporting.terminal import bullets, figure_table, kinds_at_peak
from forebay.timeline import CROSSING, Lane
from forebay.units import format_count, format_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType

    from forebay.reporting.forecast import AccumulationForecast, PlanReport, StepForecast

__all__ = ["plan_table"]

FULL = 0.75
"""A lane that is busy for less of a step than this share is not what the step waits for all the time."""

_MOVING = (
    Lane.H2D,
    Lane.D2H,
    Lane.UPDATE,
    Lane.DEVICE_UPDATE,
    Lane.STORAGE_UPDATE,
    Lane.DISK_READ,
    Lane.DISK_WRITE,
)


def plan_table(report: PlanReport) -> Group:
    """Everything a user wants to know before a run; where nothing fits, why, and what would."""
    if report.step is None:
        return Group(*_refusal(report))
    return Group(
        *_headline(report, report.step),
        _memory(report),
        _phases(report),
        _lanes(report.step),
        *([] if report.accumulation is None else [_several(report.accumulation)]),
        *_rest(report),
    )


def _headline(report: PlanReport, step: StepForecast) -> list[RenderableType]:
    exact = "exactly those of plain PyTorch"
    if report.plan is not None and report.plan.changes_numbers:
        exact = f"not those of plain PyTorch: {'; '.join(report.plan.changes_numbers)}"
    written = step.disk_written
    facts = {
        "step": f"{format_seconds(step.seconds)} ({format_seconds(step.low)} to {format_seconds(step.high)})",
        "tokens/s": format_count(step.tokens_per_second),
        "physical limit": f"{format_seconds(step.limit_seconds)}, {100 * step.limit_share:.0f} % of the step",
        "binding": _binding(step),
        "written to disk": wear(written, 1) if written else "nothing",
        "numbers": exact,
    }
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    for name, value in facts.items():
        grid.add_row(name, Text(value))
    return [Text(f"{report.model} fits on {report.machine} (policy {report.policy})", style="bold"), grid]


def _binding(step: StepForecast) -> str:
    busy = step.busy.get(step.binding, 0.0)
    waiting = "" if busy >= FULL * step.seconds else "; no lane is full, they take turns"
    return f"{step.binding.value} ({share_of(busy, step.seconds)} busy){waiting}"


def _memory(report: PlanReport) -> RenderableType:
    tiers = [usage for usage in report.tiers if usage.peak > 0 or usage.tier in (Tier.DEVICE, Tier.HOST)]
    table = kinds_at_peak("Bytes at each tier's peak in a step", tiers)
    second = [report.second_copies.get(usage.tier, 0) for usage in tiers]
    if any(second):
        table.add_row("second copies", *(size(nbytes or None) for nbytes in second))
    budgets = [report.budgets.get(usage.tier) for usage in tiers]
    table.add_row("budget", *(size(budget) for budget in budgets))
    table.add_row(
        "headroom",
        *(size(None if b is None else b - u.peak) for u, b in zip(tiers, budgets, strict=True)),
    )
    said = "temporary: what ops need for a moment"
    if any(usage.tier is Tier.PINNED for usage in tiers):
        said += "; pinned: the page-locked part of host"
    if any(second):
        said += "; second copies: that part of the peak which updates under backward take"
    return Group(table, _said(said))


def _phases(report: PlanReport) -> RenderableType:
    tiers = [tier for tier in Tier if tier is not Tier.PINNED]
    beside = any(peaks.beside for peaks in report.phases.values())
    names = [*(tier.value for tier in tiers), *(["beside, on host"] if beside else [])]
    table = figure_table("Peaks of the phases of a run", "phase", names)
    for name, peaks in report.phases.items():
        cells = [size(peaks.device), size(peaks.host), size(peaks.disk or None)]
        table.add_row(name, *cells, *([size(peaks.beside or None)] if beside else []))
    if not beside:
        return table
    said = "beside: host memory that bytes pass through for a moment and that no budget counts"
    return Group(table, _said(said))


def _said(words: str) -> Padding:
    """What the words of a table mean, below it."""
    return Padding(Text(words), (0, 0, 1, 2))


def _lanes(step: StepForecast) -> RenderableType:
    table = figure_table("Lanes in a step", "lane", ["busy", "share", "at least", "moved", "rate while busy"])
    rows = lane_rows(step.busy, step.moved, step.seconds)
    for lane in (Lane.COMPUTE, *_MOVING):
        if lane in rows:
            busy, share, *rest = rows[lane]
            least = format_seconds(step.limits[lane]) if lane in step.limits else NONE
            table.add_row(lane.value, busy, share, least, *rest)
    said = "h2d: host to device; d2h: back; update: on the host; at least: at full rate"
    return Group(table, _said(said))


def _several(forecast: AccumulationForecast) -> RenderableType:
    """A step of several micro-batches, and what crosses in it."""
    rows = {"together": (forecast.seconds, forecast.moved), "one by one": (forecast.loop_seconds, forecast.loop_moved)}
    lanes = [lane for lane in CROSSING if any(moved.get(lane) for _, moved in rows.values())]
    table = figure_table(
        f"A step of {forecast.micro_batches} micro-batches", "micro-batches", ["step", *(lane.value for lane in lanes)]
    )
    for name, (seconds, moved) in rows.items():
        table.add_row(name, format_seconds(seconds), *(size(moved.get(lane) or None) for lane in lanes))
    said = "together: forebay.accumulate; one by one: a loop, under a plan with all the room for one. All tables above "
    said += "are of a step of one"
    return Group(table, _said(said))


def _rest(report: PlanReport) -> list[RenderableType]:
    lines: list[RenderableType] = [Text("Why", style="bold"), *bullets([*report.reasons, *report.notes])]
    if report.alternatives:
        lines.extend([Text("Instead", style="bold"), *bullets([other.words for other in report.alternatives])])
    return lines


def _refusal(report: PlanReport) -> list[RenderableType]:
    lines: list[RenderableType] = [
        Text(f"{report.model} does not fit on {report.machine} (policy {report.policy})", style="bold"),
        *bullets([*report.reasons, *report.notes]),
    ]
    if report.alternatives:
        lines.extend([Text("What would fit", style="bold"), *bullets([other.words for other in report.alternatives])])
    return lines
