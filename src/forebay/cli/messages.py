"""How a verb ends: its exit code, and what an error says."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from forebay.cli.streams import ENCODING_REMEDY, settle
from forebay.errors import ForebayError, UsageError

__all__ = ["EXIT_INTERRUPTED", "EXIT_MISUSE", "EXIT_NO", "errors_as_messages", "say"]

EXIT_NO = 1
EXIT_MISUSE = 2
EXIT_INTERRUPTED = 130


@contextmanager
def errors_as_messages() -> Iterator[None]:
    """Turns forebay's own errors, Ctrl-C and a name that this process cannot write into one message on stderr and an
    exit code."""
    try:
        yield
    except ForebayError as error:
        say(str(error))
        raise typer.Exit(EXIT_MISUSE if isinstance(error, UsageError) else EXIT_NO) from None
    except UnicodeEncodeError as error:
        if error.encoding == "utf-8":
            raise
        say(f"{error.object!a} cannot be written in {error.encoding}, as names of files are here; {ENCODING_REMEDY}")
        raise typer.Exit(EXIT_MISUSE) from None
    except KeyboardInterrupt:
        say("stopped by Ctrl-C; what was not saved is lost")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    finally:
        settle(sys.stderr)


def say(message: str) -> None:
    """Prints ``message`` on stderr, in the name of the program. Where stderr takes nothing it is lost: it must neither
    go to stdout, among answers, nor end what the program does."""
    if sys.stderr is None:
        return
    try:
        print(f"forebay: {message}", file=sys.stderr)
    except OSError:
        return
