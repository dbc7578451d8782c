"""A step recorded by one guess after the other, as long as another one may take more memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, final

from forebay.errors import CaptureFailed
from forebay.profiler.batch import NothingToTrain
from forebay.profiler.granted import granted
from forebay.profiler.guesses import Draw, Guess, Place
from forebay.profiler.recorder import Recorder
from forebay.profiler.routing import EXTREMES
from forebay.trace import Leaves, Trace

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
    """A step by one guess. ``arrays_made``: NumPy arrays were made up. ``remarks`` are on its output, in words.
    ``changes_modules``: attributes of the model's modules are others behind it."""

    trace: Trace
    recorder: Recorder
    arrays_made: bool
    remarks: tuple[str, ...]
    changes_modules: bool


@final
@dataclass(frozen=True)
class Guessed:
    """The run that is taken for all steps, what its forward ``leaves`` in the modules, the traces of others that differ
    from it, and what is taken for granted, in words."""

    typical: Run
    leaves: Leaves
    extremes: tuple[Trace, ...]
    notes: tuple[str, ...]


MOST_ANSWERS: Final = 32
"""Places whose answers are sought by trial, each with another run."""

Running = Callable[[Guess], Run]


def guessed(run: Running) -> Guessed:
    """``run`` by every guess that makes a difference. Raises ``CaptureFailed`` where there is none that can be
    recorded.

    Where a first step leaves something for the next ones and these run other ops for it, one of these is taken for all,
    and the first one is an extreme.
    """
    guess, answers, notes = Guess(), dict[Place, Draw](), list[str]()
    typical = _settled(run, guess, answers)
    begin: tuple[Trace, ...] = ()
    leaves = Leaves.ALWAYS if typical.changes_modules else Leaves.NOTHING
    if typical.changes_modules:
        later = replace(guess, later=True)
        try:
            second = _settled(run, later, answers)
        except CaptureFailed as error:
            notes.append(f"every step is taken to be as the first one, since a second one cannot be recorded: {error}")
        else:
            leaves = Leaves.ALWAYS if second.changes_modules else Leaves.ONCE
            if not _is_same(second.trace, typical.trace):
                begin = (typical.trace, *_by_draws_and_routes(run, guess, typical, answers)[0])
                guess, typical = later, second
    others, by_routes, by_draws = _by_draws_and_routes(run, guess, typical, answers)
    notes += granted(typical.recorder.values, typical.arrays_made, by_routes, by_draws)
    return Guessed(typical, leaves, (*begin, *others), tuple(notes))


def _by_draws_and_routes(
    run: Running, guess: Guess, found: Run, answers: dict[Place, Draw]
) -> tuple[list[Trace], bool, bool]:
    """The traces by other routes and draws than those of ``guess``, by which ``found`` is recorded; whether there are
    some by routes, and some by draws."""
    values = found.recorder.values
    routes = [replace(guess, routing=routing) for routing in EXTREMES] if values.asked else []
    draws = [replace(guess, draw=guess.draw.other)] if values.drawn or values.decided else []
    by_routes, by_draws = (_others(found.trace, guesses, run, answers) for guesses in (routes, draws))
    return [*by_routes, *by_draws], bool(by_routes), bool(by_draws)


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
        try:
            other = _settled(run, guess, answers).trace
        except NothingToTrain:
            continue  # nobody trains so: plain PyTorch has no backward either
        if _is_same(other, trace):
            break
        if not any(_is_same(other, one) for one in found):
            found.append(other)
    return found


def _is_same(one: Trace, other: Trace) -> bool:
    return (one.segments, one.visits) == (other.segments, other.visits)
