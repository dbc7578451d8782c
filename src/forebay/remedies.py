"""What would fit instead of a plan that was refused. No torch, and nothing of forebay above it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Remedy"]


@dataclass(frozen=True)
class Remedy:
    """One change with which a plan that was refused would fit, ``words`` says it to the user.

    ``what`` is ``device``, ``host`` or ``disk`` (a larger budget), ``batch`` (a smaller batch or a shorter sequence,
    ``share`` of the one asked for), ``blocks`` (smaller ones), ``update`` (in backward), ``optimizer`` (one with fewer
    states, named ``optimizer``) or ``policy`` (another one, within the same budgets). ``needed`` and ``allowed`` are
    bytes. ``estimate`` says that the figure was not computed for that very change. ``besides``: it is no
    alternative, it is asked for whichever of the others is chosen.
    """

    what: str
    needed: int
    allowed: int
    words: str
    estimate: bool = False
    share: float = 1.0
    optimizer: str = ""
    besides: bool = False
