"""The frame of every comparison: who measured, on what, and that nobody changed the code meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from benchmarks.fasthost.record import Comparison, Row
from benchmarks.measure import in_rotation
from benchmarks.provenance import Timing

__all__ = ["Measured", "Say", "compared", "rotated"]

Say = Callable[[str], None]
Key = TypeVar("Key")


@dataclass(frozen=True)
class Measured:
    """What a topic hands to the frame; ``versions`` are those of what only this topic uses."""

    rows: Sequence[Row]
    setting: str
    left_out: Sequence[str] = ()
    versions: Mapping[str, str] = field(default_factory=dict)


def compared(
    topic: str, question: str, ratio: str, command: str, measure: Callable[[], Measured], *, keep: bool, say: Say
) -> Comparison:
    """Runs ``measure`` and puts what it found into a record. Raises ``BenchmarkError`` where the figures are to be kept
    (``keep``) and the code changed meanwhile."""
    timing = Timing(command)
    found = measure()
    origin = timing.ended(kept=keep, **found.versions)
    for row in found.rows:
        ratio_words = "" if row.ratio is None else f"  ratio {row.ratio:.3f} ({min(row.ratios):.3f} - "
        ratio_words += "" if row.ratio is None else f"{max(row.ratios):.3f})"
        ratio_words += "" if row.met is not False else "  MISSED"
        say(f"{row.name:44} {row.median_seconds:8.4f} s{ratio_words}  {row.note}".rstrip())
    return Comparison(
        **origin,
        topic=topic,
        question=question,
        ratio=ratio,
        setting=found.setting,
        rows=tuple(found.rows),
        left_out=tuple(found.left_out),
    )


def rotated(
    turns: Mapping[Key, Callable[[], float]],
    rounds: int,
    warmup: int,
    say: Say,
    begin: Callable[[], object] | None = None,
) -> dict[Key, list[float]]:
    """Seconds of every turn, one entry a round, in rotating order; ``warmup`` rounds before them are not counted.
    ``begin`` is called at the begin of each round, those included."""
    seconds: dict[Key, list[float]] = {key: [] for key in turns}
    for number in range(warmup + rounds):
        if begin is not None:
            begin()
        for key, turn in in_rotation(list(turns.items()), number):
            taken = turn()
            if number >= warmup:
                seconds[key].append(taken)
        say(f"  round {number + 1} of {warmup + rounds}")
    return seconds
