"""A name that nobody knows: which one may have been meant. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

__all__ = ["meant"]


def meant(name: str, known: Iterable[str]) -> str:
    """``did you mean ...?`` with the one of ``known`` that is nearest to ``name``; nothing where none is near."""
    near = get_close_matches(name, list(known), n=1)
    return f"did you mean {near[0]}?" if near else ""
