"""Rows of words of what a run held, moved and was promised, which tables in a terminal and on a page have in common.
No torch, and nothing of how a table is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from forebay.memory import ArenaUsage, Kind, Tier, TierUsage
from forebay.plans import Plan
from forebay.reporting.run import RunReport
from forebay.timeline import Lane
from forebay.units import format_apart, format_bytes, format_rate, format_seconds

__all__ = [
    "ARENA_HEADER",
    "ARENA_TITLE",
    "BUDGET_HEADER",
    "NONE",
    "LaneCells",
    "arena_rows",
    "budget_rows",
    "difference",
    "kind_rows",
    "lane_rows",
    "limits",
    "loose_arenas",
    "share_of",
    "size",
    "wear",
]

Row = tuple[str, ...]
"""A name, and a cell for each column behind it."""

NONE: Final = "-"
"""In the place of a figure that there is not."""

LOOSE: Final = 0.01
"""From this share of unused bytes on an arena is named in the report."""

BUDGET_HEADER: Final = ("what", "allowed", "predicted", "measured", "difference")

ARENA_TITLE: Final = "Taken from the machine"

ARENA_HEADER: Final = ("tier", "reserved", "in use", "more")


class LaneCells(NamedTuple):
    """What is said of a lane: how long it was busy, for which share of the time, what it moved and how fast."""

    busy: str
    share: str
    moved: str
    rate: str


def size(nbytes: int | None, none: str = NONE) -> str:
    """``nbytes`` in words; ``none`` where there is no figure."""
    return none if nbytes is None else format_bytes(nbytes)


def share_of(part: float, whole: float) -> str:
    """``part`` of ``whole`` in percent."""
    return f"{100 * part / whole:.0f} %" if whole > 0 else NONE


def difference(ratio: float | None) -> str:
    """How far what was measured is from what was predicted, in percent of the prediction."""
    if ratio is None:
        return NONE
    percent = 100 * (ratio - 1)
    if abs(percent) < 0.05:
        return "0.0 %"
    return f"{percent:+.1f} %" if abs(percent) < 10 else f"{percent:+.0f} %"


def wear(written: int, steps: int) -> str:
    """What a disk wears by where ``written`` bytes go to it in so many ``steps``."""
    return f"{written / steps * 1000 / 1e12:.3g} TB in 1,000 steps" if steps else "no step"


def kind_rows(usages: Sequence[TierUsage]) -> list[Row]:
    """What each of ``usages`` held at its peak (bytes), a row a kind; the last row has the peaks."""
    kinds = [kind for kind in Kind if any(usage.at_peak.get(kind, 0) for usage in usages)]
    rows = [(kind.value, *(size(usage.at_peak.get(kind, 0) or None) for usage in usages)) for kind in kinds]
    return [*rows, ("peak", *(size(usage.peak) for usage in usages))]


def lane_rows(busy: Mapping[Lane, float], moved: Mapping[Lane, int], seconds: float) -> dict[Lane, LaneCells]:
    """Every lane that did anything in ``seconds``, of which it was ``busy`` so many, and ``moved`` so many bytes."""
    found = {}
    for lane in Lane:
        # What compute touches is no traffic.
        length, nbytes = busy.get(lane, 0.0), 0 if lane is Lane.COMPUTE else moved.get(lane, 0)
        if length > 0 or nbytes:
            rate = format_rate(nbytes / length) if nbytes and length > 0 else NONE
            found[lane] = LaneCells(format_seconds(length), share_of(length, seconds), size(nbytes or None), rate)
    return found


def limits(plan: Plan, report: RunReport | None) -> dict[Tier, int | None]:
    """Bytes allowed of each tier, as far as it is known; None: no limit."""
    budget = plan.budget
    disk = None if budget.disk is None else budget.disk.nbytes
    given = {Tier.DEVICE: budget.device, Tier.HOST: budget.host, Tier.PINNED: budget.pinned, Tier.DISK: disk}
    found: dict[Tier, int | None] = {tier: nbytes for tier, nbytes in given.items() if nbytes is not None}
    if report is not None:
        found |= {usage.tier: usage.limit for usage in report.timeline.tiers}
    return found


def budget_rows(plan: Plan, report: RunReport | None) -> list[Row]:
    """Under ``BUDGET_HEADER`` the peak of every tier that is used or limited, and, in the last row, the seconds of a
    step. Without a ``report`` nothing was measured."""
    allowed = limits(plan, report)
    predicted = plan.peaks() if report is None else report.predicted_peaks()
    measured = {} if report is None else report.measured_peaks()
    ratios = {} if report is None else report.peak_ratios()
    rows: list[Row] = []
    for tier in Tier:
        if predicted[tier] or measured.get(tier) or allowed.get(tier):
            limit = size(allowed[tier], none="no limit") if tier in allowed else NONE
            cells = size(predicted[tier]), size(measured.get(tier)), difference(ratios.get(tier))
            rows.append((tier.value, limit, *cells))
    if report is None:
        seconds = _seconds(plan.step_seconds), NONE, NONE
    else:
        seconds = (
            _seconds(report.predicted_step_seconds),
            _seconds(report.step_seconds),
            difference(report.step_ratio),
        )
    return [*rows, ("step", "", *seconds)]


def arena_rows(report: RunReport) -> list[Row]:
    """Under ``ARENA_HEADER`` what was taken from the machine and what of it was somebody's, of the tiers of which
    pieces were taken once."""
    taken_once = {arena.tier for arena in report.timeline.arenas}
    reserved, used, gaps = report.reserved(), report.in_use(), report.gaps()
    tiers = [tier for tier in Tier if tier in taken_once and tier in gaps]
    return [(tier.value, size(reserved[tier]), size(used[tier]), f"{gaps[tier]:.2%}") for tier in tiers]


def loose_arenas(report: RunReport) -> tuple[str, ...]:
    """A sentence on each arena that was not filled."""
    return tuple(_loose(arena) for arena in report.timeline.arenas if arena.used * (1 + LOOSE) < arena.nbytes)


def _loose(arena: ArenaUsage) -> str:
    room, used = format_apart(arena.nbytes, arena.used)
    return f"{arena.what} ({arena.tier.value}): {room}, of which {used} were in use at most"


def _seconds(seconds: float | None) -> str:
    return NONE if seconds is None else format_seconds(seconds)
