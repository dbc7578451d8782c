"""Where answers are printed."""

from __future__ import annotations

from typing import Final

from rich.console import Console

__all__ = ["console"]

LEAST: Final = 20
"""Columns: what says that it has fewer (``COLUMNS=0``) is taken for a terminal of the usual width."""

USUAL: Final = 80


def console(*, stderr: bool = False) -> Console:
    """The console of what a command prints."""
    found = Console(stderr=stderr)
    if found.width < LEAST:
        found.width = USUAL
    return found
