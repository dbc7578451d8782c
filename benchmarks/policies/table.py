"""The table of policies in ``benchmarks/README.md``, generated from the newest figures of every instance."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.policies.record import ARCHIVE, AUTO, MORE, Comparison, Instance, Outcome, latest
from benchmarks.table import README, replace_between
from forebay.units import format_bytes

__all__ = ["render", "write"]

_HEAD = (
    "| machine | device | auto | best published | auto to it | the others, to the best |\n"
    "|---|---:|---:|---|---:|---|\n"
)


def write(path: Path = README) -> None:
    """Replaces the generated part of the README."""
    replace_between("policies", render(ARCHIVE.every()), path)


def render(comparisons: Sequence[Comparison]) -> str:
    """The newest of all instances as Markdown. ``comparisons`` are in order of their dates."""
    found = latest(comparisons)
    if not found:
        return "No comparison is kept yet.\n"
    models = dict.fromkeys(one.model for one in found)
    parts = [_summary(found)]
    parts += [_section(model, [one for one in found if one.model == model]) for model in models]
    return "\n".join([*parts, *_told(found), "", *_runs(comparisons, found), ""])


def _summary(found: Sequence[Instance]) -> str:
    able = [one for one in found if one.ratio is not None]
    behind, ties = sum(one.behind for one in able), sum(one.ties for one in able)
    return (
        f"Of {len(able)} instances that a published policy fits, `{AUTO}` is behind the best of them by more than "
        f"{100 * MORE:g} % in {behind}, within that of it in {ties} and ahead in {len(able) - behind - ties}. "
        f"Of {len(found) - len(able)} none of them fits, and `{AUTO}` fits "
        f"{sum(one.auto.step_seconds is not None for one in found if one.ratio is None)} of these.\n"
    )


def _section(model: str, found: Sequence[Instance]) -> str:
    first = found[0]
    return f"### {model}, {first.batch} x {first.seq:,} tokens\n\n{_HEAD}{''.join(map(_row, found))}"


def _row(one: Instance) -> str:
    best = one.best
    mine = "-" if one.auto.step_seconds is None else f"{one.auto.step_seconds:.3f} s"
    device = f"{format_bytes(one.device)} ({100 * one.share:g} %)"
    if best is None or one.ratio is None:
        return f"| {one.machine} | {device} | {mine} | - | - | none fits |\n"
    others = ", ".join(_other(other, best) for other in one.published if other is not best)
    ratio = f"**{one.ratio:.3f}**" if one.behind else f"{one.ratio:.3f}"
    return f"| {one.machine} | {device} | {mine} | {best.policy} {best.step_seconds:.3f} s | {ratio} | {others} |\n"


def _other(other: Outcome, best: Outcome) -> str:
    if other.step_seconds is None or not best.step_seconds:
        return f"{other.policy} -"
    note = "" if other.exact else " (other numbers)"
    return f"{other.policy} {other.step_seconds / best.step_seconds:.2f}{note}"


def _told(found: Sequence[Instance]) -> Iterator[str]:
    """Where ``auto`` is behind; and where it ties, what it says of its own plan."""
    for one in found:
        if one.best is not None and (one.behind or one.ties):
            verdict = "is **behind**" if one.behind else "ties with"
            where = f"{one.model} on {one.machine} within {format_bytes(one.device)}"
            yield f"- {where}: `{AUTO}` {verdict} `{one.best.policy}` ({one.ratio:.3f}): {'; '.join(one.why)}."


def _runs(comparisons: Sequence[Comparison], found: Sequence[Instance]) -> Iterator[str]:
    """The runs that the figures are from."""
    for comparison in comparisons:
        count = sum(any(one is kept for kept in found) for one in comparison.instances)
        if count:
            changed = ", changed since" if comparison.code.dirty else ""
            yield (
                f"{count} of them: commit {comparison.code.revision[:12]}{changed}, sources "
                f"{comparison.code.sha256[:12]}; {comparison.date:%Y-%m-%d %H:%M} UTC. `{comparison.command}`\n"
            )
