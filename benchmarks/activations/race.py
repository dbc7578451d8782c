"""Contenders on one model: set up in processes of their own, taking turns, compared with plain in every round."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from benchmarks.activations.record import Row, State
from benchmarks.case import Account, BenchmarkError, Contender, OutOfMemory
from benchmarks.measure import Runner, Turn, in_rotation

__all__ = ["TOLERANCE", "Entry", "Start", "count", "race", "set_up"]

TOLERANCE = 1e-4
"""Relative: losses after an update, and all losses of a contender that is not exact."""

AT_ONCE = 2
"""Processes that are set up at the same time: most of it is Python's imports. Turns come one at a time."""

Start = Callable[[Contender], Runner]


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


def race(
    entries: Sequence[Entry], plain: str, rounds: int, warmup: int, steps: int, say: Callable[[str], None]
) -> tuple[Row, ...]:
    """Takes the rounds of ``entries``, which are set up, and returns their rows. ``plain`` is who ratios are taken to.

    Raises ``BenchmarkError`` where plain fails or two contenders do not compute the same.
    """
    baseline = next(entry for entry in entries if entry.row.name == plain)
    for index in range(warmup + rounds):
        turns = _round(entries, baseline, index)
        if index >= warmup:
            for entry in entries:
                if entry.row.name in turns:
                    entry.seconds[index] = turns[entry.row.name].seconds / steps
        say(f"  round {index + 1} of {warmup + rounds}: plain {turns[plain].seconds / steps:.3f} s")
    return tuple(_scored(entry, baseline) for entry in entries)


def _round(entries: Sequence[Entry], baseline: Entry, index: int) -> dict[str, Turn]:
    """One turn of everyone who is still in, compared with plain's."""
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
        if entry.row.name in turns:
            _compare(entry.row, index, turns[entry.row.name].losses, expected)
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
    )


def _accounted(row: Row, account: Account) -> Row:
    kept = account.counters.get("activations_kept", 0)
    words = f"{kept} activations stayed for want of room on the host" if kept else row.detail
    return replace(with_peaks(row, account.peaks), detail=words)
