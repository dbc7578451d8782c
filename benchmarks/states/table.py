"""The table of policies for states in ``benchmarks/README.md``, foretold and measured, from the newest figures of every
policy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

from benchmarks.states.record import ARCHIVE, NEAR, Comparison, Refused, Row, Run, Same, latest
from benchmarks.table import QUIET_CORES, README, replace_between
from forebay.units import format_bytes

__all__ = ["render", "write"]

_HEAD = (
    "| policy | memory | budgets | foretold | measured | error | rounds | device: foretold | measured | host: foretold "
    "| measured | disk | losses |\n|---|---|---|---:|---:|---:|---|---:|---:|---:|---:|---:|---|\n"
)


def write(path: Path = README) -> None:
    """Replaces the generated part of the README."""
    replace_between("states", render(ARCHIVE.every()), path)


def render(comparisons: Sequence[Comparison]) -> str:
    """The newest of all rows as Markdown. ``comparisons`` are in order of their dates."""
    found = latest(comparisons)
    runs = [row.found for rows in found.values() for row in rows if isinstance(row.found, Run)]
    if not runs:
        return "No comparison is kept yet.\n"
    near, kept = sum(run.near for run in runs), sum(run.kept for run in runs)
    equal = [run for run in runs if run.exact]
    noise = [run.noise for run in runs if run.noise is not None]
    summary = (
        f"Of {len(runs)} plans {near} took what was foretold within {100 * NEAR:g} % "
        f"({100 * near / len(runs):.0f} %), {kept} held no more of any tier than they had promised, and of "
        f"{len(equal)} that promise plain PyTorch's numbers {sum(run.as_plain for run in equal)} had its losses to the "
        f"last bit."
    )
    if noise:
        summary += (
            f" The same plan took in its slowest round {100 * median(noise):.0f} % more than in its fastest (median; "
            f"{100 * max(noise):.0f} % at most)."
        )
    return "\n".join([f"{summary}\n", *(line for (_, model), rows in found.items() for line in _section(model, rows))])


def _section(model: str, rows: Sequence[Row]) -> Iterator[str]:
    runs = [row.found for row in rows if isinstance(row.found, Run)]
    yield f"### {model} ({rows[0].source.kind})\n"
    yield _HEAD + "".join(map(_row, runs))
    yield f"{_near(runs)}.\n"
    yield "".join(filter(None, (_told(row.found) for row in rows)))
    sources: Mapping[int, Comparison] = {id(row.source): row.source for row in rows}
    for key, one in sources.items():
        yield _from(sum(id(row.source) == key for row in rows), one)


def _near(runs: Sequence[Run]) -> str:
    """How many of ``runs`` are near, of each memory."""
    levels = dict.fromkeys(run.level for run in runs)
    counts = {level: [run.near for run in runs if run.level == level] for level in levels}
    return ", ".join(f"{level}: {sum(near)} of {len(near)} within {100 * NEAR:g} %" for level, near in counts.items())


def _told(found: Run | Refused | Same) -> str:
    """A line about what was not run."""
    match found:
        case Refused():
            return f"- `{found.policy}` ({found.level}): {found.reason}\n"
        case Same(run=(level, policy)):
            return f"- `{found.policy}` ({found.level}): the plan of `{policy}` ({level})\n"
    return ""


def _from(count: int, one: Comparison) -> str:
    """The run that ``count`` rows are from."""
    company = "" if one.other_cores < QUIET_CORES else f", {one.other_cores:.2f} cores busy with others"
    changed = ", changed since" if one.code.dirty else ""
    return (
        f"{count} of them: {one.hardware.cpu}, {one.hardware.cores} cores, {one.threads} threads{company}; torch "
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
        run.level,
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
