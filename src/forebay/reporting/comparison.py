"""Policies side by side on one device: the record, and the tables that ``forebay compare`` prints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

from rich.console import Group

from forebay.errors import ConfigError
from forebay.memory import Tier
from forebay.reporting.rows import NONE, size
from forebay.reporting.side_by_side import Answer, moved_table, tables_by_budget, times
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

    ``step_seconds`` is that of ``steps`` steps after the warm-up (``timeline.typical_seconds``), None where the run
    failed; ``reason`` says then why. ``peaks`` are bytes of every tier over the whole run, ``moved`` bytes that crossed
    each of ``LINKS`` in a step.
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


@final
@dataclass(frozen=True)
class Candidate(Answer):
    """One policy with one device budget (bytes), as predicted, and as ``measured`` where it was run.

    ``peaks`` are bytes of every tier in a step, ``moved`` bytes that cross each of ``LINKS`` in a step, ``exact``
    whether the numbers are those of plain PyTorch.
    """

    step_seconds: float | None = None
    peaks: Mapping[Tier, int] = field(default_factory=dict)
    moved: Mapping[Lane, int] = field(default_factory=dict)
    exact: bool = True
    measured: Measured | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.measured is not None and not self.feasible:
            raise ConfigError(f"policy {self.policy} has no plan, so that nothing can have been measured of it")

    @property
    def seconds(self) -> float | None:
        """Of a step as predicted; None where there is no plan within all budgets."""
        return self.step_seconds

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
    below what was predicted; then why those that are missing in them do not fit."""
    return tables_by_budget(title, candidates, notes, _tables)


def _tables(budget: int, fitting: Sequence[Candidate]) -> list[RenderableType]:
    moved = moved_table("Bytes over each link in a step", LINKS, _moved(fitting))
    return [_peaks(budget, fitting), moved, *bullets(list(_remarks(fitting)))]


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
    return [times(seconds, best), *(size(peaks.get(tier) or None) for tier in TIERS)]


def _moved(fitting: Sequence[Candidate]) -> Iterator[tuple[str, Mapping[Lane, int]]]:
    for one in fitting:
        yield one.policy, one.moved
        if one.measured is not None and one.measured.ran:
            yield UNDER, one.measured.moved


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
