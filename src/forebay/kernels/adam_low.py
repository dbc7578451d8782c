"""Adam and AdamW with moments of 8 or 4 bits: decoded, updated and encoded again in one pass.

Dettmers et al. (2022), "8-bit optimizers via block-wise quantization"; Li et al. (2023), "Memory efficient optimizers
with 4-bit states". 8 bits: the dynamic code for both moments. 4 bits: the dynamic code for the first moment, the linear
code without zero for the second, both by block (the paper normalises the second moment of a matrix by rows and columns,
which asks for the largest of every column before anything is written: a second pass). The step uses the new moments
before they are encoded. Codes and their scales are described in ``codes`` and ``lanes``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from forebay.kernels.adam_block import GRADIENT, OWN, SCALES, TARGET, begin_block, finish_block
from forebay.kernels.chance import parameter_salt
from forebay.kernels.codes import code_table
from forebay.kernels.jit import compiled, part
from forebay.kernels.native import (
    Apart,
    Form,
    Kept,
    as_float,
    copy_bytes,
    greater,
    load,
    magnitude,
    store,
    store_drawn,
    written,
)
from forebay.kernels.shares import BLOCK, portions
from forebay.kernels.stamp import STAMP

__all__ = ["COLUMNS", "adam_low_kernel", "codebook", "state_nbytes"]

COLUMNS: Final = ("count", "gradient", "parameter", "master", "codes_1", "scales_1", "codes_2", "scales_2", "place")
"""Columns of the table of rows: for each moment its codes and a scale in fp32 for every block; ``place``: as in
``adam``."""

Floats = npt.NDArray[np.float32]
Kernel = Callable[[npt.NDArray[np.int64], int, int, int, Floats, Floats, int], float]


def state_nbytes(count: int, bits: int) -> tuple[int, int]:
    """Bytes of the codes and of the scales of one moment of ``count`` elements.

    Blocks are whole but for the last; with 4 bits a byte of it holds two elements only beyond half of a block.
    """
    whole, rest = divmod(count, BLOCK)
    width = BLOCK * bits // 8
    return whole * width + min(rest, width), -(-count // BLOCK) * 4


def codebook(bits: int) -> Floats:
    """What the kernel for ``bits`` (8 or 4) reads of its codes: a table for each moment, fp32 [2, TABLE]. Of the second
    a linear code reads no more than where bytes are."""
    return np.stack([code_table(bits, signed=signed) for signed in (True, False)])


_FP32: Final = int(Form.FP32)
_BF16: Final = int(Form.BF16)
_SMALLEST: Final = np.finfo(np.float32).tiny


@part
def _inverse(scale: Any) -> Any:
    """What a block is multiplied by before it is encoded; 0 for a block of zeros, or so small that 1 over it is inf."""
    return np.float32(1) / scale if scale >= _SMALLEST else np.float32(0)


_ROW: Final = 4 * BLOCK
_SPARE: Final = 8 * _ROW
"""Bytes of a block of anything, and of all that a block cut short needs: gradient, parameter in fp32, where it goes,
where the parameter itself goes; the codes of both moments, and where both go."""


@part
def _in_spare(spare_at: Any, read: Any, held: Any, size: Any, given_size: Any, width: Any) -> Any:
    """Brings the first ``size`` elements of a block to a place where there are more behind them; returns what the block
    is read from there and written to, as ``begin_block`` and ``finish_block`` are given it."""
    g_here, p_here, codes = spare_at, spare_at + _ROW, spare_at + 4 * _ROW
    # Beyond the row no gradient is left of another one.
    for i in range(BLOCK):
        store(g_here, i, np.float32(0), _FP32, GRADIENT)
    copy_bytes(read[0], g_here, size * given_size)
    copy_bytes(read[1], p_here, size * 4)
    copy_bytes(held[0], codes, min(size, width))
    copy_bytes(held[1], codes + _ROW, min(size, width))
    moved = (p_here, spare_at + 2 * _ROW, spare_at + 3 * _ROW)
    return (g_here, p_here), moved, (codes, codes + _ROW), (codes + 2 * _ROW, codes + 3 * _ROW)


@part
def _widen(p_at: Any, block: Any, size: Any, wide_at: Any) -> Any:
    """Brings ``size`` parameters in bf16, from the one at ``block`` on, to ``wide_at`` as fp32."""
    for i in range(size):
        store(wide_at, i, load(p_at, block + i, _BF16, OWN), _FP32, TARGET)


@part
def _draw(wide_at: Any, p_out: Any, block: Any, size: Any, salt: Any) -> Any:
    """Writes ``size`` parameters, fp32 at ``wide_at``, from the one at ``block`` on, rounded by chance."""
    for i in range(size):
        store_drawn(p_out, block + i, load(wide_at, i, _FP32, TARGET), salt, OWN)


@part
def _largest(values: Any, count: Any) -> Any:
    """The largest magnitude of the first ``count`` values of a block; what is beyond them becomes 0."""
    most = np.int32(0)
    for i in range(count):
        most = greater(most, magnitude(values[i]))
    values[count:] = np.float32(0)
    return as_float(most)


@cache
def adam_low_kernel(
    parameter: Form,
    gradient: Form,
    bits: int,
    *,
    coupled: bool,
    apart: Apart = Apart.NOTHING,
    kept: Kept = Kept.WIDE,
) -> Kernel:
    """The kernel for these forms and ``bits`` (8 or 4); a parameter that is not fp32 has a whole fp32 master, or none
    as in ``adam_kernel``.

    Called with rows, share, shares, counter, ``adam_scalars``, ``codebook(bits)`` and the seed, and returns the sum of
    squares as ``adam_kernel``'s does. ``apart`` is what is written elsewhere than read. A block with inf or NaN in a
    moment has a scale that says so, and nothing in it decodes to a finite value. Raises ``ValueError`` for other
    numbers of bits.
    """
    kept.check(parameter)
    if bits not in (4, 8):
        raise ValueError(f"moments have 8 or 4 bits, not {bits}")
    drawn, width, stamp = kept is Kept.DRAWN, BLOCK * bits // 8, STAMP
    narrow = parameter is not Form.FP32 and not drawn
    forms = 16 * int(Form.FP32 if drawn else parameter) + int(gradient)
    # What is rounded by chance goes to working memory first.
    decays, elsewhere = int(coupled), int(apart & ~Apart.WIDE if drawn else apart)
    own_size, given_size, p_size = parameter.itemsize, gradient.itemsize, kept.itemsize
    out, to_scales = len(COLUMNS) if apart else 0, written(SCALES, Apart.MOMENTS in apart)

    @compiled
    def kernel(rows: Any, share: Any, shares: Any, counter: Any, scalars: Any, book: Any, seed: Any) -> Any:
        tables = (np.int64(book[0].ctypes.data), np.int64(book[1].ctypes.data))
        numbers = np.int64(scalars.ctypes.data)
        # One block of both new moments; and of all else, where a row ends within a block: vectors are whole, and
        # nothing beyond the row's last element may be read or written.
        m_new, v_new, spare = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32), np.zeros(_SPARE, np.uint8)
        new, spare_at = (np.int64(m_new.ctypes.data), np.int64(v_new.ctypes.data)), np.int64(spare.ctypes.data)
        # One block of parameters that have no master, as fp32: as they are, and as they become.
        wide = np.zeros(2 * BLOCK, np.float32)
        wide_at = np.int64(wide.ctypes.data)
        squares = np.float64(stamp - stamp)
        for row, begin, end in portions(rows.ctypes.data, rows.shape, share, shares, counter):
            g_at, p_at = rows[row, 1], rows[row, 3] if narrow else rows[row, 2]
            m_at, m_scale_at, v_at, v_scale_at = rows[row, 4], rows[row, 5], rows[row, 6], rows[row, 7]
            own_out, p_out = rows[row, out + 2], rows[row, out + 3] if narrow else rows[row, out + 2]
            m_out, m_scale_out, v_out, v_scale_out = (
                rows[row, out + 4],
                rows[row, out + 5],
                rows[row, out + 6],
                rows[row, out + 7],
            )
            salt = parameter_salt(seed, rows[row, 8])
            for block in range(begin, end, BLOCK):
                size, number = min(BLOCK, end - block), block // BLOCK
                read = (g_at + block * given_size, p_at + block * p_size)
                moved = (p_at + block * p_size, p_out + block * p_size, own_out + block * own_size)
                if drawn:
                    _widen(p_at, block, size, wide_at)
                    read, moved = (read[0], wide_at), (wide_at, wide_at + _ROW, moved[2])
                held = (m_at + number * width, v_at + number * width)
                kept = (m_out + number * width, v_out + number * width)
                if size < BLOCK:
                    read, moved, held, kept = _in_spare(spare_at, read, held, size, given_size, width)
                factors = (load(m_scale_at, number, _FP32, SCALES), load(v_scale_at, number, _FP32, SCALES))
                part, m_scale, v_scale = begin_block(read, held, new, tables, factors, numbers, forms, bits, decays)
                squares += part
                if size < BLOCK:
                    # What is beyond the row has no part in a scale.
                    m_scale, v_scale = _largest(m_new, size), _largest(v_new, size)
                store(m_scale_out, number, m_scale, _FP32, to_scales)
                store(v_scale_out, number, v_scale, _FP32, to_scales)
                inverses = (_inverse(m_scale), _inverse(v_scale))
                finish_block(moved, kept, new, tables, inverses, numbers, forms, bits, decays, elsewhere)
                if drawn:
                    _draw(moved[1], p_out, block, size, salt)
                if size < BLOCK:
                    if not drawn:
                        copy_bytes(moved[1], p_out + block * 4, size * 4)
                    if narrow:
                        copy_bytes(moved[2], own_out + block * own_size, size * own_size)
                    copy_bytes(kept[0], m_out + number * width, min(size, width))
                    copy_bytes(kept[1], v_out + number * width, min(size, width))
        # A use of the working memory after the last access to it: its address alone does not keep it.
        return squares + (m_new.size + v_new.size + wide.size + spare.size - 4 * BLOCK - _SPARE)

    return kernel
