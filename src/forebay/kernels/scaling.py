"""Values times a factor, in place.

The product is made in fp32 and rounded once, as torch's ``mul_`` with a number makes it for all three forms
(``aten/src/ATen/native/cpu/BinaryOpsKernel.cpp``, ``mul_kernel``).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from forebay.kernels.jit import compiled
from forebay.kernels.native import Form, load, store
from forebay.kernels.shares import portions
from forebay.kernels.stamp import STAMP

__all__ = ["COLUMNS", "scaling_kernel"]

COLUMNS: Final = ("count", "values")
"""Columns of the table of rows."""

Kernel = Callable[[npt.NDArray[np.int64], int, int, int, np.float32], float]


@cache
def scaling_kernel(values: Form) -> Kernel:
    """The kernel for values of this form: ``kernel(rows, share, shares, counter, factor)``, which returns 0."""
    form, stamp = int(values), STAMP

    @compiled
    def kernel(rows: Any, share: Any, shares: Any, counter: Any, factor: Any) -> Any:
        for row, begin, end in portions(rows.ctypes.data, rows.shape, share, shares, counter):
            at = rows[row, 1]
            for i in range(begin, end):
                store(at, i, load(at, i, form, 0) * factor, form, 0)
        return np.float64(stamp - stamp)

    return kernel
