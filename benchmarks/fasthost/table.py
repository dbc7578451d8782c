"""The tables of ``benchmarks/README.md`` on a fast host, generated from the newest run of every topic and machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.fasthost.record import ARCHIVE, Comparison, Row
from benchmarks.host import slug
from benchmarks.table import QUIET_CORES, README, replace_between
from forebay.units import MiB

__all__ = ["render", "write"]

_HEAD = "| contender | what | seconds | ratio | rounds from - to | target | GB/s | memory |\n"
_RULE = "|---|---|---:|---:|---|---|---:|---:|\n"


def write(path: Path = README) -> None:
    """Replaces the generated part of the README."""
    replace_between("host", render(ARCHIVE.latest()), path)


def render(comparisons: Sequence[Comparison]) -> str:
    """All comparisons as Markdown."""
    return "\n".join(_section(comparison) for comparison in comparisons) or "No comparison is kept yet.\n"


def _section(comparison: Comparison) -> str:
    judged = comparison.other_cores < QUIET_CORES
    company = "" if judged else f", {comparison.other_cores:.2f} cores busy with others: targets are not judged"
    absent = "".join(f"Left out: {why}. " for why in comparison.left_out)
    versions = ", ".join(f"{name} {version}" for name, version in comparison.versions.items())
    return "\n".join(
        [
            f"### {comparison.topic}: {slug(comparison.hardware)}",
            "",
            f"{comparison.question} Ratio: {comparison.ratio}.",
            "",
            _HEAD + _RULE + "".join(_row(row, judged) for row in comparison.rows),
            f"{absent}{comparison.setting}; {comparison.hardware.cpu}, {comparison.hardware.cores} cores, "
            f"{comparison.threads} threads{company}; {versions}; commit {comparison.code.revision[:12]}; "
            f"{comparison.date:%Y-%m-%d %H:%M} UTC. `{comparison.command}`",
            "",
        ]
    )


def _row(row: Row, judged: bool) -> str:
    ratio, spread = "", ""
    if row.ratio is not None:
        ratio, spread = f"{row.ratio:.3f}", f"{min(row.ratios):.3f} - {max(row.ratios):.3f}"
    target = ""
    if row.target is not None:
        verdict = "" if not judged or row.met is None else f": {'met' if row.met else 'missed'}"
        target = f"{row.target:g} or {'more' if row.at_least else 'less'}{verdict}"
    rate = f"{row.nbytes / row.median_seconds / 1e9:.2f}" if row.nbytes else ""
    memory = "" if row.memory is None else f"{row.memory / MiB:.0f} MiB"
    what = f"{row.what}; {row.note}" if row.note else row.what
    cells = (row.name, what, f"{row.median_seconds:.4f}", ratio, spread, target, rate, memory)
    return f"| {' | '.join(cells)} |\n"
