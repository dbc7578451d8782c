"""Buffers for tests, and the least height that any layout of a few of them has."""

from __future__ import annotations

from itertools import permutations

from hypothesis import strategies as st

from forebay.buffers import Buffer

__all__ = ["buffer_tuples", "least_height"]


@st.composite
def buffer_tuples(draw: st.DrawFn, most: int = 30, alignments: tuple[int, ...] = (1,)) -> tuple[Buffer, ...]:
    """Up to ``most`` buffers whose lives often touch, of sizes that often repeat."""
    count = draw(st.integers(0, most))
    made = []
    for number in range(count):
        start = draw(st.integers(0, 12))
        life, size = draw(st.integers(1, 8)), draw(st.integers(0, 9))
        made.append(Buffer(f"b{number}", start, start + life, size, draw(st.sampled_from(alignments))))
    return tuple(made)


def least_height(buffers: tuple[Buffer, ...]) -> int:
    """By trying every order: in one of them, placing each buffer on top of those that are live together with it is as
    low as anything."""
    best = sum(one.size + one.alignment for one in buffers)
    for order in permutations(buffers):
        placed: list[tuple[Buffer, int]] = []
        for one in order:
            under = [at + other.size for other, at in placed if other.lower < one.upper and one.lower < other.upper]
            top = max(under, default=0)
            placed.append((one, -(-top // one.alignment) * one.alignment))
        best = min(best, max((at + one.size for one, at in placed if one.size), default=0))
    return best
