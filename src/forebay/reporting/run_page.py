"""``forebay report``: what a run was promised, what it did and what it learned, as one page that needs no network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from forebay.memory import Tier, TierUsage
from forebay.plans import Plan
from forebay.reporting.cautions import cautions
from forebay.reporting.chart_data import lane_data, loss_data, memory_data
from forebay.reporting.dtypes import DtypeEntry
from forebay.reporting.losses import StepLine
from forebay.reporting.markup import Fact, bullet_list, chart, facts, folded, page, section, table
from forebay.reporting.plan_rows import PLAN_HEADER, plan_rows
from forebay.reporting.rows import (
    ARENA_HEADER,
    ARENA_TITLE,
    BUDGET_HEADER,
    NONE,
    LaneCells,
    arena_rows,
    budget_rows,
    difference,
    kind_rows,
    lane_rows,
    limits,
    loose_arenas,
    share_of,
    wear,
)
from forebay.reporting.run import RunReport
from forebay.reporting.steps import Step, last_step, seen_step, typical_step
from forebay.timeline import Lane, Level, Timeline
from forebay.units import format_bytes, format_count, format_seconds

__all__ = ["RunPage", "render"]


@dataclass(frozen=True)
class RunPage:
    """All that the page of a run shows.

    ``report`` is what was measured (None: nothing was left). ``forecast`` is the simulated timeline of steps of
    ``forecast_micro_batches`` micro-batches, ``blocks`` the bytes of the parameters of every block, ``dtypes`` the
    dtype ledger: None or empty where the model could not be looked at again, and ``notes`` then say why. ``losses`` are
    those of the whole run, which was to take ``steps`` steps of ``tokens_per_step`` tokens.
    """

    title: str
    plan: Plan
    report: RunReport | None = None
    forecast: Timeline | None = None
    forecast_micro_batches: int = 1
    blocks: Mapping[str, int] = field(default_factory=dict)
    dtypes: tuple[DtypeEntry, ...] = ()
    losses: tuple[StepLine, ...] = ()
    steps: int | None = None
    tokens_per_step: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def cautions(self) -> tuple[str, ...]:
        """What a reader should know first."""
        return cautions(self.report, self.losses, self.steps)

    def predicted_step(self) -> Step | None:
        """The step as it was simulated."""
        return None if self.forecast is None else last_step(self.forecast)

    def measured_step(self) -> Step | None:
        """A step as it was measured, for its lanes."""
        return None if self.report is None else typical_step(self.report.timeline)

    def data(self) -> dict[str, Any]:
        """What the charts draw; of a chart that there is nothing for, nothing."""
        found: dict[str, Any] = {}
        if self.losses:
            found["losses"] = loss_data(self.losses, self.tokens_per_step, self._predicted_speed())
        memory = memory_data(*self._predicted_levels(), self.seen(), self.limits())
        if memory["tiers"]:
            found["memory"] = memory
        predicted, measured = self.predicted_step(), self.measured_step()
        if predicted is not None or measured is not None:
            found["lanes"] = lane_data(predicted, measured)
        return found

    def _predicted_speed(self) -> float | None:
        report = self.report
        seconds = self.plan.step_seconds if report is None else report.predicted_step_seconds
        return self.tokens_per_step / seconds if self.tokens_per_step and seconds else None

    def seen(self) -> Step | None:
        """A step as it was measured, for its memory."""
        return None if self.report is None else seen_step(self.report.timeline)

    def _predicted_levels(self) -> tuple[Mapping[Tier, Sequence[Level]], float]:
        """Of the device those that were simulated, of the other tiers what stands all the time; and the seconds."""
        step = self.predicted_step()
        if self.forecast is None or step is None:
            return {}, 0.0
        found: dict[Tier, Sequence[Level]] = dict(step.levels)
        for usage in self.forecast.tiers:
            if usage.tier is not Tier.DEVICE and usage.peak:
                found[usage.tier] = [Level(0.0, usage.tier, usage.at_peak, usage.peak)]
        return found, step.seconds

    def limits(self) -> dict[Tier, int | None]:
        """Bytes allowed of each tier, as far as it is known; None: no limit."""
        return limits(self.plan, self.report)


def render(shown: RunPage) -> str:
    """The page as HTML."""
    data = shown.data()
    parts = [
        f"<h1>{escape(shown.title)}</h1>",
        f'<p class="soft">{escape(_subtitle(shown))}</p>',
        facts(_facts(shown)),
    ]
    if shown.cautions:
        parts.append(f'<div class="cautions" role="note"><h2>To know</h2>{bullet_list(shown.cautions)}</div>')
    if "losses" in data:
        parts.append(_learning(data["losses"]))
    if "memory" in data:
        parts.append(_memory(shown))
    if "lanes" in data:
        parts.append(_lanes(shown, data["lanes"]))
    parts += [_budget(shown), _plan(shown), *_dtypes(shown), _about(shown)]
    return page(shown.title, "\n".join(parts), data, ("memory.js", "lanes.js", "run.js"))


def _subtitle(shown: RunPage) -> str:
    said = f"Plan by {shown.plan.planner}"
    if shown.report is not None and shown.report.micro_batches > 1:
        together = f", {shown.report.together} at a time" if shown.report.together > 1 else ""
        said += f"; a step is {shown.report.micro_batches} micro-batches{together}"
    exact = "numbers as in plain PyTorch" if not shown.plan.changes_numbers else "other numbers than plain PyTorch"
    return f"{said}; {exact}"


def _facts(shown: RunPage) -> Iterator[Fact]:
    report, known = shown.report, [line.loss for line in shown.losses if line.loss is not None]
    if known:
        yield Fact("loss", f"{known[-1]:.4f}", f"from {known[0]:.4f} in {len(shown.losses)} steps")
    predicted = shown.plan.step_seconds if report is None else report.predicted_step_seconds
    if report is not None and report.step_seconds is not None:
        said = "not predicted" if predicted is None else f"{format_seconds(predicted)} predicted"
        yield Fact("step (median)", format_seconds(report.step_seconds), said + _off(report))
    elif predicted is not None:
        yield Fact("step, predicted", format_seconds(predicted))
    if report is not None and report.tokens_per_second is not None:
        yield Fact(
            "speed", f"{format_count(report.tokens_per_second)} tokens/s", f"{format_seconds(report.elapsed)} in all"
        )
    peaks = shown.plan.peaks() if report is None else report.measured_peaks()
    limit = shown.plan.budget.device
    yield Fact("device peak", format_bytes(peaks[Tier.DEVICE]), f"of {format_bytes(limit)} allowed")
    for tier in (Tier.HOST, Tier.DISK):
        if peaks[tier]:
            yield Fact(f"{tier.value} peak", format_bytes(peaks[tier]))
    if report is not None and report.disk_written:
        yield Fact("written to disk", format_bytes(report.disk_written), wear(report.disk_written, report.steps))
    binding = _binding(shown)
    if binding is not None:
        yield binding


def _binding(shown: RunPage) -> Fact | None:
    step, how = shown.measured_step(), "measured"
    if step is None:
        step, how = shown.predicted_step(), "predicted"
    if step is None or not step.seconds:
        return None
    busy = {lane: seconds for lane, seconds in step.busy().items() if lane is not Lane.STALL}
    lane = max(busy, key=lambda lane: busy[lane])
    return Fact("what binds", lane.value, f"{share_of(busy[lane], step.seconds)} of a step, {how}")


def _off(report: RunReport) -> str:
    return "" if report.step_ratio is None else f" ({difference(report.step_ratio)})"


def _learning(losses: Mapping[str, Any]) -> str:
    each = f" Each point is the mean of {losses['mean_of']} steps." if losses["mean_of"] > 1 else ""
    charts = [chart("loss", f"Loss of each step.{each}")]
    if any(value is not None for value in losses["speed"]):
        charts.append(chart("speed", f"Tokens per second of each step, saves and all else in between included.{each}"))
    return section("Loss and speed", f'<div class="pair">{"".join(charts)}</div>')


def _memory(shown: RunPage) -> str:
    seen = shown.seen()
    said = "The line is the most that was held between two moments; dashes are the budget."
    if seen is not None:
        said += f" Measured: step {seen.number + 1} of this process, where compute goes from block to block."
    return section("Memory over a step", chart("memory", said), *_kinds(shown))


def _kinds(shown: RunPage) -> Iterator[str]:
    """What every tier held at its peak, as predicted and as measured."""
    sides: list[tuple[str, Sequence[TierUsage]]] = []
    if shown.forecast is not None:
        sides.append(("predicted", shown.forecast.tiers))
    if shown.report is not None:
        sides.append(("measured", shown.report.timeline.tiers))
    columns = [(tier, side, usage) for tier in Tier for side, all_of in sides for usage in all_of if usage.tier is tier]
    columns = [column for column in columns if column[2].peak]
    header = ("kind", *(f"{tier.value}, {side}" for tier, side, _ in columns))
    if columns:
        yield table("Bytes at each tier's peak", header, kind_rows([usage for _, _, usage in columns]))


def _lanes(shown: RunPage, lanes: Mapping[str, Any]) -> str:
    said = "Of each lane what was predicted (pale) above what was measured."
    if lanes["measured"] is not None:
        said += f" Measured: step {lanes['measured']['number']} of this process."
    report = shown.report
    if report is not None and lanes["predicted"] is not None and shown.forecast_micro_batches != report.micro_batches:
        said += f" Predicted is one micro-batch of {report.micro_batches}."
    steps = {"predicted": shown.predicted_step(), "measured": shown.measured_step()}
    known = {
        name: lane_rows(step.busy(), step.moved(), step.seconds) for name, step in steps.items() if step is not None
    }
    header = ["lane"]
    for name in known:
        header += [f"busy, {name}", "share", "moved", "rate while busy"]
    nothing = LaneCells(NONE, NONE, NONE, NONE)
    rows = [
        (lane.value, *(cell for found in known.values() for cell in found.get(lane, nothing)))
        for lane in Lane
        if any(lane in found for found in known.values())
    ]
    return section("Lanes over a step", chart("lanes", said), table("Lanes in these steps", header, rows))


def _budget(shown: RunPage) -> str:
    said = "Predicted: the most that the plan takes, whatever waits for what"
    parts = [table(said, BUDGET_HEADER, budget_rows(shown.plan, shown.report))]
    if shown.report is not None and (rows := arena_rows(shown.report)):
        parts.append(table(ARENA_TITLE, ARENA_HEADER, rows))
        if loose := loose_arenas(shown.report):
            parts.append(bullet_list(loose))
    return section("Budget", *parts)


def _plan(shown: RunPage) -> str:
    plan = shown.plan
    changes = plan.changes_numbers or ("none: forward and backward are those of plain PyTorch",)
    return section(
        "Plan",
        table("Where every block is at home", PLAN_HEADER, plan_rows(plan, shown.blocks), words=True),
        f"<p>Why</p>{bullet_list((*plan.reasons, *plan.notes))}" if plan.reasons or plan.notes else "",
        f"<p>Changes of the numbers</p>{bullet_list(changes)}",
    )


def _dtypes(shown: RunPage) -> Iterator[str]:
    if shown.dtypes:
        rows = [(one.what, one.dtype, one.tier.value, format_bytes(one.nbytes)) for one in shown.dtypes]
        said = "Saved for backward: as it is made; the plan may run it again or move it"
        yield section("Dtype ledger", table(said, ("what", "dtype", "at home on", "bytes"), rows, words=True))


def _about(shown: RunPage) -> str:
    parts = [bullet_list(shown.notes)] if shown.notes else []
    if shown.settings:
        rows = [(name, _words(value)) for name, value in shown.settings.items()]
        parts.append(folded("Settings", table("Settings of the run", ("setting", "value"), rows, words=True)))
    if shown.report is not None and shown.report.timeline.counters:
        rows = [(name, str(count)) for name, count in shown.report.timeline.counters.items()]
        parts.append(folded("Counters", table("What was counted", ("counter", "count"), rows)))
    return section("About this run", *parts) if parts else ""


def _words(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
