"""Pseudo-random numbers inside compiled searches, the same on every machine. No torch."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from forebay.kernels.jit import part

__all__ = ["SEED", "draw", "sown"]

SEED: Final = 0x9E3779B97F4A7C15
"""Where sequences begin: the same search for the same buffers."""


def sown() -> NDArray[np.uint64]:
    """The state of a sequence that has not begun."""
    return np.array([SEED], np.uint64)


@part
def draw(state: NDArray[np.uint64]) -> Any:
    """The next of a sequence (xorshift64): 0 to 2^32 - 1."""
    value = state[0]
    value ^= value << np.uint64(13)
    value ^= value >> np.uint64(7)
    value ^= value << np.uint64(17)
    state[0] = value
    return np.int64(value >> np.uint64(32))
