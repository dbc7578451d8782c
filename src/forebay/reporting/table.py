"""The closing table of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

from forebay.reporting.rows import (
    ARENA_HEADER,
    ARENA_TITLE,
    BUDGET_HEADER,
    arena_rows,
    budget_rows,
    lane_rows,
    loose_arenas,
    wear,
)
from forebay.reporting.terminal import bullets, figure_table, kinds_at_peak
from forebay.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType

    from forebay.reporting.run import RunReport

__all__ = ["closing_table"]


def closing_table(report: RunReport, losses: Sequence[float] = (), skipped: int = 0) -> Group:
    """Everything a user wants to know after a run: speed, loss, what was predicted beside what was measured, memory by
    tier and kind, lanes, the plan's reasons. ``skipped`` steps had no update."""
    return Group(
        *_headline(report, losses, skipped),
        *_comparison(report),
        _memory(report),
        *_arenas(report),
        _lanes(report),
        *_plan(report),
    )


def _headline(report: RunReport, losses: Sequence[float], skipped: int) -> list[RenderableType]:
    steps = "1 step" if report.steps == 1 else f"{report.steps} steps"
    speed = [f"{steps} in {format_seconds(report.elapsed)}"]
    if report.step_seconds is not None:
        speed.append(f"{format_seconds(report.step_seconds)} per step (median)")
    if report.tokens_per_second is not None:
        speed.append(f"{format_count(report.tokens_per_second)} tokens/s")
    lines: list[RenderableType] = [Text(", ".join(speed))]
    if losses:
        lines.append(Text(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}"))
    if skipped:
        lines.append(Text(f"steps skipped because of a loss or gradients that were not finite: {skipped}"))
    if report.disk_written:
        worn = wear(report.disk_written, report.steps)
        lines.append(Text(f"written to disk: {format_bytes(report.disk_written)}, {worn}"))
    return lines


def _comparison(report: RunReport) -> list[RenderableType]:
    """Peaks of the tiers and the step: allowed, predicted, measured, and measured against predicted."""
    table = figure_table("Predicted and measured", BUDGET_HEADER[0], BUDGET_HEADER[1:])
    *tiers, step = budget_rows(report.plan, report)
    for row in tiers:
        table.add_row(*row, end_section=row is tiers[-1])
    table.add_row(*step, style="bold")
    return [table, *bullets(_about_the_step(report))]


def _about_the_step(report: RunReport) -> Sequence[str]:
    """Where the predicted seconds come from, and what a step is."""
    if report.plan.step_seconds is None:
        return ("no step was predicted: give prepare a batch, so that one can be simulated",)
    said = report.plan.notes or ("the plan does not say where its step seconds come from",)
    if report.micro_batches == 1:
        return said
    at_a_time = f", {report.together} of which pass the model together" if report.together > 1 else ""
    return (f"a step is {report.micro_batches} micro-batches{at_a_time}", *said)


def _memory(report: RunReport) -> Table:
    usages = [usage for usage in report.timeline.tiers if usage.peak > 0 or usage.limit != 0]
    return kinds_at_peak("Bytes at each tier's peak", usages)


def _arenas(report: RunReport) -> list[RenderableType]:
    rows = arena_rows(report)
    if not rows:
        return []
    table = figure_table(ARENA_TITLE, ARENA_HEADER[0], ARENA_HEADER[1:])
    for row in rows:
        table.add_row(*row)
    return [table, *bullets(loose_arenas(report))]


def _lanes(report: RunReport) -> Table:
    seen = report.seen_seconds
    span = "the elapsed time" if seen == report.elapsed else f"the last {format_seconds(seen)}"
    table = figure_table(f"Lanes over {span}", "lane", ("busy", "moved", "rate while busy"))
    for lane, cells in lane_rows(report.timeline.busy(), report.timeline.moved(), seen).items():
        table.add_row(lane.value, cells.share, cells.moved, cells.rate)
    return table


def _plan(report: RunReport) -> list[RenderableType]:
    plan = report.plan
    changes = plan.changes_numbers or ("none: forward and backward are those of plain PyTorch",)
    lines: list[RenderableType] = [Text(f"Plan by {plan.planner}", style="bold"), *bullets(plan.reasons)]
    return [*lines, Text("Changes of the numbers", style="bold"), *bullets(changes)]
