"""The table of solve times in ``docs/policies.md``, from the newest figures of every policy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.host import ROOT
from benchmarks.provenance import in_words
from benchmarks.solving.record import ARCHIVE, AUTO, TARGET, Comparison, Room, Solved, latest
from benchmarks.table import replace_between
from forebay.units import format_bytes

__all__ = ["PLACE", "render", "write"]

PLACE = ROOT / "docs" / "policies.md"


def write(path: Path = PLACE) -> None:
    """Replaces the generated part of ``path``."""
    replace_between("solving", render(ARCHIVE.every()), path)


def render(comparisons: Sequence[Comparison]) -> str:
    """The newest rows as Markdown. ``comparisons`` are in order of their dates."""
    rows = latest(comparisons)
    if not rows:
        return "No comparison is kept yet.\n"
    columns = sorted({(row.room, row.layers): row.device for row in rows}.items(), key=lambda column: column[0])
    heads = [f"{layers} layers, {room} ({format_bytes(device)})" for (room, layers), device in columns]
    by_policy: dict[str, dict[tuple[Room, int], Solved]] = {}
    for row in rows:
        by_policy.setdefault(row.policy, {})[row.room, row.layers] = row
    lines = [f"| policy | {' | '.join(heads)} |\n", f"|---|{'---:|' * len(heads)}\n"]
    lines += [_line(policy, [own.get(key) for key, _ in columns]) for policy, own in by_policy.items()]
    slow, plans = sum(row.slow for row in rows), sum(not row.exact for row in rows)
    summary = (
        f"Seconds of the processor, and in brackets those on the wall. Of {plans} plans by planners that are not exact "
        f"{slow} took more than {TARGET:g} s.\n"
    )
    return "".join([summary, "\n", *lines, "\n", *_beside(rows), "\n", *_proofs(rows), "\n", *_runs(comparisons, rows)])


def _line(policy: str, own: Sequence[Solved | None]) -> str:
    return f"| `{policy}` | {' | '.join(map(_cell, own))} |\n"


def _cell(one: Solved | None) -> str:
    if one is None:
        return ""
    seconds = f"**{one.cpu_seconds:.2f}**" if one.slow else f"{one.cpu_seconds:.2f}"
    return f"{seconds} ({one.seconds:.2f}){', nothing fits' if one.step_seconds is None else ''}"


def _beside(rows: Sequence[Solved]) -> Iterator[str]:
    """The step of ``auto`` beside the shortest of all others, for each model and room."""
    for auto in (row for row in rows if row.policy == AUTO):
        same = [row for row in rows if (row.layers, row.room) == (auto.layers, auto.room) and row is not auto]
        best = min((row for row in same if row.step_seconds), key=lambda row: row.step_seconds or 0.0, default=None)
        if auto.step_seconds and best is not None and best.step_seconds:
            ratio, verdict = auto.step_seconds / best.step_seconds, " (**behind**)" if auto.behind(best) else ""
            yield (
                f"- {auto.layers} layers, {auto.room}: a step of `{AUTO}` takes {auto.step_seconds:.3f} s, "
                f"{ratio:.3f} of that of `{best.policy}`, the fastest of the others{verdict}.\n"
            )


def _proofs(rows: Sequence[Solved]) -> Iterator[str]:
    """What the exact planners say of their answers."""
    for row in rows:
        if row.proof:
            yield f"- `{row.policy}`, {row.layers} layers, {row.room}: {row.proof}.\n"


def _runs(comparisons: Sequence[Comparison], rows: Sequence[Solved]) -> Iterator[str]:
    """The runs that the figures are of."""
    for one in comparisons:
        if any(row is kept for row in one.rows for kept in rows):
            yield in_words(one)
