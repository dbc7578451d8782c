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
from forebay.kernels.lines import drain, lines_for, place_in, send
from forebay.kernels.native import Apart, Form, fma, load, loose_add, store, written
from forebay.kernels.shares import BLOCK, portions
from forebay.kernels.stamp import STAMP

__all__ = ["COLUMNS", "sgd_kernel", "sgd_scalars"]

COLUMNS: Final = ("count", "gradient", "parameter", "master", "momentum_buffer")
"""Columns of the table of rows. Without a master, or without momentum, the column is not looked at."""

Kernel = Callable[[npt.NDArray[np.int64], int, int, int, npt.NDArray[np.float32]], float]


def sgd_scalars(
    lr: float, momentum: float, dampening: float, weight_decay: float, *, first: bool, maximize: bool
) -> npt.NDArray[np.float32]:
    """The numbers of a step. ``first``: the momentum begins as the gradient, whatever its memory holds."""
    return np.array(
        [weight_decay, momentum, 1 - dampening, -lr, float(first), -1.0 if maximize else 1.0], dtype=np.float32
    )


@cache
def sgd_kernel(
    parameter: Form,
    gradient: Form,
    *,
    decay: bool,
    momentum: bool,
    nesterov: bool,
    apart: Apart = Apart.NOTHING,
) -> Kernel:
    """The kernel for these forms; a parameter that is not fp32 has an fp32 master.

    ``decay``: the weight decay is not 0. Called like ``adam_kernel``'s, and returns the same sum of squares.
    """
    own, given, fp32, stamp = int(parameter), int(gradient), int(Form.FP32), STAMP
    narrow = parameter is not Form.FP32
    moved, p_moved = bool(apart), Apart.WIDE in apart
    own_moved, b_moved = moved and narrow, Apart.MOMENTS in apart and momentum
    out, own_size = len(COLUMNS) if apart else 0, parameter.itemsize
    p_made, b_made = written(1, p_moved), written(2, b_moved)

    @compiled
    def kernel(rows: Any, share: Any, shares: Any, counter: Any, scalars: Any) -> Any:
        shrink, keep, take, pace, fresh, sign = (
            scalars[0],
            scalars[1],
            scalars[2],
            scalars[3],
            scalars[4] != 0,
            scalars[5],
        )
        squares = np.float64(stamp - stamp)
        lines = lines_for(3) if moved else 0
        p_lines, own_lines, b_lines = lines if p_moved else 0, lines if own_moved else 0, lines if b_moved else 0
        for row, begin, end in portions(rows.ctypes.data, rows.shape, share, shares, counter):
            count, g_at, p_at = rows[row, 0], rows[row, 1], rows[row, 3] if narrow else rows[row, 2]
            own_out, p_out = rows[row, out + 2], rows[row, out + 3] if narrow else rows[row, out + 2]
            b_at, b_out = rows[row, 4], rows[row, out + 4]
            last = min(end, count - count % VECTOR)
            for block in range(begin, end, BLOCK):
                part = np.float32(0)
                p_to, own_to = place_in(p_lines, 0, p_out, block, 4), place_in(own_lines, 1, own_out, block, own_size)
                b_to = place_in(b_lines, 2, b_out, block, 4)
                for whole in (True, False):
                    first = block if whole else max(block, last)
                    stop = min(block + BLOCK, last if whole else end)
                    for i in range(first, stop):
                        g = load(g_at, i, given, 0)
                        part = loose_add(part, g * g)
                        p = load(p_at, i, fp32, 1)
                        g = g * sign
                        if decay:
                            g = fma(p, shrink, g)
                        if momentum:
                            b = load(b_at, i, fp32, 2)
                            grown = fma(g, take, b * keep) if whole else fma(b, keep, g * take)
                            b = g if fresh else grown
                            store(b_to, i, b, fp32, b_made)
                            g = fma(b, keep, g) if nesterov else b
                        p = fma(g, pace, p)
                        store(p_to, i, p, fp32, p_made)
                        if narrow:
                            store(own_to, i, p, own, 5)
                squares += part
                made = min(BLOCK, end - block)
                send(p_lines, 0, p_out, block, 4, made)
                send(own_lines, 1, own_out, block, own_size, made)
                send(b_lines, 2, b_out, block, 4, made)
        drain(lines)
        return squares

    return kernel
