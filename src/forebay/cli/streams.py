"""The standard streams of a process: closed ones, those that take nothing, and what names they take."""

from __future__ import annotations

import codecs
import os
import sys
from io import TextIOWrapper
from typing import Final, TextIO

__all__ = ["ENCODING_REMEDY", "drop_unwritten", "keep_standard_descriptors", "print_any_name", "settle"]

LAST_STANDARD: Final = 2
"""The descriptor of stderr."""

ENCODING_REMEDY: Final = "set PYTHONUTF8=1, or a locale of UTF-8 (LC_ALL=C.UTF-8)"
"""What helps where the encoding of this process lacks a character."""

_ERRORS: Final = "forebay-any-name"


def keep_standard_descriptors() -> None:
    """Closed ones (``>&-``) become the null device. Else the next file that is opened, of weights maybe, would be in
    their place, and take what libraries say there."""
    while (found := os.open(os.devnull, os.O_RDWR)) <= LAST_STANDARD:
        os.set_inheritable(found, True)  # as standard streams are: a process that is started needs them as much
    os.close(found)


def print_any_name() -> None:
    """Has stdout take names of files that are no UTF-8, as the bytes that they are: they are there to be copied. What
    else its encoding lacks is a question mark."""
    codecs.register_error(_ERRORS, _as_it_can)
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors=_ERRORS)


def _as_it_can(error: UnicodeError) -> tuple[str | bytes, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    # One at a time: bytes of a name and other characters may be side by side.
    one = UnicodeEncodeError(error.encoding, error.object, error.start, error.start + 1, error.reason)
    try:
        return codecs.lookup_error("surrogateescape")(one)
    except UnicodeEncodeError:
        return "?", one.end


def drop_unwritten(stream: TextIO) -> None:
    """Has what ``stream`` could not write, and what comes, go nowhere: at its end the interpreter tries once more, and
    would say so in its own words and with an exit code of its own."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def settle(stream: TextIO | None) -> None:
    """Writes what ``stream`` has not written yet, or drops it. None, which a closed stream is, does nothing."""
    if stream is None:
        return
    try:
        stream.flush()
    except OSError:
        drop_unwritten(stream)
