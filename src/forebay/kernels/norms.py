"""The sum of squares of gradients, in one pass and without widening them in memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from forebay.kernels.jit import compiled
from forebay.kernels.native import Form, load, loose_add
from forebay.kernels.shares import BLOCK, begin_of
from forebay.kernels.stamp import STAMP

__all__ = ["COLUMNS", "square_kernel"]

COLUMNS: Final = ("count", "gradient")
"""Columns of the table of rows."""

Kernel = Callable[[npt.NDArray[np.int64], int, int], float]


@cache
def square_kernel(gradient: Form) -> Kernel:
    """The kernel for a form: called with rows, share and shares, returns the sum of the squares of the share's values.

    Blocks of 256 are added in fp32 and their sums in fp64; inf where a block's sum is too large for fp32.
    """
    given, stamp = int(gradient), STAMP

    @compiled
    def kernel(rows: Any, share: Any, shares: Any) -> Any:
        squares = np.float64(stamp - stamp)
        for row in range(rows.shape[0]):
            count, g_at = rows[row, 0], rows[row, 1]
            begin, end = begin_of(row, count, share, shares), begin_of(row, count, share + 1, shares)
            for block in range(begin, end, BLOCK):
                part = np.float32(0)
                for i in range(block, min(block + BLOCK, end)):
                    g = load(g_at, i, given, 0)
                    part = loose_add(part, g * g)
                squares += part
        return squares

    return kernel
