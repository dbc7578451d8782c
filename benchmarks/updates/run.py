"""Runs the comparison of updates."""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata

from benchmarks.case import BenchmarkError
from benchmarks.provenance import Timing
from benchmarks.updates.contenders import MAKERS, Buffers
from benchmarks.updates.record import Comparison, Row
from benchmarks.updates.turns import Contender, race
from forebay.kernels.team import Team, cores

__all__ = ["ELEMENTS", "QUICK", "compare"]

ELEMENTS = 1 << 26
"""Parameters: 16 bytes of each and their codes are far beyond any cache."""

QUICK = 1 << 18
"""Parameters, to see whether it works."""

ROUNDS = 9


def compare(elements: int, command: str, say: Callable[[str], None]) -> Comparison:
    """Measures everyone who is there; ``say`` gets a line about each. Raises ``BenchmarkError`` if the code changed."""
    timing = Timing(command)
    team = Team(cores())
    held = Buffers(elements)
    there: list[Contender] = []
    absent: list[str] = []
    for make in MAKERS:
        try:
            there.append(make(held, team))
        except BenchmarkError as error:
            absent.append(str(error))
    try:
        seconds = race(there, 2 if elements == QUICK else ROUNDS)
    finally:
        team.close()
    origin = timing.ended(numba=metadata.version("numba"))
    rows = tuple(Row(c.name, c.bytes_per_parameter, tuple(s)) for c, s in zip(there, seconds, strict=True))
    for row in rows:
        rate, moved = row.parameters_per_second(elements), row.bytes_per_second(elements)
        say(f"{row.name:52} {rate / 1e6:8,.0f} M parameters/s {moved / 1e9:7.1f} GB/s")
    return Comparison(**origin, elements=elements, rows=rows, left_out=tuple(dict.fromkeys(absent)))
