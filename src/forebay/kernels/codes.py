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
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

__all__ = ["DECADES", "decade_table", "dynamic_values", "linear_values"]

Floats = npt.NDArray[np.float32]

DECADES: Final = 8
"""Rows of a decade table: the most decades a code has, and one for the value 1."""


def _magnitudes(last: int, first: int) -> list[float]:
    """Values of the codes above 0 and below 1's, in order: decades ``first`` to ``last`` of the scheme above."""
    return [
        10.0 ** (j - last) * (0.1 + 0.9 * (part + 0.5) / 2**j) for j in range(first, last + 1) for part in range(2**j)
    ]


def dynamic_values(bits: int, *, signed: bool) -> Floats:
    """The values of all ``2**bits`` codes, in order of the codes and of themselves.

    A signed code is ``2**(bits - 1) - 1`` for 0 and grows with its value; an unsigned one is 0 for 0.
    """
    positive = _magnitudes(bits - 2, 0) if signed else _magnitudes(bits - 1, 1)
    negative = [-value for value in reversed(positive)] if signed else []
    return np.array([*negative, 0.0, *positive, 1.0], dtype=np.float32)


def linear_values() -> Floats:
    """The values of the 16 codes of the linear code without zero."""
    return np.arange(1, 17, dtype=np.float32) / np.float32(16)


def decade_table(bits: int, *, signed: bool) -> Floats:
    """How a magnitude becomes a code: for each decade ``threshold, slope, offset, most``, fp32 [DECADES + 1, 4].

    The code is ``min(floor(slope * x + offset), most)`` with the last row whose threshold is not above ``x``.
    Thresholds lie halfway between the values next to them, so that the nearest value is found: a little above the
    decade's begin, which is why the code of the decade below needs a bound. Rows that a code does not need repeat the
    last. An unsigned code comes out 1 too large, for 0 as for any other.
    """
    last, first = (bits - 2, 0) if signed else (bits - 1, 1)
    values = [0.0, *_magnitudes(last, first), 1.0]
    rows = [(0.0, 0.0, float(first), float(first))]
    for j in range(first, last + 1):
        place = 2**j - 2**first + 1
        threshold = (values[place - 1] + values[place]) / 2
        # A decade of one value has nothing to compute, and begins far below its tenth.
        slope, offset = (10.0 ** (last - j) * 2**j / 0.9, 2**j - 2**j / 9) if j else (0.0, 1.0)
        rows.append((threshold, slope, offset, float(2 ** (j + 1) - 1)))
    rows.append(((values[-2] + 1) / 2, 0.0, float(2 ** (last + 1)), float(2 ** (last + 1))))
    rows += [rows[-1]] * (DECADES + 1 - len(rows))
    return np.array(rows, dtype=np.float32)
