"""The table that ``forebay plan`` prints. It must read well at 80 columns and without colour."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from forebay.memory import Kind, Tier
from forebay.timeline import Lane
from forebay.units import format_bytes, format_count, format_rate, format_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType

    from forebay.reporting.forecast import PlanReport, StepForecast

__all__ = ["plan_table"]

_NONE = "-"
_MOVING = (Lane.H2D, Lane.D2H, Lane.UPDATE, Lane.DISK_READ, Lane.DISK_WRITE)


def plan_table(report: PlanReport) -> Group:
    """Everything a user wants to know before a run; where nothing fits, why, and what would."""
    if report.step is None:
        return Group(*_refusal(report))
    return Group(
        *_headline(report, report.step),
        _memory(report),
        _phases(report),
        _lanes(report.step),
        *_rest(report),
    )


def _headline(report: PlanReport, step: StepForecast) -> list[RenderableType]:
    exact = "exactly those of plain PyTorch"
    if report.plan is not None and report.plan.changes_numbers:
        exact = f"not those of plain PyTorch: {'; '.join(report.plan.changes_numbers)}"
    written = step.moved.get(Lane.DISK_WRITE, 0)
    facts = {
        "step": f"{format_seconds(step.seconds)} ({format_seconds(step.low)} to {format_seconds(step.high)})",
        "tokens/s": format_count(step.tokens_per_second),
        "physical limit": f"{format_seconds(step.limit_seconds)}, {100 * step.limit_share:.0f} % of the step",
        "binding": f"{step.binding.value} ({_percent(step.busy.get(step.binding, 0.0), step.seconds)} busy)",
        "written to disk": f"{written * 1000 / 1e12:.3g} TB in 1,000 steps" if written else "nothing",
        "numbers": exact,
    }
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    for name, value in facts.items():
        grid.add_row(name, Text(value))
    return [Text(f"{report.model} fits on {report.machine} (policy {report.policy})", style="bold"), grid]


def _memory(report: PlanReport) -> Table:
    tiers = [usage for usage in report.tiers if usage.peak > 0 or usage.tier in (Tier.DEVICE, Tier.HOST)]
    table = _table("Bytes at each tier's peak in a step", "kind", [usage.tier.value for usage in tiers])
    kinds = [kind for kind in Kind if any(usage.at_peak.get(kind, 0) for usage in tiers)]
    for kind in kinds:
        cells = [_bytes(usage.at_peak.get(kind, 0) or None) for usage in tiers]
        table.add_row(kind.value, *cells, end_section=kind is kinds[-1])
    budgets = [report.budgets.get(usage.tier) for usage in tiers]
    table.add_row("peak", *(_bytes(usage.peak) for usage in tiers), style="bold")
    table.add_row("budget", *(_bytes(budget) for budget in budgets))
    table.add_row(
        "headroom",
        *(_bytes(None if b is None else b - u.peak) for u, b in zip(tiers, budgets, strict=True)),
    )
    return table


def _phases(report: PlanReport) -> RenderableType:
    tiers = [tier for tier in Tier if tier is not Tier.PINNED]
    beside = any(peaks.beside for peaks in report.phases.values())
    names = [*(tier.value for tier in tiers), *(["beside, on host"] if beside else [])]
    table = _table("Peaks of the phases of a run", "phase", names)
    for name, peaks in report.phases.items():
        cells = [_bytes(peaks.device), _bytes(peaks.host), _bytes(peaks.disk or None)]
        table.add_row(name, *cells, *([_bytes(peaks.beside or None)] if beside else []))
    if not beside:
        return table
    said = "beside: host memory that bytes pass through for a moment and that no budget counts"
    return Group(table, Padding(Text(said), (0, 0, 1, 2)))


def _lanes(step: StepForecast) -> Table:
    table = _table("Lanes in a step", "lane", ["busy", "share", "at least", "moved", "rate while busy"])
    for lane in (Lane.COMPUTE, *_MOVING):
        busy, moved = step.busy.get(lane, 0.0), step.moved.get(lane, 0)
        if busy <= 0 and not moved:
            continue
        rate = format_rate(moved / busy) if moved and busy > 0 and lane is not Lane.COMPUTE else _NONE
        least = format_seconds(step.limits[lane]) if lane in step.limits else _NONE
        table.add_row(
            lane.value, format_seconds(busy), _percent(busy, step.seconds), least, _bytes(moved or None), rate
        )
    return table


def _rest(report: PlanReport) -> list[RenderableType]:
    lines: list[RenderableType] = [Text("Why", style="bold"), *_bullets([*report.reasons, *report.notes])]
    if report.alternatives:
        lines.extend([Text("Instead", style="bold"), *_bullets([other.words for other in report.alternatives])])
    return lines


def _refusal(report: PlanReport) -> list[RenderableType]:
    lines: list[RenderableType] = [
        Text(f"{report.model} does not fit on {report.machine} (policy {report.policy})", style="bold"),
        *_bullets([*report.reasons, *report.notes]),
    ]
    if report.alternatives:
        lines.extend([Text("What would fit", style="bold"), *_bullets([other.words for other in report.alternatives])])
    return lines


def _table(title: str, first: str, others: Sequence[str]) -> Table:
    table = Table(box=SIMPLE_HEAD, title=title, title_justify="left", title_style="bold")
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _bullets(sentences: Sequence[str]) -> list[RenderableType]:
    # The hanging indent keeps a wrapped sentence apart from the next one where there is no colour.
    rows = []
    for sentence in sentences:
        row = Table.grid(padding=(0, 1, 0, 0))
        row.add_row("-", Text(sentence))
        rows.append(Padding(row, (0, 0, 0, 2)))
    return [*rows]


def _bytes(nbytes: int | None) -> str:
    return _NONE if nbytes is None else format_bytes(nbytes)


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole > 0 else _NONE
