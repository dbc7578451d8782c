"""Runs the claims: plans are made and simulated, nothing is timed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.case import BenchmarkError
from benchmarks.papers.claims import CLAIMS
from benchmarks.papers.record import Comparison, Row
from benchmarks.provenance import provenance

__all__ = ["compare"]


def compare(names: Sequence[str], command: str, say: Callable[[str], None]) -> Comparison:
    """The claims called ``names`` (none: all); ``say`` gets a line about each. Raises ``BenchmarkError`` for a name
    that is not among them."""
    for name in names:
        if name not in CLAIMS:
            raise BenchmarkError(f"there is no claim {name}; there are {', '.join(CLAIMS)}")
    origin = provenance(command)
    rows: list[Row] = []
    for name in names or CLAIMS:
        rows.append(CLAIMS[name]())
        say(in_words(rows[-1]))
    return Comparison(**origin, rows=tuple(rows))


def in_words(row: Row) -> str:
    """A line about ``row``."""
    return f"{row.system}, {row.claim}: {row.paper}; ours {row.ours} ({'agrees' if row.agrees else 'differs'})"
