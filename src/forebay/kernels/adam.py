"""Adam and AdamW with moments in fp32 or bf16: gradient, parameter, master and moments in one pass.

Kingma and Ba (2015), algorithm 1; Loshchilov and Hutter (2019), algorithm 2; the largest second moment of Reddi et al.
(2018), algorithm 2. The operations and their order are those of torch's fused kernel
(``aten/src/ATen/native/cpu/FusedAdamKernel.cpp``), with the contractions that its compiler chose where the processor
has a fused multiply-add: elements are handled in vectors, and the last ``count % 8`` of a row one by one, where the
second moment is contracted the other way round. With torch 2.13 on x86-64 with AVX2 or AVX-512 the results are
torch's to the last bit.

Moments in bf16 are rounded up or down by chance (``chance``), and so are parameters in bf16 that have no master.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from forebay.kernels.chance import parameter_salt
from forebay.kernels.chance_numbers import SPREAD
from forebay.kernels.jit import compiled
from forebay.kernels.lines import drain, lines_for, place_in, send
from forebay.kernels.native import (
    Apart,
    Form,
    Kept,
    fma,
    load,
    load_master,
    loose_add,
    store,
    store_drawn,
    store_master,
    with_tie,
    without_tie,
    written,
)
from forebay.kernels.shares import BLOCK, portions
from forebay.kernels.stamp import STAMP

__all__ = ["COLUMNS", "adam_kernel", "adam_scalars"]

COLUMNS: Final = ("count", "gradient", "parameter", "master", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "place")
"""Columns of the table of rows. Without a master, or without a largest second moment, the column is not looked at.
``place`` tells the row's first element from all others of the model: what chance decides hangs on it and on the seed,
and not on how elements are cut into rows."""

VECTOR: Final = 8
"""Elements: what torch handles at once at the least; see above."""

Kernel = Callable[[npt.NDArray[np.int64], int, int, int, npt.NDArray[np.float32], int], float]


def adam_scalars(
    step: int, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, *, coupled: bool, maximize: bool
) -> npt.NDArray[np.float32]:
    """The numbers of a step, counted from 1, computed in double precision and rounded once, as torch does.

    ``coupled`` is what the kernel was made with.
    """
    decay = weight_decay if coupled else 1 - lr * weight_decay
    rise = np.float32(1 - beta1)
    # torch's lerp: from the end that is nearer.
    near = abs(rise) < 0.5
    return np.array(
        [
            decay,
            rise if near else rise - np.float32(1),
            float(near),
            beta2,
            1 - beta2,
            math.sqrt(1 - beta2**step),
            eps,
            -(lr / (1 - beta1**step)),
            -1.0 if maximize else 1.0,
        ],
        dtype=np.float32,
    )


def _check_forms(parameter: Form, state: Form, kept: Kept) -> None:
    kept.check(parameter)
    if state is Form.FP16:
        raise ValueError("moments are fp32 or bf16, not fp16")
    if kept is Kept.LOWER and state is not Form.FP32:
        raise ValueError("only beside moments in fp32 are masters kept as halves")


@cache
def adam_kernel(
    parameter: Form,
    gradient: Form,
    *,
    coupled: bool,
    amsgrad: bool,
    state: Form = Form.FP32,
    apart: Apart = Apart.NOTHING,
    kept: Kept = Kept.WIDE,
) -> Kernel:
    """The kernel for these forms; what it makes of a parameter is ``kept`` so: one that is not fp32 has an fp32 master,
    the lower half of one, which is for bf16 and moments in fp32, or none, which is for bf16.

    ``coupled``: a weight decay that is part of the gradient (Adam), and not 0. ``state``, fp32 or bf16, is the form of
    the moments; ``apart`` what is written elsewhere than read.

    Call it with the table of rows, the share, the number of shares, 0, ``adam_scalars`` and the seed of the step; it
    returns the sum of the squares of the share's gradients, inf where one is too large for fp32. With the address of a
    counter in the place of the 0, shares are taken from there until none is left, whichever was named. Raises
    ``ValueError`` for moments in fp16, whose range a second moment leaves, and for halves of what is not in bf16.
    """
    _check_forms(parameter, state, kept)
    own, given, held, fp32, stamp = int(parameter), int(gradient), int(state), int(Form.FP32), STAMP
    narrow, drawn = parameter is not Form.FP32 and kept is not Kept.DRAWN, state is Form.BF16
    moved, p_moved, m_moved = bool(apart), Apart.WIDE in apart, Apart.MOMENTS in apart
    own_moved, top_moved = moved and narrow, m_moved and amsgrad
    out, own_size, size = len(COLUMNS) if apart else 0, parameter.itemsize, state.itemsize
    p_made, m_made, v_made, top_made = written(1, p_moved), *(written(stream, m_moved) for stream in (2, 3, 4))
    own_made, p_size, how = written(5, own_moved), kept.itemsize, int(kept)

    @compiled
    def kernel(rows: Any, share: Any, shares: Any, counter: Any, scalars: Any, seed: Any) -> Any:
        decay, rate, near, beta2 = scalars[0], scalars[1], scalars[2] != 0, scalars[3]
        rest2, bias2, eps, pace, sign = scalars[4], scalars[5], scalars[6], scalars[7], scalars[8]
        squares = np.float64(stamp - stamp)
        lines = lines_for(5) if moved else 0
        p_lines, own_lines = lines if p_moved else 0, lines if own_moved else 0
        m_lines, top_lines = lines if m_moved else 0, lines if top_moved else 0
        for row, begin, end in portions(rows.ctypes.data, rows.shape, share, shares, counter):
            count, g_at, p_at = rows[row, 0], rows[row, 1], rows[row, 3] if narrow else rows[row, 2]
            own_at = rows[row, 2]
            m_at, v_at, top_at = rows[row, 4], rows[row, 5], rows[row, 6]
            own_out, p_out = rows[row, out + 2], rows[row, out + 3] if narrow else rows[row, out + 2]
            m_out, v_out, top_out = rows[row, out + 4], rows[row, out + 5], rows[row, out + 6]
            # The hash takes the lower half of a salt; the upper one is the second moment's.
            salt = seed * SPREAD + rows[row, 7]
            other, third = (seed * SPREAD >> 32) + rows[row, 7], (seed * SPREAD >> 16) + rows[row, 7]
            own_salt = parameter_salt(seed, rows[row, 7])
            last = min(end, count - count % VECTOR)
            for block in range(begin, end, BLOCK):
                part = np.float32(0)
                p_to = place_in(p_lines, 0, p_out, block, p_size)
                own_to = place_in(own_lines, 1, own_out, block, own_size)
                m_to, v_to = place_in(m_lines, 2, m_out, block, size), place_in(m_lines, 3, v_out, block, size)
                top_to = place_in(top_lines, 4, top_out, block, size)
                for whole in (True, False):
                    first = block if whole else max(block, last)
                    stop = min(block + BLOCK, last if whole else end)
                    for i in range(first, stop):
                        g = load(g_at, i, given, 0)
                        part = loose_add(part, g * g)
                        m, v = load(m_at, i, held, 2), load(v_at, i, held, 3)
                        p, v = load_master(own_at, p_at, v, i, how, 5, 1), without_tie(v, how)
                        g = g * sign
                        if coupled:
                            g = fma(p, decay, g)
                        else:
                            p = p * decay
                        m = fma(rate, g - m, m if near else g)
                        v = fma(rest2 * g, g, v * beta2) if whole else fma(v, beta2, rest2 * g * g)
                        if drawn:
                            store_drawn(m_to, i, m, salt, m_made)
                            store_drawn(v_to, i, v, other, v_made)
                        else:
                            store(m_to, i, m, fp32, m_made)
                        tying = v
                        if amsgrad:
                            top = load(top_at, i, held, 4)
                            v = top if top >= v else v
                            if drawn:
                                store_drawn(top_to, i, v, third, top_made)
                            else:
                                store(top_to, i, v, fp32, top_made)
                        p = p + pace * m / (math.sqrt(v) / bias2 + eps)
                        store_master(p_to, i, p, own_salt, how, p_made)
                        if not drawn:
                            store(v_to, i, with_tie(tying, p, how), fp32, v_made)
                        if narrow:
                            store(own_to, i, p, own, own_made)
                squares += part
                made = min(BLOCK, end - block)
                send(p_lines, 0, p_out, block, p_size, made)
                send(own_lines, 1, own_out, block, own_size, made)
                send(m_lines, 2, m_out, block, size, made)
                send(m_lines, 3, v_out, block, size, made)
                send(top_lines, 4, top_out, block, size, made)
        drain(lines)
        return squares

    return kernel
