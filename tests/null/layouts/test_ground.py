"""What is given the bottom loses nothing: the least height stays the least."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from forebay.buffers import Addresses, Buffer, BufferSet
from forebay.checking.addresses import check_addresses
from forebay.planners.layout import ground
from forebay.planners.layout.greedy import stacked
from forebay.planners.layout.ground import WORK, grounded
from forebay.planners.layout.orders import order_by
from forebay.planners.layout.table import Table, parts_of
from tests.null.layouts.making import buffer_tuples, least_height


@settings(max_examples=60, deadline=None)
@given(buffers=buffer_tuples(6, alignments=(1, 1, 2)))
def test_nothing_is_lost(buffers: tuple[Buffer, ...]) -> None:
    offsets = np.zeros(len(buffers), np.int64)
    reached, above = 0, set()
    for one in grounded(Table.of(buffers), offsets):
        rows = tuple(buffers[number] for number in one.part.number)
        above |= {row.id for row in rows}
        assert one.peak == one.base + one.part.peak
        reached = max(reached, one.base + least_height(rows))
    below = [at + row.size for at, row in zip(offsets.tolist(), buffers, strict=True) if row.id not in above]
    assert max([reached, *below], default=0) == least_height(buffers)


@settings(max_examples=60, deadline=None)
@given(buffers=buffer_tuples(20, alignments=(1, 1, 2)))
def test_what_is_above_the_ground_does_not_meet_it(buffers: tuple[Buffer, ...]) -> None:
    offsets = np.zeros(len(buffers), np.int64)
    for one in grounded(Table.of(buffers), offsets):
        offsets[one.part.number] = one.base + stacked(one.part, order_by(one.part, "area"), "").offsets
    check_addresses(Addresses(BufferSet(buffers), tuple(offsets.tolist()), "", False, 0.0))


def test_what_it_held_together_falls_apart() -> None:
    stripe = Buffer("stripe", 0, 8, 3)
    left, right = Buffer("left", 0, 4, 5), Buffer("right", 4, 8, 7)
    short = Buffer("short", 1, 3, 2), Buffer("late", 5, 8, 1)
    offsets = np.full(5, -1, np.int64)
    # ``left`` is live in all sections of the first half, and ``right`` in those of the second: all find their place.
    assert not list(grounded(Table.of((stripe, left, right, *short)), offsets))
    assert offsets.tolist() == [0, 3, 3, 8, 10]


def test_what_takes_an_alignment_away_is_not_given_the_bottom() -> None:
    odd, even = Buffer("odd", 0, 4, 3), Buffer("even", 1, 3, 4, alignment=4)
    offsets = np.full(2, -1, np.int64)
    # With 3 bytes at the bottom one more would be nobody's.
    assert not list(grounded(Table.of((odd, even)), offsets)) and offsets.tolist() == [4, 0]
    neither = Buffer("neither", 1, 3, 6, alignment=4)
    (left,) = grounded(Table.of((odd, neither)), offsets)
    assert left.base == 0 and left.part.number.tolist() == [0, 1]


@pytest.mark.parametrize("count", [200, 3000])
def test_nested_lives_take_no_more_work_than_allowed(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Last in, first out, with a short life before each next one: at each level one is live throughout, and all others
    are looked at again."""
    looked_at: list[int] = []

    def counted(table: Table) -> list[Table]:
        looked_at.append(len(table))
        return parts_of(table)

    monkeypatch.setattr(ground, "parts_of", counted)
    nested = [Buffer(f"nested{at}", 2 * at, 4 * count - 2 * at, 1 + at % 7) for at in range(count)]
    short = [Buffer(f"short{at}", 2 * at, 2 * at + 1, 1 + at % 5) for at in range(count)]
    buffers = (*nested, *short)
    offsets = np.zeros(2 * count, np.int64)
    left = list(grounded(Table.of(buffers), offsets))
    assert sum(looked_at) <= WORK + 2 * len(buffers)
    assert bool(left) == (count**2 > WORK)
    for one in left:
        offsets[one.part.number] = one.base + stacked(one.part, order_by(one.part, "length"), "").offsets
    given = BufferSet(buffers)
    found = Addresses(given, tuple(offsets.tolist()), "", False, 0.0)
    check_addresses(found)
    assert found.height == given.lower_bound
