"""Contenders on one model: set up in processes of their own, taking turns, compared with plain in every round.

Every contender that is set up holds a model and its optimizer, and what its plan keeps on the host, whether it is its
turn or not: more of them than fit into memory would push each other out. So they come in *heats*, one after the other,
with plain in each: a ratio is always to plain in the same round, whichever heat it was.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from benchmarks.activations.record import Row, State
from benchmarks.case import Account, BenchmarkError, Contender, OutOfMemory
from benchmarks.measure import Runner, Turn, in_rotation

__all__ = ["TOLERANCE", "Entry", "Pace", "Start", "count", "heats", "merged", "race", "set_up"]

TOLERANCE = 1e-4
"""Relative: losses after an update, and all losses of a contender that is not exact."""

AT_ONCE = 2
"""Processes that are set up at the same time: most of it is Python's imports. Turns come one at a time."""

Start = Callable[[Contender], Runner]


@dataclass(frozen=True)
class Pace:
    """After ``warmup`` rounds come as many as fit into what is left of ``seconds``, but ``least`` at least and ``most``
    at most. Every turn has ``steps`` steps."""

    least: int = 3
    most: int = 9
    seconds: float = math.inf
    warmup: int = 1
    steps: int = 2

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most or self.warmup < 1 or self.steps < 2:
            raise BenchmarkError("needs 1 round, 1 of warm-up and 2 steps a turn at least: the second loss is compared")

    def rounds(self, warmed_up: float) -> int:
        """How many follow a warm-up that has taken ``warmed_up`` seconds."""
        left = (self.seconds - warmed_up) / max(warmed_up / self.warmup, 1e-9)
        return int(max(self.least, min(self.most, left)))


@dataclass
class Entry:
    """A contender under way, and the row that it will become."""

    contender: Contender
    row: Row
    runner: Runner | None = None
    seconds: dict[int, float] = field(default_factory=dict)

    def leave(self, error: BenchmarkError) -> None:
        """Takes the contender out and keeps what it did until now."""
        state = State.OUT_OF_MEMORY if isinstance(error, OutOfMemory) else State.FAILED
        self.row = replace(self.row, state=state, detail=str(error))
        self.close()

    def close(self) -> None:
        """Gives the runner back. A second call does nothing."""
        runner, self.runner = self.runner, None
        if runner is not None:
            runner.close()


@contextmanager
def set_up(entries: Sequence[Entry], start: Start) -> Iterator[None]:
    """All ``entries`` have runners inside, but those that could not start; nobody has one afterwards."""

    def begin(entry: Entry) -> None:
        try:
            entry.runner = start(entry.contender)
        except BenchmarkError as error:
            entry.leave(error)

    try:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(begin, entries))
        yield
    finally:
        for entry in entries:
            entry.close()


def count(entries: Sequence[Entry], start: Start) -> None:
    """Takes the peaks of ``entries`` into their rows, in processes that are never timed."""
    with set_up(entries, start):
        for entry in entries:
            if entry.runner is None:
                continue
            try:
                entry.runner.turn(0)  # the optimizer's states come with the first step
                entry.row = with_peaks(entry.row, entry.runner.account().peaks)
            except BenchmarkError as error:
                entry.leave(error)


def with_peaks(row: Row, peaks: Mapping[str, int]) -> Row:
    """``row`` with the peaks of the tiers."""
    return replace(row, device=peaks["device"], host=peaks["host"])


def heats(
    companies: Sequence[Sequence[Entry]], plain: str, room: int, footprint: Callable[[Row], int]
) -> list[list[Entry]]:
    """The entries of ``companies`` in their order, in groups that each take ``room`` bytes at most, or are plain and
    one other. A company comes into one group where one has the room: what is held against each other takes turns.

    ``footprint`` is what a contender takes while it is set up. ``plain`` is in every group, as an entry of its own.
    """
    baseline = next(entry for company in companies for entry in company if entry.row.name == plain)
    fresh = room - footprint(baseline.row)
    found: list[list[Entry]] = []
    left = 0
    for company in companies:
        others = [entry for entry in company if entry is not baseline]
        whole = sum(footprint(entry.row) for entry in others)
        for number, entry in enumerate(others):
            needed = footprint(entry.row)
            # A company that has room nowhere begins where there is any.
            if not found or needed > left or (number == 0 and left < whole <= fresh):
                found.append([Entry(baseline.contender, baseline.row)])
                left = fresh
            left -= needed
            found[-1].append(entry)
    return found or [[baseline]]


def merged(rows: Sequence[Row]) -> dict[str, Row]:
    """By name; who was in several heats has the rounds of all of them."""
    found: dict[str, Row] = {}
    for row in rows:
        known = found.get(row.name)
        if known is not None:
            row = replace(
                known,
                seconds=known.seconds + row.seconds,
                ratios=known.ratios + row.ratios,
                rounds=known.rounds + row.rounds,
            )
        found[row.name] = row
    return found


def race(
    entries: Sequence[Entry],
    plain: str,
    pace: Pace,
    say: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
    first: int = 0,
) -> tuple[Row, ...]:
    """Takes the rounds of ``entries``, which are set up, and returns their rows. ``plain`` is who ratios are taken to.

    ``first`` is the number of the first round, of the warm-up.

    Raises ``BenchmarkError`` where plain fails or one that is to be exact does not compute the same.
    """
    baseline = next(entry for entry in entries if entry.row.name == plain)
    start = clock()
    for index in range(first, first + pace.warmup):
        _round(entries, baseline, index)
    rounds = pace.rounds(clock() - start)
    first += pace.warmup
    for index in range(first, first + rounds):
        turns = _round(entries, baseline, index)
        for entry in entries:
            if entry.row.name in turns:
                entry.seconds[index] = turns[entry.row.name].seconds / pace.steps
        done = index - first + 1
        say(f"  round {done} of {rounds}: {len(turns)} turns, plain {turns[plain].seconds / pace.steps:.3f} s")
    return tuple(_scored(entry, baseline) for entry in entries)


def _round(entries: Sequence[Entry], baseline: Entry, index: int) -> dict[str, Turn]:
    """One turn of everyone who is still in, compared with plain's. A rival that computes something else is out."""
    turns: dict[str, Turn] = {}
    for entry in in_rotation(entries, index):
        if entry.runner is None:
            continue
        try:
            turns[entry.row.name] = entry.runner.turn(index)
        except BenchmarkError as error:
            entry.leave(error)
    if baseline.runner is None:
        raise BenchmarkError(f"plain did not run: {baseline.row.detail}")
    expected = turns[baseline.row.name].losses
    for entry in entries:
        if entry.row.name not in turns:
            continue
        try:
            _compare(entry.row, index, turns[entry.row.name].losses, expected)
        except BenchmarkError as error:
            if entry.row.exact:
                raise
            del turns[entry.row.name]
            entry.leave(error)
    return turns


def _compare(row: Row, index: int, losses: Sequence[float], expected: Sequence[float]) -> None:
    """Refuses a round in which ``row`` did not compute what plain did."""
    close = all(math.isclose(a, b, rel_tol=TOLERANCE) for a, b in zip(losses, expected, strict=True))
    if close and (not row.exact or losses[0].hex() == expected[0].hex()):
        return
    bound = "to the last bit" if row.exact else f"within {TOLERANCE}"
    raise BenchmarkError(
        f"round {index}: {row.name} has losses {tuple(losses)} and plain has {tuple(expected)}; the first must be "
        f"equal {bound}, the others within {TOLERANCE}"
    )


def _scored(entry: Entry, baseline: Entry) -> Row:
    """The row with its rounds; with the peaks of its whole run, if it was not counted before."""
    if entry.runner is not None and entry.row.device is None:
        try:
            entry.row = _accounted(entry.row, entry.runner.account())
        except BenchmarkError as error:
            entry.leave(error)
    row = entry.row
    shared = [index for index in entry.seconds if index in baseline.seconds]
    return replace(
        row,
        seconds=tuple(entry.seconds.values()),
        ratios=tuple(entry.seconds[index] / baseline.seconds[index] for index in shared),
        rounds=tuple(entry.seconds),
    )


def _accounted(row: Row, account: Account) -> Row:
    kept = account.counters.get("activations_kept", 0)
    words = f"{kept} activations stayed for want of room on the host" if kept else row.detail
    return replace(with_peaks(row, account.peaks), detail=words)
