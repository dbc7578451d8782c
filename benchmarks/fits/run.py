"""Sets of buffers laid out at a capacity that is known to be enough, as a user does it, with OR-Tools and without.

scripts/bench fits
scripts/bench fits --styles grown full --without-ortools
scripts/bench fits A.1048576.csv B.1048576.csv

Without files: the sets of ``benchmarks.layout.unseen``. A file is CSV as minimalloc reads it, its capacity the number
in its name. Each set is a process of its own on one thread, ``forebay layout FILE --capacity BYTES --json``, which has
60 seconds, as it has by itself.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.case import BenchmarkError, among
from benchmarks.fits.record import LIMIT, Comparison, Fitted
from benchmarks.layout.unseen import SEEDS, STYLES, unseen
from benchmarks.provenance import provenance
from forebay.buffer_csv import read_buffers
from forebay.buffers import BufferSet
from forebay.errors import ConfigError
from forebay.planners.cpsat import PACKAGE, cpsat_is_there

__all__ = ["compare", "fitted", "in_words", "sets_of"]

WITHOUT: Final = (
    f"import sys; sys.modules[{PACKAGE!r}] = None; import runpy; runpy.run_module('forebay', alter_sys=True)"
)
"""The command line of a machine on which OR-Tools is not installed."""

GRACE: Final = 60.0
"""Seconds beside ``LIMIT`` after which a process is ended: importing, compiling, the last turn of a search."""

FILES: Final = "from files"
"""The style of sets that were not made here."""


@dataclass(frozen=True)
class Given:
    """A set of buffers by name."""

    name: str
    style: str
    buffers: BufferSet


def sets_of(files: Sequence[Path], styles: Sequence[str]) -> Iterator[Given]:
    """The sets in ``files``; without files those of ``styles`` (none: all). Raises ``BenchmarkError`` for a style that
    there is not, and for files that are none."""
    for file in files:
        try:
            capacity = int(file.stem.rpartition(".")[2])
            yield Given(file.name.partition(".")[0], FILES, BufferSet(read_buffers(file), capacity))
        except ConfigError as error:
            raise BenchmarkError(str(error)) from None
        except ValueError:
            raise BenchmarkError(f"the name of {file} is to say its capacity, as in A.1048576.csv") from None
    for style in () if files else among("style", styles, tuple(STYLES)):
        for seed in SEEDS:
            yield Given(f"{style}-{seed}", style, unseen(style, seed))


def compare(
    files: Sequence[Path], styles: Sequence[str], ways: Sequence[bool], command: str, say: Callable[[str], None]
) -> Comparison:
    """All sets (``sets_of``), each in all ``ways``: with OR-Tools (True), and without. ``say`` gets a line about each.
    Raises ``BenchmarkError`` where OR-Tools is asked for and not there."""
    if True in ways and not cpsat_is_there():
        raise BenchmarkError("OR-Tools is not installed here: add --without-ortools")
    origin = provenance(command)
    rows = []
    for given in sets_of(files, styles):
        for cpsat in ways:
            rows.append(fitted(given, cpsat))
            say(in_words(rows[-1]))
    return Comparison(**origin, rows=tuple(rows))


def fitted(given: Given, cpsat: bool, limit: float = LIMIT) -> Fitted:
    """One set, laid out by a process of its own in ``limit`` seconds at most. Raises ``BenchmarkError`` where that
    fails."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "buffers.csv"
        file.write_text("".join(_csv(given.buffers)))
        start = ["-m", "forebay"] if cpsat else ["-c", WITHOUT]
        options = ["layout", str(file), "--capacity", str(given.buffers.capacity), "--seconds", f"{limit:g}", "--json"]
        began = time.perf_counter()
        try:
            done = subprocess.run(
                [sys.executable, *start, *options],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
                timeout=limit + GRACE,
            )
        except subprocess.TimeoutExpired:
            raise BenchmarkError(f"{given.name}: no end after {limit + GRACE:g} s") from None
        seconds = time.perf_counter() - began
    if done.returncode not in (0, 1):
        raise BenchmarkError(f"{given.name}: {done.stderr.strip()}")
    answer = json.loads(done.stdout)
    count = len(given.buffers.buffers)
    return Fitted(given.name, given.style, count, cpsat, answer["feasible"], answer["solve_seconds"], seconds)


def _csv(given: BufferSet) -> Iterator[str]:
    yield "id,lower,upper,size,alignment\n"
    for one in given.buffers:
        yield f"{one.id},{one.lower},{one.upper},{one.size},{one.alignment}\n"


def in_words(one: Fitted) -> str:
    """A line about ``one``."""
    how = "with OR-Tools" if one.cpsat else "without OR-Tools"
    answer = "fits" if one.found else "NOT FOUND"
    return (
        f"{one.name}, {one.buffers} buffers, {how}: {answer} after {one.solve_seconds:.2f} s of search, "
        f"{one.seconds:.2f} s in all"
    )
