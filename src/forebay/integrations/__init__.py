"""forebay inside training frameworks: each file is a thin one over the framework's public API.

Nothing here is imported by ``import forebay``. A library that is not installed is refused with the line that installs
it.
"""

from __future__ import annotations

from forebay.errors import MissingLibrary

__all__ = ["missing"]


def missing(extra: str, error: ImportError) -> MissingLibrary:
    """What to raise where a library of ``forebay[extra]`` could not be imported."""
    what = error.name or str(error)
    return MissingLibrary(f"{what} is not installed or cannot be imported; pip install 'forebay[{extra}]'")
