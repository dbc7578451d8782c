"""The generated part of ``docs/models.md``: which architectures were trained, and how."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from benchmarks.families.record import ARCHIVE, Comparison, Trained, Verdict, newest
from benchmarks.provenance import in_words
from benchmarks.table import replace_between

__all__ = ["PAGE", "render", "write"]

PAGE: Final = Path(__file__).resolve().parents[2] / "docs" / "models.md"


def write(path: Path = PAGE) -> None:
    """Replaces the generated part of the page."""
    replace_between("families", render(ARCHIVE.every()), path)


def render(comparisons: Sequence[Comparison]) -> str:
    """The newest answer for every architecture as Markdown. ``comparisons`` are in order of their dates."""
    if not comparisons:
        return "No comparison is kept yet.\n"
    found = newest(comparisons)
    parts = [_counts(found)]
    for task in dict.fromkeys(one.task for one in found):
        parts += _of_task(task, [one for one in found if one.task == task])
    # A run of which nothing is the newest any more has nothing to say.
    shown = [one for one in comparisons if any(made in found for made in one.trained)]
    parts.append("".join(f"{in_words(one)}  transformers {one.versions['transformers']}\n" for one in shown))
    return "\n".join(parts)


def _counts(found: Sequence[Trained]) -> str:
    lines = ["| task | the same bits | other bits | refused | not tried |\n", "|---|---:|---:|---:|---:|\n"]
    for task in dict.fromkeys(one.task for one in found):
        of = Counter(one.verdict for one in found if one.task == task)
        lines.append(f"| {task} | {' | '.join(str(of[verdict]) for verdict in Verdict)} |\n")
    return "".join(lines)


def _of_task(task: str, found: Sequence[Trained]) -> Iterator[str]:
    yield f"### {task[0].upper()}{task[1:]}\n"
    for verdict in Verdict:
        of = [one for one in found if one.verdict is verdict]
        names = ", ".join(f"`{one.name}`" for one in of)
        if verdict is Verdict.REFUSED:
            yield from (f"- refused: `{one.name}`: {one.why}\n" for one in of)
        elif of:
            yield f"- {_WORDS[verdict]}: {names}\n"


_WORDS: Final = {Verdict.SAME: "the same bits", Verdict.OTHER: "other bits", Verdict.NOT_TRIED: "not tried"}
