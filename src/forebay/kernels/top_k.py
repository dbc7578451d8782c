"""The places of the largest magnitudes: radix selection, exact, in passes over memory that sort nothing.

The bits of an fp32 number without its sign are in the order of its magnitude. Three passes count how many elements have
each value of the first 11 of the 31 bits, then of the next 10 among those whose first bits are those of the k-th
largest, then of the rest: after that its bits are known. A last pass takes what is larger, and of its equals the first.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from forebay.kernels.jit import compiled

__all__ = ["largest"]

_MAGNITUDE: Final = 0x7FFFFFFF
"""All bits but the sign. NaN is larger than infinity, and that than all else."""

_LEVELS: Final = ((20, 11), (10, 10), (0, 10))
"""How far the bits of each pass are from the right, and how many they are."""


@compiled
def largest(bits: npt.NDArray[np.uint32], places: npt.NDArray[np.int32]) -> None:
    """Writes to ``places`` [k] where the k largest magnitudes of fp32 numbers are, in ascending order; ``bits`` [n, n
    >= k] are the bits of these numbers. Of equal magnitudes the first ones count."""
    count, left = bits.shape[0], places.shape[0]
    if left == 0:
        return
    counts = np.empty(2048, np.int64)
    known, least = np.int64(0), np.int64(0)
    for shift, width in _LEVELS:
        counts[:] = 0
        highest = (1 << width) - 1
        for i in range(count):
            magnitude = np.int64(bits[i]) & _MAGNITUDE
            if magnitude & known == least:
                counts[(magnitude >> shift) & highest] += 1
        value = np.int64(highest)
        while counts[value] < left:
            left -= counts[value]
            value -= 1
        known |= np.int64(highest) << shift
        least |= value << shift
    # ``left`` are those that are as large as the smallest one that is taken.
    taken = 0
    for i in range(count):
        magnitude = np.int64(bits[i]) & _MAGNITUDE
        if magnitude < least:
            continue
        if magnitude == least:
            if left == 0:
                continue
            left -= 1
        places[taken] = i
        taken += 1
