"""Rounds. The contenders take turns in one run, because the host drifts by more than what is measured.

A turn is timed from the first step to the end of everything that the steps started: a contender that finishes its
work in the background pays for it in its own turn, not in the next one's.

The baseline runs some rounds alone before anyone else exists. A difference between alone and in company says that
the others slow it down, and is kept beside the result.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median
from typing import TypeVar, final

from benchmarks.case import Account, BenchmarkError, Case, Contender, DeviceKind, OutOfMemory, Running

__all__ = ["LocalRunner", "Outcome", "Runner", "Score", "Turn", "in_rotation", "noticing_exhaustion", "race"]

T = TypeVar("T")


class Outcome(StrEnum):
    """How a contender came out."""

    FINISHED = "finished"
    OUT_OF_MEMORY = "out of memory"


@dataclass(frozen=True)
class Turn:
    """Seconds of all steps of one turn, and the loss of each step."""

    seconds: float
    losses: tuple[float, ...]


@dataclass(frozen=True)
class Score:
    """One contender's raw figures. ``seconds`` and ``alone`` are per step, one entry a round; ``ratios`` are taken
    to the baseline's entry of the same round (empty where it has none).
    """

    contender: Contender
    outcome: Outcome
    detail: str
    seconds: tuple[float, ...]
    alone: tuple[float, ...]
    ratios: tuple[float, ...]
    account: Account

    @property
    def median(self) -> float | None:
        """Median seconds per step; None without a round."""
        return median(self.seconds) if self.seconds else None

    @property
    def ratio(self) -> float | None:
        """Median of the per-round ratios; None without one."""
        return median(self.ratios) if self.ratios else None


class Runner(ABC):
    """A contender as the rounds see it."""

    @abstractmethod
    def turn(self, index: int) -> Turn:
        """Runs the turn of round ``index`` (its batches depend on it). Raises ``OutOfMemory``."""

    @abstractmethod
    def account(self) -> Account:
        """What was used so far."""

    @abstractmethod
    def close(self) -> None:
        """Gives everything back. A second call does nothing."""


@contextmanager
def noticing_exhaustion(exhausted: Callable[[Exception], bool]) -> Iterator[None]:
    """Raises ``OutOfMemory`` in place of an error of which ``exhausted`` says that memory ran out."""
    try:
        yield
    except Exception as error:
        if not exhausted(error):
            raise
        raise OutOfMemory(f"{type(error).__name__}: {error}") from error


@final
class LocalRunner(Runner):
    """A contender in this process: times its turns by ``clock`` (seconds)."""

    def __init__(
        self, running: Running, steps: int, clock: Callable[[], float], exhausted: Callable[[Exception], bool]
    ) -> None:
        self._running: Running | None = running
        self._steps = steps
        self._clock = clock
        self._exhausted = exhausted

    def turn(self, index: int) -> Turn:
        running = self._live()
        with noticing_exhaustion(self._exhausted):
            running.reset(self._steps, first_seed=1 + index * self._steps)
            running.finish()
            start = self._clock()
            losses = [running.step(i) for i in range(self._steps)]
            running.finish()
            end = self._clock()
            return Turn(end - start, tuple(running.read(loss) for loss in losses))

    def account(self) -> Account:
        return self._live().account()

    def close(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.close()

    def _live(self) -> Running:
        if self._running is None:
            raise BenchmarkError("this contender was closed")
        return self._running


@dataclass
class _Entry:
    """A contender under way."""

    contender: Contender
    runner: Runner | None = None
    outcome: Outcome = Outcome.FINISHED
    detail: str = ""
    seconds: dict[int, float] = field(default_factory=dict)
    alone: list[float] = field(default_factory=list)
    account: Account = field(default_factory=Account)

    def leave(self, error: OutOfMemory) -> None:
        """Takes the contender out of the race and keeps what it did until now."""
        self.outcome, self.detail = Outcome.OUT_OF_MEMORY, str(error)
        self.close()

    def close(self) -> None:
        """Gives the runner back. A second call does nothing."""
        runner, self.runner = self.runner, None
        if runner is not None:
            runner.close()


def in_rotation(entries: Sequence[T], index: int) -> tuple[T, ...]:
    """``entries`` in the order of round ``index``: nobody always follows the same neighbour."""
    shift = index % len(entries)
    return (*entries[shift:], *entries[:shift])


def race(
    case: Case, start: Callable[[Contender], Runner], say: Callable[[str], None], alone_rounds: int = 3
) -> tuple[Score, ...]:
    """Runs ``case``: sets every contender up by ``start``, takes the rounds, returns a score each, in their order.

    Raises ``BenchmarkError`` when the losses of two contenders differ by more than the case allows.
    """
    entries = {c.name: _Entry(c) for c in case.contenders}
    baseline = entries[case.baseline]
    try:
        _run_alone(case, baseline, start, say, alone_rounds)
        ready = [entry for entry in entries.values() if entry.outcome is Outcome.FINISHED]
        # On a card the host has cores for all of them; on the cpu they would take each other's memory and time.
        with ThreadPoolExecutor(len(ready) if case.device is DeviceKind.CUDA else 1) as threads:
            list(threads.map(lambda entry: _set_up(entry, start, say), ready))
        for index in range(case.warmup + case.rounds):
            turns = _round(case, list(entries.values()), index)
            if index >= case.warmup:
                for name, turn in turns.items():
                    entries[name].seconds[index] = turn.seconds / case.steps
            say(f"round {index + 1}/{case.warmup + case.rounds}: " + _line(turns, case.steps))
        for entry in entries.values():
            if entry.runner is not None:
                entry.account = entry.runner.account()
        return tuple(_score(entry, baseline) for entry in entries.values())
    finally:
        for entry in entries.values():
            entry.close()


def _run_alone(
    case: Case, entry: _Entry, start: Callable[[Contender], Runner], say: Callable[[str], None], rounds: int
) -> None:
    """Rounds of one contender while there is no other, closed afterwards.

    It starts again with the others: its optimizer would be ahead of theirs.
    """
    _set_up(entry, start, say)
    for index in range(case.warmup + rounds):
        turns = _round(case, [entry], index)
        if index >= case.warmup:
            entry.alone.extend(turn.seconds / case.steps for turn in turns.values())
    entry.close()


def _set_up(entry: _Entry, start: Callable[[Contender], Runner], say: Callable[[str], None]) -> None:
    try:
        entry.runner = start(entry.contender)
    except OutOfMemory as error:
        entry.leave(error)
        say(f"{entry.contender.name}: {entry.detail}")


def _round(case: Case, entries: Sequence[_Entry], index: int) -> dict[str, Turn]:
    """One turn of every contender that is still in, compared."""
    turns: dict[str, Turn] = {}
    for entry in in_rotation(entries, index):
        if entry.runner is None:
            continue
        try:
            turns[entry.contender.name] = entry.runner.turn(index)
        except OutOfMemory as error:
            entry.leave(error)
    _compare(case, index, turns)
    return turns


def _compare(case: Case, index: int, turns: dict[str, Turn]) -> None:
    """Refuses a round in which two contenders did not compute the same."""
    reference: tuple[str, Turn] | None = None
    for name, turn in turns.items():
        if not all(math.isfinite(loss) for loss in turn.losses):
            raise BenchmarkError(f"case {case.name}, round {index}: {name} has losses {turn.losses}")
        if reference is None:
            reference = name, turn
            continue
        first, expected = reference
        if turn.losses[0].hex() != expected.losses[0].hex():
            raise BenchmarkError(
                f"case {case.name}, round {index}: from the same parameters {first} has loss {expected.losses[0]!r} "
                f"and {name} has {turn.losses[0]!r}; the contenders do not compute the same"
            )
        pairs = zip(turn.losses, expected.losses, strict=True)
        if not all(math.isclose(a, b, rel_tol=case.tolerance) for a, b in pairs):
            raise BenchmarkError(
                f"case {case.name}, round {index}: losses after updates differ by more than {case.tolerance}: "
                f"{first} {expected.losses}, {name} {turn.losses}"
            )


def _line(turns: dict[str, Turn], steps: int) -> str:
    return ", ".join(f"{name} {turn.seconds / steps:.4f} s" for name, turn in sorted(turns.items()))


def _score(entry: _Entry, baseline: _Entry) -> Score:
    shared = [i for i in entry.seconds if i in baseline.seconds]
    return Score(
        contender=entry.contender,
        outcome=entry.outcome,
        detail=entry.detail,
        seconds=tuple(entry.seconds.values()),
        alone=tuple(entry.alone),
        ratios=tuple(entry.seconds[i] / baseline.seconds[i] for i in shared),
        account=entry.account,
    )
