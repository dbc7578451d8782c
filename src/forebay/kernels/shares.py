"""How the rows of a call are cut for several threads.

A call has a table of *rows*: each is one run of elements, the same length in every stream. ``rows[r, 0]`` is the
number of elements, what follows are addresses. A *share* is one thread's part of all rows.
"""

from __future__ import annotations

from typing import Any, Final

from forebay.kernels.jit import part

__all__ = ["BLOCK", "COUNT", "WHOLE", "begin_of"]

COUNT: Final = 0
"""The column with the number of elements."""

BLOCK: Final = 256
"""Elements: cuts are at multiples of this, so that no two threads write to one line of a cache."""

WHOLE: Final = 16384
"""Elements: a shorter row is left to one thread."""


@part
def begin_of(row: Any, count: Any, share: Any, shares: Any) -> Any:
    """The first element of a row of ``count`` that belongs to ``share``; the end is the next one's begin."""
    if count < WHOLE:
        return 0 if share <= row % shares else count
    if share == shares:
        return count
    return count // BLOCK * share // shares * BLOCK
