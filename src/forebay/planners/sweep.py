"""One planner asked with several budgets: more of the device is never slower.

A search tries as many drafts as it has time for, and with more room it tries others. So within a larger budget it may
miss by a little what it has found within a smaller one, though whatever keeps the smaller one keeps the larger one as
well. Who asks for several budgets has both answers, and takes the faster one: then the curve over the budgets never
rises, to the last digit.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

__all__ = ["no_slower"]


def no_slower(devices: Sequence[int], seconds: Sequence[float | None]) -> list[int]:
    """For each budget the place of the answer to take: its own, or that for less where that is faster.

    ``devices`` are bytes of the device, all else being the same; ``seconds`` those of a step of each answer (None:
    nothing fits). Raises ``ValueError`` where there are not as many of one as of the other.
    """
    taken = list(range(len(devices)))
    fastest: int | None = None
    pairs = zip(devices, (inf if s is None else s for s in seconds), strict=True)
    known = [(device, taking, place) for place, (device, taking) in enumerate(pairs)]
    for _, taking, place in sorted(known):
        if fastest is None or taking <= known[fastest][1]:
            fastest = place
        taken[place] = fastest
    return taken
