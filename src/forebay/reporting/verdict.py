"""Whether forebay trains as plain PyTorch does: the record, and the table that ``forebay verify`` prints."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group
from rich.text import Text

from forebay.reporting.rows import NONE
from forebay.reporting.terminal import bullets, figure_table

__all__ = ["Check", "Verdict", "verdict_table"]


@dataclass(frozen=True)
class Check:
    """One kind of number that was computed twice, with forebay and in plain PyTorch; ``compared`` counts tensors.

    ``equal``: all of them are the same bits. ``worst_error`` is the largest difference of an element, as a share of the
    largest magnitude in plain PyTorch's tensor: 0 where all are equal, infinite where one is missing, has another shape
    or is not finite. ``where`` names the tensor that it was seen in. ``allowed`` is the share that the plan's promise
    leaves (0: the same bits; None: it promises nothing, and the error is only shown), ``kept`` whether each tensor kept
    the promise that was made for it.
    """

    name: str
    equal: bool = True
    kept: bool = True
    worst_error: float = 0.0
    allowed: float | None = 0.0
    where: str = ""
    compared: int = 0

    def to_json_dict(self) -> dict[str, Any]:
        """The object that ``--json`` prints; an error that is not finite is null, since JSON has no infinity."""
        return {
            "name": self.name,
            "equal": self.equal,
            "worst_error": self.worst_error if math.isfinite(self.worst_error) else None,
            "allowed": self.allowed,
            "kept": self.kept,
            "where": self.where or None,
            "compared": self.compared,
        }


@dataclass(frozen=True)
class Verdict:
    """What became of a model that was trained twice. ``title`` says which model and batch, ``policy`` whose plan it
    was, ``changes_numbers`` what the plan says of itself (``Plan.changes_numbers``), ``notes`` how it was done."""

    title: str
    policy: str
    checks: tuple[Check, ...]
    changes_numbers: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        """Whether every number is that of plain PyTorch, bit for bit."""
        return all(check.equal for check in self.checks)

    @property
    def kept(self) -> bool:
        """Whether every number is what the plan promises."""
        return all(check.kept for check in self.checks)

    @property
    def broken(self) -> tuple[str, ...]:
        """In words, each check whose promise was not kept."""
        return tuple(_broken(check) for check in self.checks if not check.kept)

    def to_json_dict(self) -> dict[str, Any]:
        """The object that ``--json`` prints."""
        return {
            "equal": self.equal,
            "kept": self.kept,
            "policy": self.policy,
            "checks": [check.to_json_dict() for check in self.checks],
            "changes_numbers": list(self.changes_numbers),
            "notes": list(self.notes),
        }


def verdict_table(verdict: Verdict) -> Group:
    """The checks, what the plan does to the numbers, and the answer."""
    table = figure_table("forebay against plain PyTorch", "check", ["tensors", "same bits", "worst error", "allowed"])
    for check in verdict.checks:
        cells = (str(check.compared), "yes" if check.equal else "no", _share(check.worst_error), _allowed(check))
        table.add_row(check.name, *cells, style=None if check.kept else "bold red")
    changes = [f"the numbers change: {words}" for words in verdict.changes_numbers]
    answer = Text(_answer(verdict), style="bold" if verdict.kept else "bold red")
    return Group(
        Text(verdict.title, style="bold"), table, *bullets([*changes, *verdict.notes, *verdict.broken]), answer
    )


def _answer(verdict: Verdict) -> str:
    if verdict.equal:
        return "Equal: every number is that of plain PyTorch, bit for bit."
    if verdict.kept:
        return "Not the same bits, and as near to plain PyTorch as the plan promises."
    return f"Not equal: {_many([c.name for c in verdict.checks if not c.kept])}."


def _many(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _broken(check: Check) -> str:
    off = "not of the same shape, missing or not finite" if math.isinf(check.worst_error) else _share(check.worst_error)
    if not check.worst_error:
        off = "other bits of the same value"
    return f"{check.name}: {off} ({check.where})"


def _share(error: float) -> str:
    return "0" if not error else f"{error:.1e}"


def _allowed(check: Check) -> str:
    if check.allowed is None:
        return NONE
    return "0" if not check.allowed else f"{check.allowed:.1e}"
