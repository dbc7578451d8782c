"""The tables of steps in ``docs/fragmentation.md`` and ``docs/layout.md``, from the newest figures of every model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.host import ROOT
from benchmarks.provenance import in_words
from benchmarks.table import replace_between
from benchmarks.traces.record import ARCHIVE, TARGET, Comparison, Played, Sorted, latest
from forebay.units import format_bytes

__all__ = ["FRAGMENTATION", "LAYOUT", "render_orders", "render_traces", "write"]

FRAGMENTATION = ROOT / "docs" / "fragmentation.md"
LAYOUT = ROOT / "docs" / "layout.md"
NOTHING = "No comparison is kept yet.\n"


def write(fragmentation: Path = FRAGMENTATION, layout: Path = LAYOUT) -> None:
    """Replaces the generated parts of the two pages."""
    kept = ARCHIVE.every()
    replace_between("traces", render_traces(kept), fragmentation)
    replace_between("orders", render_orders(kept), layout)


def render_traces(comparisons: Sequence[Comparison]) -> str:
    """What allocators reserve, as Markdown. ``comparisons`` are in order of their dates."""
    rows, _ = latest(comparisons)
    if not rows:
        return NOTHING
    names = list(rows[0].reserved)
    head = f"| step | live | planned | {' | '.join(names)} |\n|---|---:|---:|{'---:|' * len(names)}\n"
    lines = [_played(row, names) for row in rows]
    missed = [f"{row.model}, {row.way}" for row in rows if row.missed]
    told = f"More than {TARGET:.0%} over: {'; '.join(missed)}." if missed else f"None is planned {TARGET:.0%} over."
    return "".join([head, *lines, f"\n{told}\n\n", *_runs(comparisons, rows)])


def _played(row: Played, names: Sequence[str]) -> str:
    shares = " | ".join(f"{row.over(row.reserved[name]):.1%}" for name in names)
    return (
        f"| {row.model}, {row.shape}, {row.way} | {format_bytes(row.live)} | {row.over(row.height):.3%} | {shares} |\n"
    )


def render_orders(comparisons: Sequence[Comparison]) -> str:
    """What another order of the ops takes, as Markdown. ``comparisons`` are in order of their dates."""
    _, rows = latest(comparisons)
    if not rows:
        return NOTHING
    head = "| step | ops | in program order | `roam` | to it | over the bound | addresses | CPU seconds |\n"
    lines = [_sorted(row) for row in rows]
    return "".join([head, "|---|---:|---:|---:|---:|---:|---:|---:|\n", *lines, "\n", *_runs(comparisons, rows)])


def _sorted(row: Sorted) -> str:
    over = "proven" if row.found == row.bound else f"{row.found / row.bound - 1:.2%}"
    cells = (
        f"{row.model}, {row.shape}",
        str(row.ops),
        format_bytes(row.program),
        format_bytes(row.found),
        f"{row.found / row.program:.2f}",
        over,
        f"{row.height / row.found - 1:.3%}",
        f"{row.cpu_seconds:.2f}",
    )
    return f"| {' | '.join(cells)} |\n"


def _runs(comparisons: Sequence[Comparison], rows: Sequence[Played] | Sequence[Sorted]) -> Iterator[str]:
    """The runs that the figures are of."""
    for one in comparisons:
        if any(row is kept for row in (*one.played, *one.sorted) for kept in rows):
            yield in_words(one)
