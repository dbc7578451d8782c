"""The table in ``benchmarks/README.md``, generated from the results: no figure is written by hand."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from benchmarks.case import BenchmarkError
from benchmarks.host import slug
from benchmarks.measure import Outcome
from benchmarks.result import Result, Row

__all__ = ["QUIET_CORES", "README", "render", "replace_between", "write"]

README = Path(__file__).resolve().parent / "README.md"
QUIET_CORES = 0.1
"""Cores that other processes may use during a run that is judged. A crowded host slows contenders down unequally:
idle threads of one spin where another's sleep, so that a ratio is off without looking noisy."""

_HEAD = (
    "| contender | seconds per step | to {baseline} | rounds from - to | previous | tokens/s | peak by tier | lanes |\n"
    "|---|---:|---:|---|---:|---:|---|---|\n"
)


def write(results: Sequence[Result], path: Path = README) -> None:
    """Replaces the table in ``path``. Raises ``BenchmarkError`` where its two markers are not there."""
    replace_between("table", render(results), path)


def replace_between(name: str, text: str, path: Path = README) -> None:
    """Replaces the generated part ``name`` of ``path``. Raises ``BenchmarkError`` where it has no such part."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, first, rest = path.read_text().partition(begin)
    _, last, after = rest.partition(end)
    if not first or not last:
        raise BenchmarkError(f"{path.name} needs the lines {begin} and {end} around the generated part")
    path.write_text(f"{before}{begin}\n\n{text}\n{end}{after}")


def render(results: Sequence[Result]) -> str:
    """The latest result of every case and machine as Markdown, forebay's result before it beside.

    ``results`` are in order of their dates.
    """
    groups: dict[tuple[str, str], list[Result]] = defaultdict(list)
    for result in results:
        groups[result.case, slug(result.hardware)].append(result)
    if not groups:
        return "No result is kept yet.\n"
    return "\n".join(_section(history) for _, history in sorted(groups.items()))


def _section(history: Sequence[Result]) -> str:
    latest = history[-1]
    previous = history[-2] if len(history) > 1 else None
    rows = "".join(_row(latest, row, previous) for row in latest.rows)
    limit = "not computed" if latest.limit_seconds is None else f"{latest.limit_seconds:.4f} s"
    return "\n".join(
        [
            f"### {latest.case}: {slug(latest.hardware)}",
            "",
            f"{latest.question} {_verdict(latest)}",
            "",
            _HEAD.format(baseline=latest.baseline) + rows,
            f"Limit: {latest.limit}: {limit}.{_alone(latest)}",
            "",
            _provenance(latest),
            "",
        ]
    )


def _verdict(result: Result) -> str:
    ratio = result.row(result.subject).median_ratio
    if result.target is None:
        return "No target is set."
    if ratio is None:
        return f"Target {result.target:.2f}; no ratio was measured."
    if result.other_cores > QUIET_CORES:
        verdict = f"not judged, other processes kept {result.other_cores:.1f} cores busy"
    else:
        verdict = "met" if ratio <= result.target else "missed"
    control = _number(result.row(result.control).median_ratio, 3)
    return f"Target {result.target:.2f} or less; measured {ratio:.3f}: {verdict} ({result.control}: {control})."


def _row(result: Result, row: Row, previous: Result | None) -> str:
    if row.median_seconds is None:
        seconds = row.outcome.value
    elif row.outcome is Outcome.FINISHED:
        seconds = f"{row.median_seconds:.4f}"
    else:
        seconds = f"{row.median_seconds:.4f}, then {row.outcome.value}"
    peaks = ", ".join(f"{tier} {_mib(peak)}" for tier, peak in row.account.peaks.items() if peak) or "not measured"
    lanes = ", ".join(
        f"{lane} {use.bytes_per_second / 1e9:.2f} GB/s"
        for lane, use in row.account.lanes.items()
        if use.bytes_per_second is not None
    )
    cells = [
        row.name if row.what == row.name else f"{row.name}: {row.what}",
        seconds,
        _number(row.median_ratio, 3),
        f"{min(row.ratios):.3f} - {max(row.ratios):.3f}" if row.ratios else "-",
        _previous(result, row, previous),
        _number(row.tokens_per_second, 0),
        peaks,
        lanes or "-",
    ]
    return f"| {' | '.join(cells)} |\n"


def _previous(result: Result, row: Row, previous: Result | None) -> str:
    """The subject's ratio in the result before this one. Only a ratio outlives the drift of a host."""
    if row.name != result.subject or previous is None:
        return "-"
    before = previous.row(previous.subject)
    return before.outcome.value if before.median_ratio is None else f"{before.median_ratio:.3f}"


def _alone(result: Result) -> str:
    """How the baseline did before the others existed: says whether company slows it down."""
    row = result.row(result.baseline)
    if not row.alone or row.median_seconds is None:
        return ""
    return f" {result.baseline} alone, before the others were set up: {median(row.alone):.4f} s."


def _provenance(result: Result) -> str:
    machine, shape = result.hardware, result.shape
    parts = [
        f"{shape.model} ({shape.parameters / 1e6:.1f}M parameters, {shape.dtype}), batch {shape.batch} x {shape.seq}",
        f"{shape.rounds} rounds of {shape.steps} steps",
        f"{machine.cpu}, {machine.cores} cores, {machine.memory_bytes / 2**30:.0f} GiB",
    ]
    if machine.gpu is not None:
        memory = (machine.gpu_memory_bytes or 0) / 2**30
        parts.append(f"{machine.gpu} {memory:.0f} GiB, driver {machine.driver}")
    parts.append(f"{result.threads} threads, {result.other_cores:.2f} cores busy with other processes")
    parts.append(", ".join(f"{name} {version}" for name, version in result.versions.items()))
    state = {True: " with changes", False: "", None: " (no repository)"}[result.code.dirty]
    parts.append(f"commit {result.code.revision[:12]}{state}, sources {result.code.sha256[:12]}")
    parts.append(f"{result.date:%Y-%m-%d %H:%M} UTC")
    return f"{'; '.join(parts)}. `{result.command}`"


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.0f} MiB"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"
