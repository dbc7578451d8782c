"""SGD with momentum, fp32 states: gradient, parameter, master and momentum in one pass.

``torch.optim.SGD``, with the operations of torch's fused kernel (``aten/src/ATen/native/cpu/FusedSGDKernel.cpp``) and
the contractions of its compiler, as in ``adam``: the momentum of the last ``count % 8`` elements of a row is
contracted the other way round.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from forebay.kernels.adam import VECTOR
from forebay.kernels.jit import compiled
from forebay.kernels.native import Form, fma, load, loose_add, store
from forebay.kernels.shares import BLOCK, begin_of
from forebay.kernels.stamp import STAMP

__all__ = ["COLUMNS", "sgd_kernel", "sgd_scalars"]

COLUMNS: Final = ("count", "gradient", "parameter", "master", "momentum_buffer")
"""Columns of the table of rows. Without a master, or without momentum, the column is not looked at."""

Kernel = Callable[[npt.NDArray[np.int64], int, int, npt.NDArray[np.float32]], float]


def sgd_scalars(
    lr: float, momentum: float, dampening: float, weight_decay: float, *, first: bool, maximize: bool
) -> npt.NDArray[np.float32]:
    """The numbers of a step. ``first``: the momentum begins as the gradient, whatever its memory holds."""
    return np.array(
        [weight_decay, momentum, 1 - dampening, -lr, float(first), -1.0 if maximize else 1.0], dtype=np.float32
    )


@cache
def sgd_kernel(parameter: Form, gradient: Form, *, decay: bool, momentum: bool, nesterov: bool) -> Kernel:
    """The kernel for these forms; a parameter that is not fp32 has an fp32 master.

    ``decay``: the weight decay is not 0. Called like ``adam_kernel``'s, and returns the same sum of squares.
    """
    own, given, fp32, stamp = int(parameter), int(gradient), int(Form.FP32), STAMP
    narrow = parameter is not Form.FP32

    @compiled
    def kernel(rows: Any, share: Any, shares: Any, scalars: Any) -> Any:
        shrink, keep, take, pace, fresh, sign = (
            scalars[0],
            scalars[1],
            scalars[2],
            scalars[3],
            scalars[4] != 0,
            scalars[5],
        )
        squares = np.float64(stamp - stamp)
        for row in range(rows.shape[0]):
            count, g_at, own_at, wide_at, b_at = rows[row, 0], rows[row, 1], rows[row, 2], rows[row, 3], rows[row, 4]
            target_at = wide_at if narrow else own_at
            begin, end = begin_of(row, count, share, shares), begin_of(row, count, share + 1, shares)
            last = min(end, count - count % VECTOR)
            for block in range(begin, end, BLOCK):
                part = np.float32(0)
                for whole in (True, False):
                    first = block if whole else max(block, last)
                    stop = min(block + BLOCK, last if whole else end)
                    for i in range(first, stop):
                        g = load(g_at, i, given, 0)
                        part = loose_add(part, g * g)
                        p = load(target_at, i, fp32, 1)
                        g = g * sign
                        if decay:
                            g = fma(p, shrink, g)
                        if momentum:
                            b = load(b_at, i, fp32, 2)
                            grown = fma(g, take, b * keep) if whole else fma(b, keep, g * take)
                            b = g if fresh else grown
                            store(b_at, i, b, fp32, 2)
                            g = fma(b, keep, g) if nesterov else b
                        p = fma(g, pace, p)
                        store(target_at, i, p, fp32, 1)
                        if narrow:
                            store(own_at, i, p, own, 5)
                squares += part
        return squares

    return kernel
