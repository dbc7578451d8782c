"""How faults are said. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from forebay.errors import PlanInvalid
from forebay.program import Program

__all__ = ["fault", "listed"]


def fault(program: Program, action: int, subject: str, text: str) -> PlanInvalid:
    """The error for what is wrong at ``action`` (below 0: with the program as a whole)."""
    if action < 0:
        return PlanInvalid(text, action=action, subject=subject)
    what = program.actions[action].what if action < len(program.actions) else "the end of the program"
    return PlanInvalid(f"action {action} ({what}): {text}", action=action, subject=subject)


def listed(names: Sequence[str], most: int = 3) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
