"""The closing table of a run: readable at 80 columns and without colour."""

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

    from forebay.reporting.run import RunReport

__all__ = ["closing_table"]

_NONE = "-"


def closing_table(report: RunReport, losses: Sequence[float] = ()) -> Group:
    """Everything a user wants to know after a run: speed, loss, what was predicted beside what was measured, memory by
    tier and kind, lanes, the plan's reasons."""
    return Group(*_headline(report, losses), *_comparison(report), _memory(report), _lanes(report), *_plan(report))


def _headline(report: RunReport, losses: Sequence[float]) -> list[RenderableType]:
    steps = "1 step" if report.steps == 1 else f"{report.steps} steps"
    speed = [f"{steps} in {format_seconds(report.elapsed)}"]
    if report.step_seconds is not None:
        speed.append(f"{format_seconds(report.step_seconds)} per step (median)")
    if report.tokens_per_second is not None:
        speed.append(f"{format_count(report.tokens_per_second)} tokens/s")
    lines: list[RenderableType] = [Text(", ".join(speed))]
    if losses:
        lines.append(Text(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}"))
    return lines


def _comparison(report: RunReport) -> list[RenderableType]:
    """Peaks of the tiers and the step: allowed, predicted, measured, and measured against predicted."""
    table = _table("Predicted and measured", "what", ("allowed", "predicted", "measured", "difference"))
    allowed: dict[Tier, int | None] = {usage.tier: usage.limit for usage in report.timeline.tiers}
    measured, predicted, ratios = report.measured_peaks(), report.predicted_peaks(), report.peak_ratios()
    used = [tier for tier in Tier if measured[tier] or predicted[tier] or allowed.get(tier)]
    for tier in used:
        limit = _bytes(allowed[tier], none="no limit") if tier in allowed else _NONE
        cells = (limit, _bytes(predicted[tier]), _bytes(measured[tier]), _difference(ratios[tier]))
        table.add_row(tier.value, *cells, end_section=tier is used[-1])
    seconds = (_seconds(report.predicted_step_seconds), _seconds(report.step_seconds))
    table.add_row("step", "", *seconds, _difference(report.step_ratio), style="bold")
    return [table, *_bullets(_about_the_step(report))]


def _about_the_step(report: RunReport) -> Sequence[str]:
    """Where the predicted seconds come from, and what a step is."""
    if report.plan.step_seconds is None:
        return ("no step was predicted: give prepare a batch, so that one can be simulated",)
    said = report.plan.notes or ("the plan does not say where its step seconds come from",)
    return said if report.micro_batches == 1 else (f"a step is {report.micro_batches} micro-batches", *said)


def _memory(report: RunReport) -> Table:
    usages = [usage for usage in report.timeline.tiers if usage.peak > 0 or usage.limit != 0]
    table = _table("Bytes at each tier's peak", "kind", [usage.tier.value for usage in usages])
    kinds = [kind for kind in Kind if any(usage.at_peak.get(kind, 0) for usage in usages)]
    for kind in kinds:
        cells = [_bytes(usage.at_peak.get(kind, 0) or None) for usage in usages]
        table.add_row(kind.value, *cells, end_section=kind is kinds[-1])
    table.add_row("peak", *(_bytes(usage.peak) for usage in usages), style="bold")
    return table


def _lanes(report: RunReport) -> Table:
    table = _table("Lanes over the elapsed time", "lane", ("busy", "moved", "rate while busy"))
    shares, moved, busy = report.busy_shares(), report.timeline.moved(), report.timeline.busy()
    for lane in Lane:
        if busy[lane] <= 0 and moved[lane] == 0:
            continue
        rate = format_rate(moved[lane] / busy[lane]) if moved[lane] and busy[lane] > 0 else _NONE
        table.add_row(lane.value, f"{100 * shares[lane]:.0f} %", _bytes(moved[lane] or None), rate)
    return table


def _plan(report: RunReport) -> list[RenderableType]:
    plan = report.plan
    changes = plan.changes_numbers or ("none: forward and backward are those of plain PyTorch",)
    lines: list[RenderableType] = [Text(f"Plan by {plan.planner}", style="bold"), *_bullets(plan.reasons)]
    return [*lines, Text("Changes of the numbers", style="bold"), *_bullets(changes)]


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


def _bytes(nbytes: int | None, none: str = _NONE) -> str:
    return none if nbytes is None else format_bytes(nbytes)


def _seconds(seconds: float | None) -> str:
    return _NONE if seconds is None else format_seconds(seconds)


def _difference(ratio: float | None) -> str:
    """How far what was measured is from what was predicted, in percent of the prediction."""
    if ratio is None:
        return _NONE
    percent = 100 * (ratio - 1)
    if abs(percent) < 0.05:
        return "0.0 %"
    return f"{percent:+.1f} %" if abs(percent) < 10 else f"{percent:+.0f} %"
