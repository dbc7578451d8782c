"""The closing table of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

from forebay.memory import ArenaUsage, Tier
from forebay.reporting.terminal import NONE, bullets, figure_table, kinds_at_peak, rate_while_busy, size
from forebay.timeline import Lane
from forebay.units import format_apart, format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType

    from forebay.reporting.run import RunReport

__all__ = ["closing_table"]

LOOSE = 0.01
"""From this share of unused bytes on an arena is named in the report."""


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
        wear = (
            f"{report.disk_written / report.steps * 1000 / 1e12:.3g} TB in 1,000 steps" if report.steps else "no step"
        )
        lines.append(Text(f"written to disk: {format_bytes(report.disk_written)}, {wear}"))
    return lines


def _comparison(report: RunReport) -> list[RenderableType]:
    """Peaks of the tiers and the step: allowed, predicted, measured, and measured against predicted."""
    table = figure_table("Predicted and measured", "what", ("allowed", "predicted", "measured", "difference"))
    allowed: dict[Tier, int | None] = {usage.tier: usage.limit for usage in report.timeline.tiers}
    measured, predicted, ratios = report.measured_peaks(), report.predicted_peaks(), report.peak_ratios()
    used = [tier for tier in Tier if measured[tier] or predicted[tier] or allowed.get(tier)]
    for tier in used:
        limit = size(allowed[tier], none="no limit") if tier in allowed else NONE
        cells = (limit, size(predicted[tier]), size(measured[tier]), _difference(ratios[tier]))
        table.add_row(tier.value, *cells, end_section=tier is used[-1])
    seconds = (_seconds(report.predicted_step_seconds), _seconds(report.step_seconds))
    table.add_row("step", "", *seconds, _difference(report.step_ratio), style="bold")
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
    """What was taken from the machine and what of it was somebody's, for the tiers of which pieces were taken once."""
    taken_once = {arena.tier for arena in report.timeline.arenas}
    reserved, used, gaps = report.reserved(), report.in_use(), report.gaps()
    tiers = [tier for tier in Tier if tier in taken_once and tier in gaps]
    if not tiers:
        return []
    table = figure_table("Taken from the machine", "tier", ("reserved", "in use", "more"))
    for tier in tiers:
        table.add_row(tier.value, size(reserved[tier]), size(used[tier]), f"{gaps[tier]:.2%}")
    loose = [arena for arena in report.timeline.arenas if arena.used * (1 + LOOSE) < arena.nbytes]
    return [table, *bullets([_loose(arena) for arena in loose])]


def _loose(arena: ArenaUsage) -> str:
    room, used = format_apart(arena.nbytes, arena.used)
    return f"{arena.what} ({arena.tier.value}): {room}, of which {used} were in use at most"


def _lanes(report: RunReport) -> Table:
    seen = report.seen_seconds
    span = "the elapsed time" if seen == report.elapsed else f"the last {format_seconds(seen)}"
    table = figure_table(f"Lanes over {span}", "lane", ("busy", "moved", "rate while busy"))
    shares, moved, busy = report.busy_shares(), report.timeline.moved(), report.timeline.busy()
    for lane in Lane:
        if busy[lane] <= 0 and moved[lane] == 0:
            continue
        rate = rate_while_busy(moved[lane], busy[lane])
        table.add_row(lane.value, f"{100 * shares[lane]:.0f} %", size(moved[lane] or None), rate)
    return table


def _plan(report: RunReport) -> list[RenderableType]:
    plan = report.plan
    changes = plan.changes_numbers or ("none: forward and backward are those of plain PyTorch",)
    lines: list[RenderableType] = [Text(f"Plan by {plan.planner}", style="bold"), *bullets(plan.reasons)]
    return [*lines, Text("Changes of the numbers", style="bold"), *bullets(changes)]


def _seconds(seconds: float | None) -> str:
    return NONE if seconds is None else format_seconds(seconds)


def _difference(ratio: float | None) -> str:
    """How far what was measured is from what was predicted, in percent of the prediction."""
    if ratio is None:
        return NONE
    percent = 100 * (ratio - 1)
    if abs(percent) < 0.05:
        return "0.0 %"
    return f"{percent:+.1f} %" if abs(percent) < 10 else f"{percent:+.0f} %"
