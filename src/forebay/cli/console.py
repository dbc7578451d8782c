"""Where commands print to: answers on stdout, all else on stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from json import dumps
from typing import TYPE_CHECKING, Final

from rich.console import Console

from forebay.cli.streams import drop_unwritten
from forebay.errors import StorageError

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["console", "print_answer", "print_json", "print_lines"]

LEAST: Final = 20
"""Columns: what says that it has fewer (``COLUMNS=0``) is taken for a terminal of the usual width."""

USUAL: Final = 80


def console(*, stderr: bool = False) -> Console:
    """The console of what a command prints."""
    found = Console(stderr=stderr)
    if found.width < LEAST:
        found.width = USUAL
    return found


def print_answer(answer: RenderableType) -> None:
    """Prints a table, or several, on stdout. Raises ``StorageError`` where stdout does not take it whole."""
    with _answering():
        console().print(answer)


def print_lines(*lines: str) -> None:
    """Prints ``lines`` on stdout as they are, for one to copy. Raises as ``print_answer`` does."""
    with _answering():
        for line in lines:
            print(line)


def print_json(found: object) -> None:
    """Prints ``found`` as JSON on stdout. Raises as ``print_answer`` does."""
    print_lines(dumps(found))


@contextmanager
def _answering() -> Iterator[None]:
    """Around what prints a part of the answer and nothing else."""
    if sys.stdout is None:
        raise StorageError("cannot write the answer to stdout: it is closed")
    try:
        yield
        # Else the interpreter does it at its end, and says in its own words what stands in the way.
        sys.stdout.flush()
    except BrokenPipeError:
        raise  # who reads the answer has had enough (``| head``): typer ends without a word
    except OSError as error:
        drop_unwritten(sys.stdout)
        raise StorageError(f"cannot write the answer to stdout: {error.strerror}") from None
