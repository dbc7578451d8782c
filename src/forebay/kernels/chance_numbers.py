"""What is rounded by chance: the numbers that its draws hang on.

Gupta et al. (2015), "Deep learning with limited numerical precision", section 3: rounded to nearest, a number whose
steps are below half of its last place would stand still; rounded up or down by chance, it moves as far on average.
"""

from __future__ import annotations

from typing import Final

__all__ = ["OTHER", "SPREAD", "salt_of"]

SPREAD: Final = 0x9E3779B97F4A7C15 - 2**64
"""The golden ratio in 64 bits, as a signed number: neighbouring seeds become salts that have nothing in common."""

OTHER: Final = 0x5851F42D
"""What makes the draws of parameters others than those of moments."""


def salt_of(seed: int, place: int) -> int:
    """The salt of a row of parameters whose first element has this ``place``, in the step ``seed``: of that of kernels
    (``chance``) the lower half, which is all that a draw looks at."""
    return ((seed * SPREAD ^ OTHER) + place) & 0xFFFFFFFF
