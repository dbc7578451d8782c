"""Few bits for an optimizer state: the codes of Dettmers et al. and Li et al., computed instead of looked up.

*Dynamic code* (Dettmers et al., 2022, "8-bit optimizers via block-wise quantization", section 1.3 and appendix F.1; the
numbers are those of bitsandbytes' ``create_dynamic_map``): a value in [-1, 1], or [0, 1], as a decade and a linear
fraction of it. Decade ``10**(j - last)`` has ``2**j`` values, the middles of that many equal parts of [0.1, 1]; 0
and 1 have codes of their own. With magnitude codes ``1, 2, 4 ... 2**last`` as the first of their decades, the leading
bit of a code is its decade and the rest is the fraction. An unsigned code has twice as many values in a decade and no
decade of one, which is the same with 1 added to the code.

*Linear code without zero* (Li et al., 2023, "Memory efficient optimizers with 4-bit states", section 4): ``(code + 1) /
16``. A second moment that became 0 would divide the step by eps.

A block of ``forebay.kernels.shares.BLOCK`` values shares a scale, its largest magnitude.

*Tables* of 16 entries are what vectors look things up in (``lanes``): each fits in one register.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

__all__ = [
    "BINS",
    "GATHER",
    "LEAST",
    "LOWER",
    "MOST",
    "OFFSET",
    "PLANES",
    "RISE",
    "SLOPE",
    "START",
    "TABLE",
    "code_table",
    "dynamic_values",
    "linear_values",
]

Floats = npt.NDArray[np.float32]

RISE, START, LOWER, SLOPE, OFFSET, MOST, GATHER, PLANES, TABLE = 0, 16, 32, 48, 64, 80, 96, 128, 256
"""Where the parts of a table begin, and the length of it (see ``code_table``)."""

BINS: Final = 16
"""Entries of what is looked up by the magnitude that is encoded: one for two octaves, the last of which begins at 1/2.
Decades are longer than three octaves, so that no two of them begin in one bin."""

LEAST: Final = 2.0**-25
"""Smaller magnitudes have the codes of this one: those of larger ones differ in the last four bits of their bins."""

_ENTRIES: Final = 16


def _magnitudes(last: int, first: int) -> list[float]:
    """Values of the codes above 0 and below 1's, in order: decades ``first`` to ``last`` of the scheme above."""
    return [
        10.0 ** (j - last) * (0.1 + 0.9 * (part + 0.5) / 2**j) for j in range(first, last + 1) for part in range(2**j)
    ]


def _range(bits: int, *, signed: bool) -> tuple[int, int]:
    """The last and the first decade."""
    return (bits - 2, 0) if signed else (bits - 1, 1)


def dynamic_values(bits: int, *, signed: bool) -> Floats:
    """The values of all ``2**bits`` codes, in order of the codes and of themselves, as ``lanes`` decodes them.

    A signed code is ``2**(bits - 1) - 1`` for 0 and grows with its value; an unsigned one is 0 for 0.
    """
    wide = [*_magnitudes(*_range(bits, signed=signed)), 1.0]
    positive = _lines(bits, signed=signed) if bits == 8 else np.array(wide, dtype=np.float32)
    negative = -positive[-2::-1] if signed else positive[:0]
    return np.concatenate([negative, np.zeros(1, dtype=np.float32), positive])


def _lines(bits: int, *, signed: bool) -> Floats:
    """The values of the codes above 0, as ``RISE`` and ``START`` have them."""
    last, first = _range(bits, signed=signed)
    rise, start = _decades(last, first)
    odd = 2 * np.arange(2**first, 2 ** (last + 1) + 1) + 1
    entry = np.frexp(odd.astype(np.float32))[1] - 2
    # Rounded once: the product and the sum of these are exact in fp64.
    exact: npt.NDArray[np.float64] = rise[entry].astype(np.float64) * odd + start[entry]
    return exact.astype(np.float32)


def _decades(last: int, first: int) -> tuple[Floats, Floats]:
    """``RISE`` and ``START`` of ``code_table``."""
    rise, start = np.zeros(_ENTRIES, dtype=np.float32), np.zeros(_ENTRIES, dtype=np.float32)
    for j in range(first, last + 1):
        range_of = np.float32(0.9 * 10.0 ** (j - last))
        rise[j] = range_of / np.float32(2 ** (j + 1))
        lowest = 10.0 ** (j - last) * (0.1 + 0.9 * 0.5 / 2**j)
        # From the decade's first value: where they are small, the errors of the two numbers would be large.
        start[j] = lowest - float(range_of) * (1 + 0.5 / 2**j)
    start[last + 1] = 1.0
    return rise, start


def linear_values() -> Floats:
    """The values of the 16 codes of the linear code without zero."""
    return np.arange(1, 17, dtype=np.float32) / np.float32(16)


def code_table(bits: int, *, signed: bool) -> Floats:
    """What decodes and encodes a dynamic code: fp32 [TABLE].

    ``RISE``, ``START``
        8 bits: a magnitude code ``n``, with ``2**j`` the leading bit of it, has the value ``rise * (2 n + 1) + start``
        with the entry of ``j`` modulo 16. 4 bits: ``RISE`` are the values themselves, by code.
    ``LOWER``
        by bin, which is the exponent of a magnitude ``x`` without its last bit, modulo 16: an integer that is taken off
        the bits of ``x``. Below the value with which a decade begins ``x`` falls into the bin before.
    ``SLOPE``, ``OFFSET``, ``MOST``
        by bin: the code is ``min(floor(slope * x + offset), most)``; a signed one is that from the code of 0 on.
    ``GATHER``
        64 bytes, and 64 more: where in two registers of 16 integers the first bytes of these are, in the first half and
        again in the second; and where the last bytes are.
    ``PLANES``
        8 bits, signed: the values above 0 in four parts of 128 bytes, the first byte of each value, the second ...
    """
    table = np.zeros(TABLE, dtype=np.float32)
    rows = _slots(bits, signed=signed)
    # Magnitude codes begin with that of 0, which an unsigned code has below its first decade.
    zero = rows[0][3]
    for place in range(BINS):
        low, high = 4.0**place * 2.0 ** (1 - 2 * BINS), 4.0**place * 2.0 ** (3 - 2 * BINS)
        begun = [row for row in rows if np.float32(row[0]) < high]
        inside = [row[0] for row in begun if np.float32(row[0]) > low]
        if len(inside) > 1:
            raise ValueError(f"two decades of a code of {bits} bits begin between {low} and {high}")
        _, slope, offset, most = begun[-1]
        table[[SLOPE + place, OFFSET + place, MOST + place]] = slope, offset - zero, most - zero
        if inside:
            begin, threshold = np.array([low, inside[0]], dtype=np.float32).view(np.int32)
            table[LOWER + place : LOWER + place + 1] = np.array([threshold - begin], dtype=np.int32).view(np.float32)
    words = np.arange(64) % 32 * 4
    table[GATHER:PLANES] = np.concatenate([words, words + 3]).astype(np.uint8).view(np.float32)
    if bits == 4:
        table[RISE : RISE + _ENTRIES] = dynamic_values(4, signed=signed)
        return table
    table[RISE : RISE + _ENTRIES], table[START : START + _ENTRIES] = _decades(*_range(bits, signed=signed))
    if signed:
        values = _lines(bits, signed=True).view(np.uint8).reshape(-1, 4)
        table[PLANES:] = np.ascontiguousarray(values.T).view(np.float32).ravel()
    return table


def _slots(bits: int, *, signed: bool) -> list[tuple[float, float, float, float]]:
    """How a magnitude becomes its code: ``threshold, slope, offset, most`` for zero, for each decade and for one.

    The code is ``min(floor(slope * x + offset), most)`` with the last row whose threshold is not above ``x``.
    Thresholds lie halfway between the values next to them, so that the nearest value is found: a little above the
    decade's begin, which is why the code of the decade below needs a bound.
    """
    last, first = _range(bits, signed=signed)
    values = [0.0, *_magnitudes(last, first), 1.0]
    rows = [(0.0, 0.0, float(first), float(first))]
    for j in range(first, last + 1):
        place = 2**j - 2**first + 1
        threshold = (values[place - 1] + values[place]) / 2
        # A decade of one value has nothing to compute, and begins far below its tenth.
        slope, offset = (10.0 ** (last - j) * 2**j / 0.9, 2**j - 2**j / 9) if j else (0.0, 1.0)
        rows.append((threshold, slope, offset, float(2 ** (j + 1) - 1)))
    rows.append(((values[-2] + 1) / 2, 0.0, float(2 ** (last + 1)), float(2 ** (last + 1))))
    return rows
