"""The least device that requests find room on. No torch."""

from __future__ import annotations

from collections.abc import Callable

from forebay.units import MiB

__all__ = ["EXACT", "least"]

EXACT = 2 * MiB
"""Bytes within which it is found how many are needed: a page of small requests."""


def least(fits: Callable[[int], bool], low: int, exact: int = EXACT) -> int:
    """Bytes from ``low`` on that fit, where ``exact`` fewer do not, or are below ``low``."""
    if fits(low):
        return low
    step = exact
    while not fits(low + step):
        low, step = low + step, 2 * step
    high = low + step
    while high - low > exact:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high
