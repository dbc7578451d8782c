"""How far a policy has to go: the fewest of the things that it does, in their order, that fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

__all__ = ["fewest_that_fit"]

FEW: Final = 256
"""Of so many things bisection asks few questions, and finds fewer where what is over does not fall with each."""

SPARE: Final = 3
"""Questions more than bisection would ask, at most."""


def fewest_that_fit(most: int, over: Callable[[int], int]) -> int | None:
    """The fewest of ``most`` things with which nothing is over; None if something is with all of them. ``over``: bytes
    that lack with the first so many of them done (0 or less: it fits), which fall with each, about evenly.

    Of ``FEW`` things or fewer the middle is asked for. Of more each question is asked where a straight line between
    what is known on either side crosses 0 (regula falsi), or as near to it as bisection can still go on from with
    ``SPARE`` questions more (as the ITP method does: Oliveira and Takahashi, "An enhancement of the bisection method
    average performance preserving minmax optimality", ACM TOMS 47, 2021): a question is a profile of the whole step.
    """
    left, lacking = over(most), over(0) if most else 0
    if left > 0:
        return None
    if lacking <= 0:
        return 0
    low, high, questions = 0, most, most.bit_length() + SPARE
    while high - low > 1:
        questions -= 1
        share = lacking / (lacking - left) if most > FEW else 0.5
        crossing = low + int((high - low) * share)
        reach = 1 << questions
        middle = min(max(crossing, high - reach, low + 1), low + reach, high - 1)
        found = over(middle)
        if found > 0:
            low, lacking = middle, found
        else:
            high, left = middle, found
    return high
