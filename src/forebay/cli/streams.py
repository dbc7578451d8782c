"""The standard streams of a process: closed ones, those that take nothing, and what names they take."""

from __future__ import annotations

import os
import sys
from io import TextIOWrapper
from typing import Final, TextIO

__all__ = ["drop_unwritten", "keep_standard_descriptors", "print_any_name", "settle"]

LAST_STANDARD: Final = 2
"""The descriptor of stderr."""


def keep_standard_descriptors() -> None:
    """Closed ones (``>&-``) become the null device. Else the next file that is opened, of weights maybe, would be in
    their place, and take what libraries say there."""
    while (found := os.open(os.devnull, os.O_RDWR)) <= LAST_STANDARD:
        os.set_inheritable(found, True)  # as standard streams are: a process that is started needs them as much
    os.close(found)


def print_any_name() -> None:
    """Has stdout take names of files that are no UTF-8, as the bytes that they are: they are there to be copied."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="surrogateescape")


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
