"""The table of sets that fit in ``docs/layout.md``, from the newest figures of every set."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

from benchmarks.fits.record import ARCHIVE, LIMIT, SOON, Comparison, Fitted, latest
from benchmarks.host import ROOT
from benchmarks.provenance import in_words
from benchmarks.table import replace_between

__all__ = ["PLACE", "render", "write"]

PLACE = ROOT / "docs" / "layout.md"


def write(path: Path = PLACE) -> None:
    """Replaces the generated part of ``path``."""
    replace_between("fits", render(ARCHIVE.every()), path)


def render(comparisons: Sequence[Comparison]) -> str:
    """The newest rows as Markdown. ``comparisons`` are in order of their dates."""
    rows = latest(comparisons)
    if not rows:
        return "No comparison is kept yet.\n"
    styles = list(dict.fromkeys(row.style for row in rows))
    lines = ["| sets | buffers | without OR-Tools | with |\n", "|---|---:|---|---|\n"]
    for style in styles:
        own = [row for row in rows if row.style == style]
        counts = [row.buffers for row in own]
        cells = " | ".join(_cell([row for row in own if row.cpsat is cpsat]) for cpsat in (False, True))
        lines.append(f"| {style} | {min(counts)} to {max(counts)} | {cells} |\n")
    return "".join([*lines, "\n", *_missed(rows), "\n", *_runs(comparisons, rows)])


def _cell(rows: Sequence[Fitted]) -> str:
    if not rows:
        return ""
    found = [row.solve_seconds for row in rows if not row.late]
    share = f"{len(found)} of {len(rows)}"
    if not found:
        return share
    soon = sum(seconds <= SOON for seconds in found)
    return f"{share}, {soon} within {SOON:g} s; median {median(found):.2f}, longest {max(found):.2f} s"


def _missed(rows: Sequence[Fitted]) -> Iterator[str]:
    late = [f"{row.name}{' with OR-Tools' if row.cpsat else ''}" for row in rows if row.late]
    yield f"Not found in {LIMIT:g} s: {', '.join(late)}.\n" if late else f"All are found within {LIMIT:g} s.\n"


def _runs(comparisons: Sequence[Comparison], rows: Sequence[Fitted]) -> Iterator[str]:
    """The runs that the figures are of."""
    for one in comparisons:
        if any(row is kept for row in one.rows for kept in rows):
            yield in_words(one)
