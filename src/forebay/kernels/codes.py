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

*Tables* of 16 or 32 entries are what vectors look things up in (``lanes``): each fits in one or two registers.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

__all__ = [
    "LEAST",
    "MOST",
    "OCTAVES",
    "OFFSET",
    "RISE",
    "SLOPE",
    "START",
    "START_SLOT",
    "TABLE",
    "THRESHOLD",
    "code_table",
    "dynamic_values",
    "linear_values",
]

Floats = npt.NDArray[np.float32]

RISE, START, THRESHOLD, START_SLOT, SLOPE, OFFSET, MOST, TABLE = 0, 16, 32, 64, 96, 112, 128, 144
"""Where the parts of a table begin, and the length of it (see ``code_table``)."""

OCTAVES: Final = 32
"""Entries of what is looked up by the exponent of a magnitude."""

LEAST: Final = 2.0**-25
"""Smaller magnitudes have the codes of this one: the exponents of larger ones differ in their last five bits."""

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
    last, first = _range(bits, signed=signed)
    positive = _magnitudes(last, first)
    if bits == 8:
        table = code_table(bits, signed=signed)
        codes = np.arange(2**first, 2 ** (last + 1))
        fraction, exponent = np.frexp((2 * codes + 1).astype(np.float32))
        entry = exponent - 2
        # Rounded once: the product and the sum of these are exact in fp64.
        exact = table[RISE + entry].astype(np.float64) * (2.0 * fraction) + table[START + entry]
        positive = exact.astype(np.float32).tolist()
    negative = [-value for value in reversed(positive)] if signed else []
    return np.array([*negative, 0.0, *positive, 1.0], dtype=np.float32)


def linear_values() -> Floats:
    """The values of the 16 codes of the linear code without zero."""
    return np.arange(1, 17, dtype=np.float32) / np.float32(16)


def code_table(bits: int, *, signed: bool) -> Floats:
    """What decodes and encodes a dynamic code: fp32 [TABLE].

    ``RISE``, ``START``
        8 bits: a magnitude code ``n``, written ``2 n + 1 = 2**(j + 1) * f`` with ``f`` from 1 to 2, has the value
        ``rise * f + start`` with the entry of ``j`` modulo 16. 4 bits: ``RISE`` are the values themselves, by code.
    ``THRESHOLD``, ``START_SLOT``
        by the last five bits of the exponent of a magnitude ``x``: the slot of its code is the start slot (an integer)
        or, where ``x`` is below the threshold, the one before that.
    ``SLOPE``, ``OFFSET``, ``MOST``
        by slot: the code is ``min(floor(slope * x + offset), most)``; a signed one is that from the code of 0 on.
    """
    table = np.zeros(TABLE, dtype=np.float32)
    rows = _slots(bits, signed=signed)
    # Magnitude codes begin with that of 0, which an unsigned code has below its first decade.
    zero = rows[0][3]
    for slot, (_, slope, offset, most) in enumerate(rows):
        table[[SLOPE + slot, OFFSET + slot, MOST + slot]] = slope, offset - zero, most - zero
    starts = np.zeros(OCTAVES, dtype=np.int32)
    for octave in range(OCTAVES):
        low, high = 2.0 ** (octave - OCTAVES + 1), 2.0 ** (octave - OCTAVES + 2)
        starts[octave] = sum(np.float32(row[0]) <= low for row in rows)
        inside = [row[0] for row in rows if low < np.float32(row[0]) < high]
        table[THRESHOLD + octave] = inside[0] if inside else np.inf
    table[START_SLOT : START_SLOT + OCTAVES] = starts.view(np.float32)
    if bits == 4:
        table[RISE : RISE + _ENTRIES] = dynamic_values(4, signed=signed)
        return table
    last, first = _range(bits, signed=signed)
    for j in range(first, last + 1):
        rise = np.float32(0.9 * 10.0 ** (j - last))
        lowest = 10.0 ** (j - last) * (0.1 + 0.9 * 0.5 / 2**j)
        table[RISE + j] = rise
        # From the decade's first value: where they are small, the errors of the two numbers would be large.
        table[START + j] = lowest - float(rise) * (1 + 0.5 / 2**j)
    table[START + last + 1] = 1.0
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
