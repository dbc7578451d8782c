"""A step recorded by one guess after the other, as long as another one may take more memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, final

from forebay.errors import CaptureFailed
from forebay.profiler.granted import granted
from forebay.profiler.guesses import Draw, Guess, Place
from forebay.profiler.recorder import Recorder
from forebay.profiler.routing import EXTREMES
from forebay.trace import Trace

__all__ = ["Guessed", "Run", "Undecided", "guessed"]


@final
class Undecided(CaptureFailed):
    """The model has raised an error behind values that were made up, asked for at ``places`` (the last one first):
    nothing trains so."""

    def __init__(self, message: str, places: Sequence[Place]) -> None:
        super().__init__(message)
        self.places = places


@final
@dataclass(frozen=True)
class Run:
    """A step by one guess. ``arrays_made``: NumPy arrays were made up. ``keeps_cache``: its output has one."""

    trace: Trace
    recorder: Recorder
    arrays_made: bool
    keeps_cache: bool


@final
@dataclass(frozen=True)
class Guessed:
    """The first run, the traces of others that differ from it, and what is taken for granted, in words."""

    first: Run
    extremes: tuple[Trace, ...]
    notes: tuple[str, ...]


MOST_ANSWERS: Final = 32
"""Places whose answers are sought by trial, each with another run."""

Running = Callable[[Guess], Run]


def guessed(run: Running) -> Guessed:
    """``run`` by every guess that makes a difference. Raises ``CaptureFailed`` where there is none that can be
    recorded."""
    guess, answers = Guess(), dict[Place, Draw]()
    first = _settled(run, guess, answers)
    values = first.recorder.values
    routes = [replace(guess, routing=routing) for routing in EXTREMES] if values.asked else []
    draws = [replace(guess, draw=guess.draw.other)] if values.drawn or values.decided else []
    by_routes, by_draws = (_others(first.trace, guesses, run, answers) for guesses in (routes, draws))
    notes = granted(values, first.arrays_made, bool(by_routes), bool(by_draws))
    return Guessed(first, (*by_routes, *by_draws), tuple(notes))


def _settled(run: Running, guess: Guess, answers: dict[Place, Draw]) -> Run:
    """``run`` by ``guess``, with other answers where its own are errors to the model, which become known so: that of
    the last place before the error, or of the one before, where the last one asks for what the error says. Raises
    ``Undecided`` where all answers are errors."""
    while True:
        try:
            return run(replace(guess, answers=dict(answers)))
        except Undecided as error:
            place = next((place for place in error.places if place not in answers), None)
            if place is None or len(answers) == MOST_ANSWERS:
                raise
            answers[place] = guess.draw.other


def _others(trace: Trace, guesses: Iterable[Guess], run: Running, answers: dict[Place, Draw]) -> list[Trace]:
    """The traces by ``guesses`` that are not like ``trace``. What is guessed need not decide a size; then one guess is
    as good as any."""
    found: list[Trace] = []
    for guess in guesses:
        other = _settled(run, guess, answers).trace
        if _is_same(other, trace):
            break
        if not any(_is_same(other, one) for one in found):
            found.append(other)
    return found


def _is_same(one: Trace, other: Trace) -> bool:
    return (one.segments, one.visits) == (other.segments, other.visits)
