"""The closing table of a run: readable at 80 columns and without colour."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from forebay.memory import Kind
from forebay.timeline import Lane
from forebay.units import format_bytes, format_count, format_rate, format_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType

    from forebay.reporting.run import RunReport

__all__ = ["closing_table"]

_NONE = "-"


def closing_table(report: RunReport, losses: Sequence[float] = ()) -> Group:
    """Everything a user wants to know after a run: speed, loss, memory by tier and kind, lanes, the plan's reasons."""
    return Group(*_headline(report, losses), _memory(report), _lanes(report), *_plan(report))


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


def _memory(report: RunReport) -> Table:
    usages = [usage for usage in report.timeline.tiers if usage.peak > 0 or usage.limit != 0]
    tiers = [usage.tier for usage in usages]
    table = Table(box=SIMPLE_HEAD, title="Bytes at each tier's peak", title_justify="left", title_style="bold")
    table.add_column("kind", no_wrap=True)
    for tier in tiers:
        table.add_column(tier.value, justify="right", no_wrap=True)
    kinds = [kind for kind in Kind if any(usage.at_peak.get(kind, 0) for usage in usages)]
    at_peak = {usage.tier: usage.at_peak for usage in usages}
    for kind in kinds:
        cells = [_bytes(at_peak[tier].get(kind, 0) or None) for tier in tiers]
        table.add_row(kind.value, *cells, end_section=kind is kinds[-1])
    measured, predicted = report.measured_peaks(), report.predicted_peaks()
    limits = {usage.tier: usage.limit for usage in usages}
    table.add_row("measured peak", *(_bytes(measured[tier]) for tier in tiers), style="bold")
    table.add_row("predicted peak", *(_bytes(predicted[tier]) for tier in tiers))
    table.add_row("allowed", *(_bytes(limits[tier], none="no limit") for tier in tiers))
    return table


def _lanes(report: RunReport) -> Table:
    table = Table(box=SIMPLE_HEAD, title="Lanes over the elapsed time", title_justify="left", title_style="bold")
    table.add_column("lane", no_wrap=True)
    for name in ("busy", "moved", "rate while busy"):
        table.add_column(name, justify="right", no_wrap=True)
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
