"""The table on the first screen of ``README.md``: plain PyTorch beside forebay with the least device memory that
was tried, from the newest comparison of every model's activations on the machine that was measured last."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.activations.planned import AUTO
from benchmarks.activations.record import ARCHIVE, Comparison, Field, Row, State
from benchmarks.host import ROOT, slug
from benchmarks.table import replace_between

__all__ = ["README", "render", "write"]

README = ROOT / "README.md"
MIB = 1 << 20

_HEAD = (
    "| a step of | device, plain PyTorch | device, forebay | foretold | host beside it | a step takes |\n"
    "|---|---:|---:|---:|---:|---|\n"
)


def write(path: Path = README, comparisons: Sequence[Comparison] | None = None) -> None:
    """Replaces the generated part of the README. Raises ``BenchmarkError`` where it has none."""
    replace_between("measured", render(ARCHIVE.latest() if comparisons is None else comparisons), path)


def render(comparisons: Sequence[Comparison]) -> str:
    """The newest rows as Markdown. ``comparisons`` are the newest of their models and machines."""
    if not comparisons:
        return "No comparison is kept yet.\n"
    newest = max(comparisons, key=lambda one: one.date)
    here = sorted((one for one in comparisons if slug(one.hardware) == slug(newest.hardware)), key=_subject)
    rows = [_row(field, row) for one in here for field in one.fields if (row := _least(field)) is not None]
    machine = newest.hardware
    told = (
        "The device has parameters, gradients, AdamW's states and activations, at their most. Steps are in times of\n"
        "plain PyTorch's: the median of rounds in turns, the smallest and the largest. The first loss of each turn is\n"
        "plain PyTorch's to the last bit. More budgets, and what else PyTorch offers:\n"
        "[benchmarks](benchmarks/README.md#activations).\n"
    )
    where = (
        f"{machine.cpu}, {machine.cores} cores, where the device is an account of every live byte; torch "
        f"{newest.versions.get('torch', '')}:\n"
    )
    runs = ",\n".join(map(_run, here))
    return f"{_HEAD}{''.join(rows)}\n{told}\n{where}{runs}.\n"


def _subject(comparison: Comparison) -> str:
    return comparison.subject


def _least(field: Field) -> Row | None:
    """The run of ``auto`` with the smallest budget, of those that were timed."""
    able = [
        row for row in field.rows if row.series == AUTO and row.state is State.MEASURED and row.exact and row.ratios
    ]
    return min((row for row in able if row.device is not None), key=lambda row: row.device or 0, default=None)


def _row(field: Field, row: Row) -> str:
    device, foretold = row.device or 0, row.predicted
    cells = [
        f"{field.model}, batch {field.batch}",
        f"{field.plain_peak / MIB:,.0f} MiB",
        f"{device / MIB:,.0f} MiB, {device / field.plain_peak:.0%}",
        "-" if foretold is None else f"{foretold.device / MIB:,.0f} MiB",
        "-" if row.host is None else f"{row.host / MIB:,.0f} MiB",
        f"{row.ratio or 0:.2f} times ({min(row.ratios):.2f} to {max(row.ratios):.2f})",
    ]
    return f"| {' | '.join(cells)} |\n"


def _run(one: Comparison) -> str:
    """The run that a row is of."""
    changed = {True: " with changes", False: "", None: ""}[one.code.dirty]
    return f"`{one.command}` at {one.code.revision[:7]}{changed}, {one.date:%Y-%m-%d}"
