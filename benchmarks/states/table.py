"""The table of policies for states in ``benchmarks/README.md``, foretold and measured, from the newest run of every
model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.states.record import ARCHIVE, NEAR, Comparison, Run
from benchmarks.table import QUIET_CORES, README, replace_between
from forebay.units import format_bytes

__all__ = ["render", "write"]

_HEAD = (
    "| policy | budgets | foretold | measured | error | rounds | device: foretold | measured | host: foretold "
    "| measured | disk | losses |\n|---|---|---:|---:|---:|---|---:|---:|---:|---:|---:|---|\n"
)


def write(path: Path = README) -> None:
    """Replaces the generated part of the README."""
    replace_between("states", render(ARCHIVE.latest()), path)


def render(comparisons: Sequence[Comparison]) -> str:
    """The runs as Markdown. ``comparisons`` are the newest of their models and machines."""
    if not comparisons:
        return "No comparison is kept yet.\n"
    runs = [run for one in comparisons for run in one.runs]
    near, kept = sum(run.near for run in runs), sum(run.kept for run in runs)
    equal = [run for run in runs if run.exact]
    summary = (
        f"Of {len(runs)} plans {near} took what was foretold within {100 * NEAR:g} % "
        f"({100 * near / len(runs):.0f} %), {kept} held no more of any tier than they had promised, and of "
        f"{len(equal)} that promise plain PyTorch's numbers {sum(run.as_plain for run in equal)} had its losses to the "
        f"last bit.\n"
    )
    return "\n".join([summary, *(line for one in comparisons for line in _section(one))])


def _section(one: Comparison) -> Iterator[str]:
    yield f"### {one.model} ({one.kind})\n"
    yield _HEAD + "".join(map(_row, one.runs))
    yield f"{one.near} of {len(one.runs)} within {100 * NEAR:g} %.\n"
    yield "".join(f"- `{refused.policy}` ({refused.level}): {refused.reason}\n" for refused in one.refused)
    company = "" if one.other_cores < QUIET_CORES else f", {one.other_cores:.2f} cores busy with others"
    changed = ", changed since" if one.code.dirty else ""
    yield (
        f"{one.hardware.cpu}, {one.hardware.cores} cores, {one.threads} threads{company}; torch "
        f"{one.versions.get('torch', '')}; commit {one.code.revision[:12]}{changed}; {one.date:%Y-%m-%d %H:%M} UTC. "
        f"`{one.command}`\n"
    )


def _row(run: Run) -> str:
    rounds = ", ".join(f"{ratio - 1:+.0%}" for ratio in run.ratios)
    error = f"{run.error:+.1%}"
    many = "" if run.micro_batches == 1 else f", {run.micro_batches} micro-batches"
    foretold, measured = run.predicted, run.measured
    cells = [
        f"`{run.policy}`{many}",
        f"{format_bytes(run.device)}, {format_bytes(run.host)}",
        f"{foretold.step_seconds:.3f} s",
        f"{measured.step_seconds:.3f} s",
        error if run.near else f"**{error}**",
        rounds,
        format_bytes(foretold.device),
        format_bytes(measured.device),
        format_bytes(foretold.host),
        format_bytes(measured.host),
        format_bytes(measured.disk) if measured.disk else "-",
        "plain PyTorch's" if run.as_plain else "others" if not run.exact else "**others**",
    ]
    return f"| {' | '.join(cells)} |\n"
