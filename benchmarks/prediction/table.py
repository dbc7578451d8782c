"""The table of predictions in ``benchmarks/README.md``, generated from the newest comparison of every machine of
those of all models: one of some of them is kept, and replaces none."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.host import slug
from benchmarks.prediction.record import ARCHIVE, Comparison, Run
from benchmarks.prediction.zoo import BY_VALUE
from benchmarks.table import QUIET_CORES, replace_between

__all__ = ["render", "write"]

APART = 0.05
"""Steps of two policies that are closer than this share are taken as equal: repeated runs of one differ by as much."""

_HEAD = (
    "| model | kind | budget | plan | device: predicted | measured | error | host: error | step: predicted | "
    "measured | error | rounds |\n|---|---|---|---|---:|---:|---:|---:|---:|---:|---:|---|\n"
)


def write() -> None:
    """Replaces the generated part of the README."""
    replace_between("predictions", render(ARCHIVE.latest()))


def render(comparisons: Sequence[Comparison]) -> str:
    """Those of ``comparisons`` that are of all models, as Markdown."""
    whole = [_section(comparison) for comparison in comparisons if comparison.is_whole]
    return "\n".join(whole) or "No comparison is kept yet.\n"


def _section(comparison: Comparison) -> str:
    runs = comparison.planned()
    typical, worst = comparison.step_errors()
    same, pairs = comparison.pairs(APART)
    devices = [run.device_error for run in runs if run.kind != BY_VALUE]
    by_value = [run.device_error for run in runs if run.kind == BY_VALUE]
    hosts = [abs(run.host_error) for run in runs]
    broken = sum(run.measured.device > run.promised for run in comparison.runs)
    company = "" if comparison.other_cores < QUIET_CORES else f", {comparison.other_cores:.2f} cores busy with others"
    return "\n".join(
        [
            f"### {slug(comparison.hardware)}",
            "",
            f"{len({run.model for run in runs})} models, {len(runs)} plans of `auto`. Device peak: error from "
            f"{min(devices):+.2%} to {max(devices):+.2%} (target within 3 %, never under by more than 1 %)"
            f"{_routed(by_value)}. Host peak: at most {max(hosts):.2%} (target 5 %). "
            f"Step: median error {typical:.1%}, worst {worst:.1%} "
            "(targets 10 % and 20 %). "
            f"Order of policies: {same} of {pairs} pairs whose steps differ by more than {APART:.0%} are predicted in "
            f"the order measured, {len(comparison.runs)} runs. Promises broken: {broken}. "
            f"Models that failed: {'; '.join(comparison.failed) or 'none'}.",
            "",
            _HEAD + "".join(_row(run) for run in runs),
            f"{comparison.hardware.cpu}, {comparison.hardware.cores} cores, {comparison.threads} threads{company}; "
            f"{', '.join(f'{name} {version}' for name, version in comparison.versions.items())}; commit "
            f"{comparison.code.revision[:12]}; {comparison.date:%Y-%m-%d %H:%M} UTC. `{comparison.command}`",
            "",
        ]
    )


def _routed(errors: list[float]) -> str:
    """What is said of models whose memory follows from values."""
    if not errors:
        return ""
    return (
        f"; where memory follows from routes, which nobody knows beforehand, from {min(errors):+.2%} to "
        f"{max(errors):+.2%}: what is predicted there is balanced routing, what is promised holds for any"
    )


def _row(run: Run) -> str:
    mib = 1 << 20
    rounds = ", ".join(f"{ratio - 1:+.0%}" for ratio in run.ratios)
    return (
        f"| {run.model} | {run.kind} | {run.level} | {run.plan} | {run.predicted.device / mib:.1f} MiB | "
        f"{run.measured.device / mib:.1f} MiB | {run.device_error:+.2%} | {run.host_error:+.2%} | "
        f"{run.predicted.step_seconds:.3f} s | {run.measured.step_seconds:.3f} s | "
        f"{run.step_error:+.1%} | {rounds} |\n"
    )
