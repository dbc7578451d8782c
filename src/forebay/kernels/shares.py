"""How the rows of a call are cut for several threads.

A call has a table of *rows*: each is one run of elements, the same length in every stream. ``rows[r, 0]`` is the
number of elements, what follows are addresses. A *share* is a part of all rows for one thread: the only one that a call
does, or one of those that threads take in turns, from a counter. Taking is one instruction and leaves the interpreter
alone: its lock may be held by whoever computes, for milliseconds at a time, while shares take fractions of one.
"""

from __future__ import annotations

from typing import Any, Final

from forebay.kernels.jit import part
from forebay.kernels.native import look, take

__all__ = ["BLOCK", "COUNT", "WHOLE", "portions"]

COUNT: Final = 0
"""The column with the number of elements."""

BLOCK: Final = 256
"""Elements: cuts are at multiples of this, so that no two threads write to one line of a cache."""

WHOLE: Final = 16384
"""Elements: a shorter row is left to one thread."""


@part
def _begin_of(row: Any, count: Any, share: Any, shares: Any) -> Any:
    """The first element of a row of ``count`` that belongs to ``share``; the end is the next one's begin."""
    if count < WHOLE:
        return 0 if share <= row % shares else count
    if share == shares:
        return count
    return count // BLOCK * share // shares * BLOCK


@part
def portions(table: Any, shape: Any, share: Any, shares: Any, counter: Any) -> Any:
    """What of the rows at the address ``table``, a C-contiguous int64 array of ``shape``, one call does: row, first
    element and end, one after the other. With the address ``counter`` (of an int64) shares are taken from there until
    none is left, by each thread others; without (0) it is ``share``.

    Not the array itself: numba never lets go of one that a generator in compiled code is given.
    """
    mine = take(counter) if counter else share
    while mine < shares:
        for row in range(shape[0]):
            count = look(table, row * shape[1] + COUNT)
            yield row, _begin_of(row, count, mine, shares), _begin_of(row, count, mine + 1, shares)
        mine = take(counter) if counter else shares
