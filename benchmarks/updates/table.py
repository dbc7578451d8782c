"""The table of updates in ``benchmarks/README.md``, generated from the newest comparison of every machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from benchmarks.host import slug
from benchmarks.table import QUIET_CORES, README, replace_between
from benchmarks.updates.record import ARCHIVE, BASELINE, MEMORY, Comparison, Row

__all__ = ["render", "write"]

_HEAD = (
    f"| update | bytes a parameter | M parameters/s | GB/s | of {MEMORY} | times {BASELINE} | rounds from - to |\n"
    "|---|---:|---:|---:|---:|---:|---|\n"
)


def write(path: Path = README) -> None:
    """Replaces the generated part of the README."""
    replace_between("updates", render(ARCHIVE.latest()), path)


def render(comparisons: Sequence[Comparison]) -> str:
    """All comparisons as Markdown."""
    return "\n".join(_section(comparison) for comparison in comparisons) or "No comparison is kept yet.\n"


def _section(comparison: Comparison) -> str:
    crowded = comparison.other_cores >= QUIET_CORES
    company = f", {comparison.other_cores:.2f} cores busy with others" if crowded else ""
    absent = "".join(f"Left out: {why}. " for why in comparison.left_out)
    return "\n".join(
        [
            f"### {slug(comparison.hardware)}",
            "",
            _HEAD + "".join(_row(comparison, row) for row in comparison.rows),
            f"{absent}{comparison.elements / 1e6:.0f}M parameters; {comparison.hardware.cpu}, "
            f"{comparison.hardware.cores} cores, {comparison.threads} threads{company}; "
            f"{', '.join(f'{name} {version}' for name, version in comparison.versions.items())}; commit "
            f"{comparison.code.revision[:12]}; {comparison.date:%Y-%m-%d %H:%M} UTC. `{comparison.command}`",
            "",
        ]
    )


def _row(comparison: Comparison, row: Row) -> str:
    elements = comparison.elements
    moved = row.bytes_per_second(elements)
    share = moved / comparison.row(MEMORY).bytes_per_second(elements)
    ratios = comparison.ratios(row)
    # What updates nothing is not as fast as anything.
    times, spread = (
        ("", "") if row.name == MEMORY else (f"{median(ratios):.2f}", f"{min(ratios):.2f} - {max(ratios):.2f}")
    )
    return (
        f"| {row.name} | {row.bytes_per_parameter:.2f} | {row.parameters_per_second(elements) / 1e6:,.0f} | "
        f"{moved / 1e9:.1f} | {share:.2f} | {times} | {spread} |\n"
    )
