"""How a verb ends: its exit code, and what an error says."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from forebay.errors import ForebayError, UsageError

__all__ = ["EXIT_INTERRUPTED", "EXIT_MISUSE", "EXIT_NO", "errors_as_messages"]

EXIT_NO = 1
EXIT_MISUSE = 2
EXIT_INTERRUPTED = 130


@contextmanager
def errors_as_messages() -> Iterator[None]:
    """Turns forebay's own errors and Ctrl-C into one message on stderr and an exit code."""
    try:
        yield
    except ForebayError as error:
        print(f"forebay: {error}", file=sys.stderr)
        raise typer.Exit(EXIT_MISUSE if isinstance(error, UsageError) else EXIT_NO) from None
    except KeyboardInterrupt:
        print("forebay: stopped by Ctrl-C; what was not saved is lost", file=sys.stderr)
        raise typer.Exit(EXIT_INTERRUPTED) from None
