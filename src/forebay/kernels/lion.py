"""Lion with an fp32 momentum, in one pass: Chen et al. (2023), "Symbolic discovery of optimization algorithms",
algorithm 2. Each operation is rounded by itself, in the order of the paper. Parameters in bf16 that have no master are
rounded up or down by chance (``chance``).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from forebay.kernels.chance import parameter_salt
from forebay.kernels.jit import compiled
from forebay.kernels.lines import drain, lines_for, place_in, send
from forebay.kernels.native import Apart, Form, Kept, load, loose_add, store, store_master, written
from forebay.kernels.shares import BLOCK, portions
from forebay.kernels.stamp import STAMP

__all__ = ["COLUMNS", "lion_kernel", "lion_scalars"]

COLUMNS: Final = ("count", "gradient", "parameter", "master", "exp_avg", "place")
"""Columns of the table of rows. Without a master the column is not looked at. ``place``: as in ``adam``."""

Kernel = Callable[[npt.NDArray[np.int64], int, int, int, npt.NDArray[np.float32], int], float]


def lion_scalars(lr: float, beta1: float, beta2: float, weight_decay: float) -> npt.NDArray[np.float32]:
    """The numbers of a step; the decay is decoupled, ``parameter *= 1 - lr * weight_decay``."""
    return np.array([1 - lr * weight_decay, beta1, 1 - beta1, beta2, 1 - beta2, lr], dtype=np.float32)


@cache
def lion_kernel(parameter: Form, gradient: Form, *, apart: Apart = Apart.NOTHING, kept: Kept = Kept.WIDE) -> Kernel:
    """The kernel for these forms; called like ``adam_kernel``'s, and returns the same sum of squares. A parameter
    that is not fp32 has a whole fp32 master or none, as there.

    A parameter whose direction is exactly 0 decays and moves no further; one whose direction is NaN becomes NaN.
    """
    kept.check(parameter)
    own, given, fp32, stamp = int(parameter), int(gradient), int(Form.FP32), STAMP
    narrow, how, p_size = parameter is not Form.FP32 and kept is not Kept.DRAWN, int(kept), kept.itemsize
    moved, p_moved, m_moved = bool(apart), Apart.WIDE in apart, Apart.MOMENTS in apart
    own_moved = moved and narrow
    out, own_size, p_form = len(COLUMNS) if apart else 0, parameter.itemsize, int(kept.form)
    p_made, m_made = written(1, p_moved), written(2, m_moved)

    @compiled
    def kernel(rows: Any, share: Any, shares: Any, counter: Any, scalars: Any, seed: Any) -> Any:
        decay, beta1, rest1, beta2, rest2, lr = scalars[0], scalars[1], scalars[2], scalars[3], scalars[4], scalars[5]
        zero = np.float32(0)
        squares = np.float64(stamp - stamp)
        lines = lines_for(3) if moved else 0
        p_lines, own_lines, m_lines = lines if p_moved else 0, lines if own_moved else 0, lines if m_moved else 0
        for row, begin, end in portions(rows.ctypes.data, rows.shape, share, shares, counter):
            g_at, p_at = rows[row, 1], rows[row, 3] if narrow else rows[row, 2]
            own_out, p_out = rows[row, out + 2], rows[row, out + 3] if narrow else rows[row, out + 2]
            m_at, m_out = rows[row, 4], rows[row, out + 4]
            salt = parameter_salt(seed, rows[row, 5])
            for block in range(begin, end, BLOCK):
                part = np.float32(0)
                p_to = place_in(p_lines, 0, p_out, block, p_size)
                own_to = place_in(own_lines, 1, own_out, block, own_size)
                m_to = place_in(m_lines, 2, m_out, block, 4)
                for i in range(block, min(block + BLOCK, end)):
                    g, p, m = load(g_at, i, given, 0), load(p_at, i, p_form, 1), load(m_at, i, fp32, 2)
                    part = loose_add(part, g * g)
                    c = m * beta1 + g * rest1
                    # The last case is 0, or NaN as it is.
                    move = lr if c > zero else (-lr if c < zero else c)
                    p = p * decay - move
                    store_master(p_to, i, p, salt, how, p_made)
                    store(m_to, i, m * beta2 + g * rest2, fp32, m_made)
                    if narrow:
                        store(own_to, i, p, own, 5)
                squares += part
                made = min(BLOCK, end - block)
                send(p_lines, 0, p_out, block, p_size, made)
                send(own_lines, 1, own_out, block, own_size, made)
                send(m_lines, 2, m_out, block, 4, made)
        drain(lines)
        return squares

    return kernel
