"""What is kept of one run over sets of buffers: one JSON file a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from benchmarks.archive import Archive
from benchmarks.provenance import Provenance

__all__ = ["ARCHIVE", "LIMIT", "SOON", "Comparison", "Fitted", "latest"]

LIMIT = 60.0
"""Seconds within which a layout is to be found."""

SOON = 1.0
"""Seconds within which most of them are to be found."""


@dataclass(frozen=True)
class Fitted:
    """What ``forebay layout --capacity`` came to for one set of buffers.

    ``style`` says how it was made. ``cpsat``: OR-Tools was there. ``found``: a layout within the capacity, which an
    independent checker has proven. ``solve_seconds`` are those of the search, ``seconds`` those of the whole process.
    """

    name: str
    style: str
    buffers: int
    cpsat: bool
    found: bool
    solve_seconds: float
    seconds: float

    @property
    def late(self) -> bool:
        """Whether it was not found, or not within ``LIMIT``."""
        return not self.found or self.solve_seconds > LIMIT


@final
@dataclass(frozen=True, kw_only=True)
class Comparison(Provenance):
    """One run."""

    rows: tuple[Fitted, ...]


ARCHIVE = Archive("fits-", Comparison)


def latest(comparisons: Sequence[Comparison]) -> tuple[Fitted, ...]:
    """The newest row of every set, with OR-Tools and without; ``comparisons`` are in order of their dates."""
    found = {(row.name, row.cpsat): row for comparison in comparisons for row in comparison.rows}
    return tuple(found.values())
