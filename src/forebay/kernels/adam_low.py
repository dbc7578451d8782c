"""Adam and AdamW with moments of 8 or 4 bits: decoded, updated and encoded again in one pass.

Dettmers et al. (2022), "8-bit optimizers via block-wise quantization"; Li et al. (2023), "Memory efficient optimizers
with 4-bit states". 8 bits: the dynamic code for both moments. 4 bits: the dynamic code for the first moment, the linear
code without zero for the second, both by block (the paper normalises the second moment of a matrix by rows and columns,
which asks for the largest of every column before anything is written: a second pass). The step uses the new moments
before they are encoded. Codes and their scales are described in ``codes``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from forebay.kernels.codes import DECADES, decade_table, dynamic_values, linear_values
from forebay.kernels.jit import compiled, part
from forebay.kernels.native import (
    Form,
    as_float,
    fma,
    greater,
    load,
    load_byte,
    loose_add,
    magnitude,
    plus,
    rounded_down,
    store,
    store_byte,
)
from forebay.kernels.shares import BLOCK, begin_of
from forebay.kernels.stamp import STAMP

__all__ = ["COLUMNS", "adam_low_kernel", "codebook", "state_nbytes"]

COLUMNS: Final = ("count", "gradient", "parameter", "master", "codes_1", "scales_1", "codes_2", "scales_2")
"""Columns of the table of rows: for each moment its codes and a fp32 scale for every block."""

Floats = npt.NDArray[np.float32]
Kernel = Callable[[npt.NDArray[np.int64], int, int, Floats, Floats], float]

_VALUES: Final = 256


def state_nbytes(count: int, bits: int) -> tuple[int, int]:
    """Bytes of the codes and of the scales of one moment of ``count`` elements."""
    return -(-count * bits // 8), -(-count // BLOCK) * 4


def codebook(bits: int) -> Floats:
    """What the kernel for ``bits`` (8 or 4) reads of its codes: fp32 [2, 256 + 4 * (DECADES + 1)].

    For each moment the values of the codes (what is beyond them is 0), then the decade table.
    """
    book = np.zeros((2, _VALUES + 4 * (DECADES + 1)), dtype=np.float32)
    values = (dynamic_values(bits, signed=True), dynamic_values(8, signed=False) if bits == 8 else linear_values())
    for number, known in enumerate(values):
        book[number, : len(known)] = known
        book[number, _VALUES:] = decade_table(bits, signed=number == 0).ravel()
    return book


# Streams, the same in all functions here, which become one: gradient, master, the two blocks of new moments, what is
# only read, the parameter, scales, codes.
_GRADIENT, _TARGET, _FIRST, _SECOND, _BOOK, _OWN, _SCALES, _CODES = range(8)
_FP32: Final = int(Form.FP32)


@part
def _dynamic(x: Any, book_at: Any) -> Any:
    """The code of a magnitude ``x``, as an fp32 number."""
    slope, offset = load(book_at, _VALUES + 1, _FP32, _BOOK), load(book_at, _VALUES + 2, _FP32, _BOOK)
    most = load(book_at, _VALUES + 3, _FP32, _BOOK)
    for decade in range(_VALUES + 4, _VALUES + 4 * (DECADES + 1), 4):
        above = x >= load(book_at, decade, _FP32, _BOOK)
        slope = load(book_at, decade + 1, _FP32, _BOOK) if above else slope
        offset = load(book_at, decade + 2, _FP32, _BOOK) if above else offset
        most = load(book_at, decade + 3, _FP32, _BOOK) if above else most
    code = slope * x + offset
    return code if code < most else most


@part
def _inverse(scale: Any) -> Any:
    """What a block is multiplied by before it is encoded; 0 for a block of zeros."""
    return np.float32(1) / scale if scale > np.float32(0) else np.float32(0)


@part
def _decode_bytes(
    m_at: Any, v_at: Any, m_scale: Any, v_scale: Any, books: Any, size: Any, m_new: Any, v_new: Any
) -> Any:
    for i in range(size):
        store(m_new, i, load(books[0], load_byte(m_at, i, _CODES), _FP32, _BOOK) * m_scale, _FP32, _FIRST)
        store(v_new, i, load(books[1], load_byte(v_at, i, _CODES), _FP32, _BOOK) * v_scale, _FP32, _SECOND)


@part
def _decode_nibbles(
    m_at: Any, v_at: Any, m_scale: Any, v_scale: Any, books: Any, size: Any, m_new: Any, v_new: Any
) -> Any:
    for i in range((size + 1) // 2):
        m, v = load_byte(m_at, i, _CODES), load_byte(v_at, i, _CODES)
        store(m_new, 2 * i, load(books[0], m & 15, _FP32, _BOOK) * m_scale, _FP32, _FIRST)
        store(m_new, 2 * i + 1, load(books[0], m >> 4, _FP32, _BOOK) * m_scale, _FP32, _FIRST)
        store(v_new, 2 * i, load(books[1], v & 15, _FP32, _BOOK) * v_scale, _FP32, _SECOND)
        store(v_new, 2 * i + 1, load(books[1], v >> 4, _FP32, _BOOK) * v_scale, _FP32, _SECOND)


@part
def _signed(x: Any, book_at: Any, zero_code: Any) -> Any:
    """The signed dynamic code of ``x``. There is none for -1: the last of the largest decade stands for it."""
    code = rounded_down(_dynamic(abs(x), book_at))
    below = code if code < zero_code else zero_code
    return plus(zero_code, code if x >= np.float32(0) else np.int32(-below))


@part
def _linear(x: Any) -> Any:
    """The linear code without zero of ``x``."""
    return greater(rounded_down(x * np.float32(16) - np.float32(0.5)), np.int32(0))


@part
def _encode_bytes(
    m_at: Any, v_at: Any, m_scale: Any, v_scale: Any, books: Any, size: Any, m_new: Any, v_new: Any
) -> Any:
    m_inverse, v_inverse = _inverse(m_scale), _inverse(v_scale)
    for i in range(size):
        m = _signed(load(m_new, i, _FP32, _FIRST) * m_inverse, books[0], np.int32(127))
        store_byte(m_at, i, m, _CODES)
    for i in range(size):
        v = rounded_down(_dynamic(load(v_new, i, _FP32, _SECOND) * v_inverse, books[1]))
        store_byte(v_at, i, plus(v, np.int32(-1)), _CODES)


@part
def _encode_nibbles(
    m_at: Any, v_at: Any, m_scale: Any, v_scale: Any, books: Any, size: Any, m_new: Any, v_new: Any
) -> Any:
    m_inverse, v_inverse = _inverse(m_scale), _inverse(v_scale)
    for i in range((size + 1) // 2):
        low = _signed(load(m_new, 2 * i, _FP32, _FIRST) * m_inverse, books[0], np.int32(7))
        high = _signed(load(m_new, 2 * i + 1, _FP32, _FIRST) * m_inverse, books[0], np.int32(7))
        store_byte(m_at, i, np.int32((low & 15) | (high & 15) << 4), _CODES)
    for i in range((size + 1) // 2):
        low = _linear(load(v_new, 2 * i, _FP32, _SECOND) * v_inverse)
        high = _linear(load(v_new, 2 * i + 1, _FP32, _SECOND) * v_inverse)
        store_byte(v_at, i, np.int32((low & 15) | (high & 15) << 4), _CODES)


@cache
def adam_low_kernel(parameter: Form, gradient: Form, bits: int, *, coupled: bool) -> Kernel:
    """The kernel for these forms and ``bits`` (8 or 4); a parameter that is not fp32 has an fp32 master.

    Called with rows, share, shares, ``adam_scalars`` and ``codebook(bits)``; returns the sum of the squares of the
    share's gradients. A block with inf or NaN in a moment has a scale that says so, and nothing in it decodes to a
    finite value. Raises ``ValueError`` for other numbers of bits.
    """
    if bits not in (4, 8):
        raise ValueError(f"moments have 8 or 4 bits, not {bits}")
    own, given, stamp = int(parameter), int(gradient), STAMP
    narrow, nibbles = parameter is not Form.FP32, bits == 4

    @compiled
    def kernel(rows: Any, share: Any, shares: Any, scalars: Any, book: Any) -> Any:
        decay, rate, near, beta2 = scalars[0], scalars[1], scalars[2] != 0, scalars[3]
        rest2, bias2, eps, pace, sign = scalars[4], scalars[5], scalars[6], scalars[7], scalars[8]
        books = (book[0].ctypes.data, book[1].ctypes.data)
        # One block of both new moments.
        scratch = np.empty((2, BLOCK), np.float32)
        m_new, v_new = scratch[0].ctypes.data, scratch[1].ctypes.data
        squares = np.float64(stamp - stamp)
        for row in range(rows.shape[0]):
            count, g_at, own_at, wide_at = rows[row, 0], rows[row, 1], rows[row, 2], rows[row, 3]
            m_at, m_scale_at, v_at, v_scale_at = rows[row, 4], rows[row, 5], rows[row, 6], rows[row, 7]
            target_at = wide_at if narrow else own_at
            begin, end = begin_of(row, count, share, shares), begin_of(row, count, share + 1, shares)
            for block in range(begin, end, BLOCK):
                size, number = min(BLOCK, end - block), block // BLOCK
                m_codes, v_codes = m_at + block * bits // 8, v_at + block * bits // 8
                m_scale = load(m_scale_at, number, _FP32, _SCALES)
                v_scale = load(v_scale_at, number, _FP32, _SCALES)
                if nibbles:
                    _decode_nibbles(m_codes, v_codes, m_scale, v_scale, books, size, m_new, v_new)
                else:
                    _decode_bytes(m_codes, v_codes, m_scale, v_scale, books, size, m_new, v_new)
                part, m_most, v_most = np.float32(0), np.int32(0), np.int32(0)
                for i in range(size):
                    g = load(g_at, block + i, given, _GRADIENT)
                    p = load(target_at, block + i, _FP32, _TARGET)
                    m, v = load(m_new, i, _FP32, _FIRST), load(v_new, i, _FP32, _SECOND)
                    part = loose_add(part, g * g)
                    g = g * sign
                    if coupled:
                        g = fma(p, decay, g)
                    else:
                        p = p * decay
                    m = fma(rate, g - m, m if near else g)
                    v = fma(rest2 * g, g, v * beta2)
                    store(m_new, i, m, _FP32, _FIRST)
                    store(v_new, i, v, _FP32, _SECOND)
                    m_most, v_most = greater(m_most, magnitude(m)), greater(v_most, magnitude(v))
                    p = p + pace * m / (math.sqrt(v) / bias2 + eps)
                    store(target_at, block + i, p, _FP32, _TARGET)
                    if narrow:
                        store(own_at, block + i, p, own, _OWN)
                squares += part
                m_scale, v_scale = as_float(m_most), as_float(v_most)
                store(m_scale_at, number, m_scale, _FP32, _SCALES)
                store(v_scale_at, number, v_scale, _FP32, _SCALES)
                if nibbles:
                    _encode_nibbles(m_codes, v_codes, m_scale, v_scale, books, size, m_new, v_new)
                else:
                    _encode_bytes(m_codes, v_codes, m_scale, v_scale, books, size, m_new, v_new)
        # A use of the scratch memory after the last access to it: its address alone does not keep it.
        return squares + (scratch.shape[1] - BLOCK)

    return kernel
