"""Policies side by side: the record, and the tables that ``forebay compare`` prints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.text import Text

from forebay.errors import ConfigError
from forebay.memory import Tier
from forebay.reporting.rows import NONE, size
from forebay.reporting.terminal import bullets, figure_table
from forebay.timeline import Lane
from forebay.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["LINKS", "Candidate", "Measured", "comparison_tables"]

LINKS = (Lane.H2D, Lane.D2H, Lane.DISK_READ, Lane.DISK_WRITE)
"""Ways between tiers."""

TIERS = (Tier.DEVICE, Tier.HOST, Tier.DISK)
"""The tiers whose peaks are printed."""

UNDER = "  measured"
"""Names the row of what was measured, below the one of what was predicted."""


@dataclass(frozen=True)
class Measured:
    """What a few steps under a policy's plan came to here.

    ``step_seconds`` is the median of ``steps`` steps after the warm-up, None where the run failed; ``reason`` says then
    why. ``peaks`` are bytes of every tier over the whole run, ``moved`` bytes that crossed each of ``LINKS`` in a step.
    ``losses`` are those of every step, and ``as_plain`` whether plain PyTorch has the same, bit for bit (None: it was
    not run).
    """

    steps: int = 0
    step_seconds: float | None = None
    peaks: Mapping[Tier, int] = field(default_factory=dict)
    moved: Mapping[Lane, int] = field(default_factory=dict)
    losses: tuple[float, ...] = ()
    as_plain: bool | None = None
    reason: str = ""

    def __post_init__(self) -> None:
        if (self.step_seconds is None) != bool(self.reason):
            raise ConfigError("a run either has the seconds of a step or a reason why it has none")

    @property
    def ran(self) -> bool:
        """Whether it ran to its end."""
        return self.step_seconds is not None

    def to_json_dict(self) -> dict[str, Any]:
        """The figures for ``--json``: bytes and seconds."""
        return {
            "steps": self.steps,
            "step_seconds": self.step_seconds,
            "peaks": _of_tiers(self.peaks) if self.ran else None,
            "moved": _of_links(self.moved) if self.ran else None,
            "losses": list(self.losses),
            "losses_as_plain": self.as_plain,
            "reason": self.reason or None,
        }


@dataclass(frozen=True)
class Candidate:
    """One policy with one device budget (bytes), as predicted, and as ``measured`` where it was run.

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
    measured: Measured | None = None

    def __post_init__(self) -> None:
        if (self.step_seconds is None) != bool(self.reason):
            raise ConfigError(f"policy {self.policy} either has a step or a reason why it has none")
        if self.measured is not None and not self.feasible:
            raise ConfigError(f"policy {self.policy} has no plan, so that nothing can have been measured of it")

    @property
    def feasible(self) -> bool:
        """Whether there is a plan within all budgets."""
        return self.step_seconds is not None

    @property
    def served(self) -> bool:
        """Whether there is a plan and, if it was to be run, it ran."""
        return self.feasible and (self.measured is None or self.measured.ran)

    @property
    def measured_seconds(self) -> float | None:
        """Seconds of a step as measured; None where none was."""
        return None if self.measured is None else self.measured.step_seconds

    def to_json_dict(self) -> dict[str, Any]:
        """The figures for ``--json``: bytes and seconds."""
        found = self.feasible
        return {
            "policy": self.policy,
            "budget": self.budget,
            "feasible": found,
            "step_seconds": self.step_seconds,
            "peaks": _of_tiers(self.peaks) if found else None,
            "moved": _of_links(self.moved) if found else None,
            "exact": self.exact if found else None,
            "solve_seconds": self.solve_seconds,
            "reason": self.reason or None,
            "measured": None if self.measured is None else self.measured.to_json_dict(),
        }


def _of_tiers(peaks: Mapping[Tier, int]) -> dict[str, int]:
    return {tier.value: peaks.get(tier, 0) for tier in Tier}


def _of_links(moved: Mapping[Lane, int]) -> dict[str, int]:
    return {lane.value: moved.get(lane, 0) for lane in LINKS}


def comparison_tables(title: str, candidates: Sequence[Candidate], notes: Sequence[str] = ()) -> Group:
    """For every budget two tables, the fastest policy first: seconds and peaks, bytes over each link, what was measured
    below what was predicted; then why those that are missing in them do not fit. What holds whatever the budget is said
    once, behind all."""
    parts: list[RenderableType] = [Text(title, style="bold")]
    never = _never(candidates)
    for budget in dict.fromkeys(c.budget for c in candidates):
        asked = [c for c in candidates if c.budget == budget]
        fitting = sorted((c for c in asked if c.step_seconds is not None), key=lambda c: c.step_seconds or 0.0)
        if fitting:
            parts += [_peaks(budget, fitting), _moved(fitting), *bullets(list(_remarks(fitting)))]
        missing = [c for c in asked if not c.feasible and c.policy not in never]
        if missing:
            parts.append(Text(f"Does not fit with {format_bytes(budget)} on the device", style="bold"))
            parts += bullets([f"{c.policy}: {c.reason}" for c in missing])
    if never:
        parts.append(Text("Fits none of these budgets", style="bold"))
        parts += bullets([f"{policy}: {reason}" for policy, reason in never.items()])
    return Group(*parts, *bullets(notes))


def _never(candidates: Sequence[Candidate]) -> dict[str, str]:
    """Policies that fit none of several budgets for one and the same reason, and that reason."""
    reasons: dict[str, list[str]] = {}
    for one in candidates:
        reasons.setdefault(one.policy, []).append(one.reason)
    return {policy: why[0] for policy, why in reasons.items() if len(why) > 1 and why[0] and len(set(why)) == 1}


def _peaks(budget: int, fitting: Sequence[Candidate]) -> RenderableType:
    """Seconds, how many times those of the fastest they are, and peaks; ``error``: measured over predicted, less 1."""
    some = any(one.measured is not None for one in fitting)
    columns = ["step", *(["error"] if some else []), "times", *(tier.value for tier in TIERS)]
    table = figure_table(f"{format_bytes(budget)} on the device: step and peaks", "policy", columns)
    best = min((one.step_seconds or 0.0 for one in fitting), default=0.0)
    fastest = min((one.measured_seconds for one in fitting if one.measured_seconds is not None), default=0.0)
    for one in fitting:
        name = one.policy if one.exact else f"{one.policy} *"
        seconds = one.step_seconds or 0.0
        table.add_row(name, format_seconds(seconds), *([""] if some else []), *_figures(seconds, best, one.peaks))
        found = one.measured
        if found is None:
            continue
        if found.step_seconds is None:
            table.add_row(UNDER, "failed", *[NONE] * (len(columns) - 1))
            continue
        error = f"{100 * (found.step_seconds / seconds - 1):+.0f} %" if seconds else NONE
        figures = _figures(found.step_seconds, fastest, found.peaks)
        table.add_row(UNDER, format_seconds(found.step_seconds), error, *figures)
    return table


def _figures(seconds: float, best: float, peaks: Mapping[Tier, int]) -> list[str]:
    times = f"{seconds / best:.2f}" if best else NONE
    return [times, *(size(peaks.get(tier) or None) for tier in TIERS)]


def _moved(fitting: Sequence[Candidate]) -> RenderableType:
    table = figure_table("Bytes over each link in a step", "policy", [lane.value for lane in LINKS])
    for one in fitting:
        table.add_row(one.policy, *(size(one.moved.get(lane) or None) for lane in LINKS))
        if one.measured is not None and one.measured.ran:
            table.add_row(UNDER, *(size(one.measured.moved.get(lane) or None) for lane in LINKS))
    return table


def _remarks(fitting: Sequence[Candidate]) -> Iterator[str]:
    """Whose numbers are those of plain PyTorch, as promised and as seen, and who did not run."""
    if not all(one.exact for one in fitting):
        yield "*: its numbers are not those of plain PyTorch"
    ran = [(one.policy, one.measured) for one in fitting if one.measured is not None and one.measured.ran]
    same = [policy for policy, found in ran if found.as_plain]
    other = [policy for policy, found in ran if found.as_plain is False]
    if same:
        steps = len(next(found.losses for _, found in ran))
        yield f"{steps} losses equal to plain PyTorch's, bit for bit: {', '.join(same)}"
    if other:
        yield f"losses that are not plain PyTorch's: {', '.join(other)}"
    for one in fitting:
        if one.measured is not None and one.measured.reason:
            yield f"{one.policy} did not run: {one.measured.reason}"
