"""Every case there is. A file of cases holds a tuple ``CASES``; a new file is named here."""

from __future__ import annotations

from benchmarks.case import BenchmarkError, Case
from benchmarks.cases import card, resident, streamed

__all__ = ["CASES", "find"]

CASES: tuple[Case, ...] = (*resident.CASES, *streamed.CASES, *card.CASES)


def find(name: str) -> Case:
    """The case called ``name``. Raises ``BenchmarkError`` naming those that there are."""
    for case in CASES:
        if case.name == name:
            return case
    raise BenchmarkError(f"there is no case {name!r}; the cases are {', '.join(case.name for case in CASES)}")
