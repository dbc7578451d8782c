"""What searches with many partial layouts at a time have in common, compiled. No torch."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.kernels.jit import inlined
from forebay.planners.layout.table import Column

__all__ = ["seen_before", "sort_by"]


@inlined
def sort_by(rows: Column, count: int, keys: Column) -> None:
    """Puts the first ``count`` rows into the order of their keys; they are nearly in it already."""
    for index in range(1, count):
        row = rows[index]
        place = index
        while place > 0 and keys[rows[place - 1]] > keys[row]:
            rows[place] = rows[place - 1]
            place -= 1
        rows[place] = row


@inlined
def seen_before(seen: NDArray[np.uint64], key: Any) -> bool:
    """Whether ``key``, which is not 0, was asked about before; ``seen`` begins as zeros, and is longer than there are
    keys."""
    slot = key % np.uint64(len(seen))
    while seen[slot] != 0:
        if seen[slot] == key:
            return True
        slot = (slot + np.uint64(1)) % np.uint64(len(seen))
    seen[slot] = key
    return False
