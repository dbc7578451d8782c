"""The table of papers in ``benchmarks/README.md`` and ``docs/policies.md``, from the newest row of every claim."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.host import ROOT
from benchmarks.papers.record import ARCHIVE, Comparison, latest
from benchmarks.table import README, replace_between

__all__ = ["PLACES", "render", "write"]

PLACES = (README, ROOT / "docs" / "policies.md")

_HEAD = "| system | claim | paper | ours, simulated | order or size |\n|---|---|---|---|---|\n"


def write(paths: Sequence[Path] = PLACES) -> None:
    """Replaces the generated part of each file."""
    text = render(ARCHIVE.every())
    for path in paths:
        replace_between("papers", text, path)


def render(comparisons: Sequence[Comparison]) -> str:
    """The newest row of all claims as Markdown. ``comparisons`` are in order of their dates."""
    rows = latest(comparisons)
    if not rows:
        return "No comparison is kept yet.\n"
    lines = [
        f"| {row.system} | {row.claim} | {row.paper} | {row.ours} | {'agrees' if row.agrees else '**differs**'} |\n"
        for row in rows
    ]
    why = [f"- {row.system}, {row.claim}: {row.why}.\n" for row in rows if row.why]
    runs = dict.fromkeys(_run(one) for one in comparisons if any(row in rows for row in one.rows))
    return "".join([_HEAD, *lines, "\n", *why, "\n", *runs])


def _run(one: Comparison) -> str:
    """The run that rows of the table are of."""
    changed = ", changed since" if one.code.dirty else ""
    made = f"forebay {one.versions.get('forebay', '')}; commit {one.code.revision[:12]}{changed}"
    return f"- `{one.command}`: {made}; {one.date:%Y-%m-%d %H:%M} UTC\n"
