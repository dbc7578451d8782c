"""Policies side by side: what records of their answers have in common, and the order of the tables about them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from rich.console import Group
from rich.text import Text

from forebay.errors import ConfigError
from forebay.reporting.rows import NONE, size
from forebay.reporting.terminal import bullets, figure_table
from forebay.timeline import Lane
from forebay.units import format_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["Answer", "Comparison", "fastest_first", "moved_table", "tables_by_budget", "times"]


@dataclass(frozen=True)
class Answer(ABC):
    """What one policy answers to one budget of a device (bytes): a step, or the ``reason`` why there is none, and what
    would fit. ``solve_seconds`` is the time that it took to say so."""

    policy: str
    budget: int
    solve_seconds: float
    reason: str = field(default="", kw_only=True)

    def __post_init__(self) -> None:
        if self.feasible == bool(self.reason):
            raise ConfigError(f"policy {self.policy} either has a step or a reason why it has none")

    @property
    def feasible(self) -> bool:
        """Whether there is a plan within all budgets."""
        return self.seconds is not None

    @property
    @abstractmethod
    def seconds(self) -> float | None:
        """Of a step as predicted; None without a plan."""

    @abstractmethod
    def to_json_dict(self) -> dict[str, Any]:
        """The figures for ``--json``: bytes and seconds."""


A = TypeVar("A", bound=Answer)


@dataclass(frozen=True)
class Comparison(Generic[A]):
    """Answers of policies; ``title`` says of which model and machine, ``notes`` how the figures came about."""

    title: str
    candidates: tuple[A, ...]
    notes: tuple[str, ...] = ()


def fastest_first(candidates: Iterable[A]) -> list[A]:
    """Those of ``candidates`` that have a plan."""
    return sorted((one for one in candidates if one.feasible), key=lambda one: one.seconds or 0.0)


def tables_by_budget(
    title: str,
    candidates: Sequence[A],
    notes: Sequence[str],
    tables: Callable[[int, Sequence[A]], Iterable[RenderableType]],
) -> Group:
    """For every budget the ``tables`` about the policies that fit, the fastest first; then why the others do not. What
    holds whatever the budget is said once, behind all."""
    parts: list[RenderableType] = [Text(title, style="bold")]
    never = _never(candidates)
    for budget in dict.fromkeys(one.budget for one in candidates):
        asked = [one for one in candidates if one.budget == budget]
        fitting = fastest_first(asked)
        if fitting:
            parts += tables(budget, fitting)
        missing = [one for one in asked if not one.feasible and one.policy not in never]
        if missing:
            parts.append(Text(f"Does not fit with {format_bytes(budget)} on the device", style="bold"))
            parts += bullets([f"{one.policy}: {one.reason}" for one in missing])
    if never:
        parts.append(Text("Fits none of these budgets", style="bold"))
        parts += bullets([f"{policy}: {reason}" for policy, reason in never.items()])
    return Group(*parts, *bullets(notes))


def _never(candidates: Sequence[Answer]) -> dict[str, str]:
    """Policies that fit none of several budgets for one and the same reason, and that reason."""
    reasons: dict[str, list[str]] = {}
    for one in candidates:
        reasons.setdefault(one.policy, []).append(one.reason)
    return {policy: why[0] for policy, why in reasons.items() if len(why) > 1 and why[0] and len(set(why)) == 1}


def times(seconds: float, fastest: float) -> str:
    """How many times ``fastest`` so many ``seconds`` are."""
    return f"{seconds / fastest:.2f}" if fastest else NONE


def moved_table(title: str, lanes: Sequence[Lane], rows: Iterable[tuple[str, Mapping[Lane, int]]]) -> RenderableType:
    """Bytes over each of ``lanes``, a row for each name."""
    table = figure_table(title, "policy", [lane.value for lane in lanes])
    for name, moved in rows:
        table.add_row(name, *(size(moved.get(lane) or None) for lane in lanes))
    return table
