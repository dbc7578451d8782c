"""The section of ``benchmarks/README.md`` about activations, generated from the newest comparison of every machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from benchmarks.activations.planned import AUTO, COMPILED_AUTO
from benchmarks.activations.record import ARCHIVE, Comparison, Field, Row, State
from benchmarks.host import slug
from benchmarks.table import QUIET_CORES, README, replace_between

__all__ = ["held_against", "render", "write"]

MIB = 1 << 20
RIVALS = ("checkpoint", "save_on_cpu", "compile", "rockmate")
"""Series that ``auto`` is held against."""

_HEAD = (
    "| contender | budget | what | device | of plain | predicted | host | step | to plain | predicted step |\n"
    "|---|---|---|---:|---:|---:|---:|---:|---:|---:|\n"
)


def write(path: Path = README, comparisons: Sequence[Comparison] | None = None) -> None:
    """Replaces the generated part of the README."""
    replace_between("activations", render(ARCHIVE.latest() if comparisons is None else comparisons), path)


def render(comparisons: Sequence[Comparison]) -> str:
    """The comparisons as Markdown."""
    return "\n".join(_section(one) for one in comparisons) or "No comparison is kept yet.\n"


def held_against(field: Field, rival: Row) -> tuple[Row, ...]:
    """The runs of ``auto`` that took turns with ``rival`` and as much of the device as ``rival`` did or less: of those
    of a model as it is, and beside a rival that is compiled of those with compiled blocks, too, the one that was given
    most."""
    series = (AUTO, COMPILED_AUTO) if rival.series == "compile" else (AUTO,)
    able = [row for row in field.rows if row.beside(rival) and _within(row.device, rival.device)]
    found = (max((r for r in able if r.series == one), key=lambda r: r.budget or 0, default=None) for one in series)
    return tuple(row for row in found if row is not None)


def _within(device: int | None, peak: int | None) -> bool:
    return device is not None and peak is not None and device <= peak


def _section(comparison: Comparison) -> str:
    company = "" if comparison.other_cores < QUIET_CORES else f", {comparison.other_cores:.2f} cores busy with others"
    machine = comparison.hardware
    held = "; freed memory stays with every process" if comparison.held else ""
    state = {True: " with changes", False: "", None: " (no repository)"}[comparison.code.dirty]
    return "\n".join(
        [
            f"### activations: {comparison.subject} on {slug(machine)}",
            "",
            *(f"{_field(field)}\n" for field in comparison.fields),
            f"Models that failed: {'; '.join(comparison.failed) or 'none'}. {comparison.rounds} rounds of "
            f"{comparison.steps} steps; {machine.cpu}, {machine.cores} cores, {machine.memory_bytes / 2**30:.0f} GiB; "
            f"{comparison.threads} threads{company}{held}; "
            f"{', '.join(f'{name} {version}' for name, version in comparison.versions.items())}; commit "
            f"{comparison.code.revision[:12]}{state}; {comparison.date:%Y-%m-%d %H:%M} UTC. `{comparison.command}`",
            "",
        ]
    )


def _field(field: Field) -> str:
    plain = field.row("plain")
    seconds = "not measured" if plain.step_seconds is None else f"{plain.step_seconds:.3f} s"
    rivals = [row for row in field.rows if row.series in RIVALS and row.state is State.MEASURED]
    return "\n".join(
        [
            f"**{field.model}**, batch {field.batch}; plain PyTorch: {field.plain_peak / MIB:.0f} MiB, {seconds}. "
            + " ".join(_verdict(field, row) for row in rivals),
            "",
            _HEAD + "".join(_row(field, row) for row in field.rows),
        ]
    )


def _verdict(field: Field, rival: Row) -> str:
    """How ``auto`` within the rival's peak compares, round by round."""
    held = held_against(field, rival)
    if not held:
        return f"Within the peak of {rival.name} no run of auto was measured beside it."
    return f"Within the peak of {rival.name}: {'; '.join(_beside(row, rival) for row in held)}."


def _beside(row: Row, rival: Row) -> str:
    ratios = row.beside(rival)
    verdict = "on or below it" if median(ratios) <= 1 else "above it"
    return (
        f"{row.name} takes {median(ratios):.3f} of its step ({min(ratios):.3f} - {max(ratios):.3f}; longer in "
        f"{sum(ratio > 1 for ratio in ratios)} of {len(ratios)} rounds), {verdict}"
    )


def _row(field: Field, row: Row) -> str:
    foretold = row.predicted
    state = row.state.value if row.state is not State.MEASURED else ""
    cells = [
        row.series if row.label else row.name,
        row.label + ("" if row.budget is None else f" = {row.budget / MIB:.0f} MiB") or "-",
        "; ".join(part for part in (row.what, state, row.detail, _twin(row)) if part).replace("|", "/"),
        "-" if row.device is None else f"{row.device / MIB:.1f} MiB",
        "-" if row.device is None else f"{row.device / field.plain_peak:.1%}",
        _error(foretold.device if foretold else None, row.device),
        "-" if row.host is None else f"{row.host / MIB:.1f} MiB",
        "-" if row.step_seconds is None else f"{row.step_seconds:.3f} s",
        "-" if row.ratio is None else f"{row.ratio:.3f} ({min(row.ratios):.3f} - {max(row.ratios):.3f})",
        _seconds(foretold.step_seconds if foretold else None, row.step_seconds),
    ]
    return f"| {' | '.join(cells)} |\n"


def _twin(row: Row) -> str:
    return "" if row.measured_as is None else f"the plan of {row.measured_as}"


def _error(foretold: int | None, measured: int | None) -> str:
    """The predicted peak and how far from the measured one it is: above 0 is too much."""
    if foretold is None:
        return "-"
    return f"{foretold / MIB:.1f} MiB" + ("" if not measured else f" ({foretold / measured - 1:+.2%})")


def _seconds(foretold: float | None, measured: float | None) -> str:
    if foretold is None:
        return "-"
    return f"{foretold:.3f} s" + ("" if not measured else f" ({foretold / measured - 1:+.1%})")
