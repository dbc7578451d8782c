"""Policies side by side: the record, and the tables that ``forebay compare`` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.text import Text

from forebay.errors import ConfigError
from forebay.memory import Tier
from forebay.reporting.terminal import NONE, bullets, figure_table, size
from forebay.timeline import Lane
from forebay.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["LINKS", "Candidate", "comparison_tables"]

LINKS = (Lane.H2D, Lane.D2H, Lane.DISK_READ, Lane.DISK_WRITE)
"""Ways between tiers."""


@dataclass(frozen=True)
class Candidate:
    """One policy with one device budget (bytes), as predicted.

    ``step_seconds`` is None where it fits no plan within the budgets, and ``reason`` says then why, and what would fit.
    ``peaks`` are bytes of every tier in a step, ``moved`` bytes that cross each of ``LINKS`` in a step, ``exact``
    whether the numbers are those of plain PyTorch. ``solve_seconds`` is the time that the planner took.
    """

    policy: str
    budget: int
    solve_seconds: float
    step_seconds: float | None = None
    peaks: Mapping[Tier, int] = field(default_factory=dict)
    moved: Mapping[Lane, int] = field(default_factory=dict)
    exact: bool = True
    reason: str = ""

    def __post_init__(self) -> None:
        if (self.step_seconds is None) != bool(self.reason):
            raise ConfigError(f"policy {self.policy} either has a step or a reason why it has none")

    @property
    def feasible(self) -> bool:
        """Whether there is a plan within all budgets."""
        return self.step_seconds is not None

    def to_json_dict(self) -> dict[str, Any]:
        """The figures for ``--json``: bytes and seconds."""
        found = self.feasible
        return {
            "policy": self.policy,
            "budget": self.budget,
            "feasible": found,
            "step_seconds": self.step_seconds,
            "peaks": {tier.value: self.peaks.get(tier, 0) for tier in Tier} if found else None,
            "moved": {lane.value: self.moved.get(lane, 0) for lane in LINKS} if found else None,
            "exact": self.exact if found else None,
            "solve_seconds": self.solve_seconds,
            "reason": self.reason or None,
        }


def comparison_tables(title: str, candidates: Sequence[Candidate], notes: Sequence[str] = ()) -> Group:
    """For every budget two tables, the fastest policy first: seconds and peaks, bytes over each link; then why those
    that are missing in them do not fit."""
    parts: list[RenderableType] = [Text(title, style="bold")]
    for budget in dict.fromkeys(c.budget for c in candidates):
        asked = [c for c in candidates if c.budget == budget]
        fitting = sorted((c for c in asked if c.step_seconds is not None), key=lambda c: c.step_seconds or 0.0)
        if fitting:
            parts += [_peaks(budget, fitting), _moved(fitting)]
        missing = [c for c in asked if not c.feasible]
        if missing:
            parts.append(Text(f"Does not fit with {format_bytes(budget)} on the device", style="bold"))
            parts += bullets([f"{c.policy}: {c.reason}" for c in missing])
    return Group(*parts, *bullets(notes))


def _peaks(budget: int, fitting: Sequence[Candidate]) -> RenderableType:
    tiers = [Tier.DEVICE, Tier.HOST, Tier.DISK]
    title = f"{format_bytes(budget)} on the device: step and peaks"
    table = figure_table(title, "policy", ["step", "times", *(tier.value for tier in tiers)])
    best = fitting[0].step_seconds or 0.0
    for one in fitting:
        seconds = one.step_seconds or 0.0
        times = f"{seconds / best:.2f}" if best else NONE
        name = one.policy if one.exact else f"{one.policy} *"
        table.add_row(name, format_seconds(seconds), times, *(size(one.peaks.get(tier) or None) for tier in tiers))
    if all(one.exact for one in fitting):
        return table
    return Group(table, *bullets(["*: its numbers are not those of plain PyTorch"]))


def _moved(fitting: Sequence[Candidate]) -> RenderableType:
    table = figure_table("Bytes over each link in a step", "policy", [lane.value for lane in LINKS])
    for one in fitting:
        table.add_row(one.policy, *(size(one.moved.get(lane) or None) for lane in LINKS))
    return table
