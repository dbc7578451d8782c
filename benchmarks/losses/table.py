"""The table of loss curves in ``benchmarks/README.md``, from the newest course of every way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import Final

from benchmarks.losses.record import ARCHIVE, EXACT, Comparison, Course, Joined, joined
from benchmarks.table import README, replace_between

__all__ = ["render", "write"]

POINTS: Final = 6
"""Of a curve that are shown."""


def write(path: Path = README) -> None:
    """Replaces the generated part of the README."""
    replace_between("losses", render(ARCHIVE.every()), path)


def render(comparisons: Sequence[Comparison]) -> str:
    """The newest courses as Markdown. ``comparisons`` are in order of their dates."""
    if not comparisons:
        return "No comparison is kept yet.\n"
    return "\n".join(line for one in joined(comparisons) for line in _told(one))


def _told(one: Joined) -> Iterator[str]:
    for task in dict.fromkeys(course.task for course in one.courses):
        courses = [course for course in one.courses if course.task == task]
        yield f"### {task}, {courses[0].steps:,} steps\n"
        yield _table(one, courses)
    yield "".join(_run(run) for run in one.runs)


def _run(one: Comparison) -> str:
    changed = ", changed since" if one.code.dirty else ""
    return (
        f"- `{one.command}`: {one.hardware.cpu}, torch {one.versions.get('torch', '')}; commit "
        f"{one.code.revision[:12]}{changed}; {one.date:%Y-%m-%d %H:%M} UTC\n"
    )


def _table(one: Joined, courses: Sequence[Course]) -> str:
    first = courses[0]
    places = [round((place + 1) * len(first.losses) / POINTS) - 1 for place in range(POINTS)]
    heads = " | ".join(f"step {(place + 1) * first.every:,}" for place in places)
    lines = [
        f"| update | {heads} | last losses to exact | unseen: loss | to exact | bytes guessed | to exact |\n",
        f"|---|{'---:|' * (len(places) + 5)}\n",
    ]
    seeds = dict.fromkeys(course.seed for course in courses)
    before = [one.before[f"{first.task} {seed}"] for seed in seeds]
    loss, guessed = (mean(pair[side] for pair in before) for side in (0, 1))
    lines.append(f"| before |{' |' * (len(places) + 1)} {loss:.4f} | | {guessed:.2%} | |\n")
    for way in dict.fromkeys(course.way for course in courses):
        lines.append(_line(one, [course for course in courses if course.way == way], places))
    return "".join(lines)


def _line(one: Joined, own: Sequence[Course], places: Sequence[int]) -> str:
    """The means of all seeds, and in brackets what single seeds differ by from the exact course with the same seed."""
    pairs = [(course, one.exact(course)) for course in own]
    curve = [f"{mean(course.losses[place] for course in own):.3f}" for place in places]
    last = [course.losses[-1] / exact.losses[-1] - 1 for course, exact in pairs]
    unseen = [course.unseen_loss / exact.unseen_loss - 1 for course, exact in pairs]
    points = [100 * (course.unseen_accuracy - exact.unseen_accuracy) for course, exact in pairs]
    is_exact = own[0].way == EXACT
    cells = [
        f"`{own[0].way}`",
        *curve,
        "" if is_exact else _spread(last, "{:+.1%}"),
        f"{mean(course.unseen_loss for course in own):.4f}",
        "" if is_exact else _spread(unseen, "{:+.1%}"),
        f"{mean(course.unseen_accuracy for course in own):.2%}",
        "" if is_exact else _spread(points, "{:+.2f} points"),
    ]
    return f"| {' | '.join(cells)} |\n"


def _spread(values: Sequence[float], form: str) -> str:
    return f"{form.format(mean(values))} ({', '.join(form.format(value) for value in values)})"
