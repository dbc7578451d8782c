"""Busy seconds of a lane against a clock that ticks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from forebay.timeline import Event, Lane, Timeline, merge_busy

INTERVALS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 10)), max_size=15)


def by_ticks(intervals: list[tuple[int, int]]) -> int:
    """Whole seconds covered by at least one interval, each second looked at by itself."""
    return sum(any(start <= tick < start + length for start, length in intervals) for tick in range(60))


def events_of(lane: Lane, intervals: list[tuple[int, int]]) -> list[Event]:
    return [Event(lane, float(start), float(start + length), nbytes=length) for start, length in intervals]


@given(INTERVALS)
def test_merge_busy_is_the_length_of_the_union(intervals: list[tuple[int, int]]) -> None:
    assert merge_busy(events_of(Lane.H2D, intervals)) == by_ticks(intervals)


def test_merge_busy_of_nothing_is_zero() -> None:
    assert merge_busy([]) == 0.0


def test_touching_nested_and_separate_intervals() -> None:
    # 0-4 holds 1-2; 4-5 touches; 7-8 stands alone: 5 + 1 seconds
    assert merge_busy(events_of(Lane.D2H, [(0, 4), (1, 1), (4, 1), (7, 1)])) == 6.0


@given(INTERVALS, INTERVALS)
def test_lanes_do_not_mix(compute: list[tuple[int, int]], fetches: list[tuple[int, int]]) -> None:
    events = events_of(Lane.COMPUTE, compute) + events_of(Lane.H2D, fetches)
    timeline = Timeline(events=tuple(sorted(events, key=lambda e: e.start)), tiers=())

    busy, moved = timeline.busy(), timeline.moved()
    assert set(busy) == set(moved) == set(Lane)
    assert busy[Lane.COMPUTE] == by_ticks(compute)
    assert busy[Lane.H2D] == by_ticks(fetches)
    assert moved[Lane.H2D] == sum(length for _, length in fetches)
    assert busy[Lane.UPDATE] == moved[Lane.UPDATE] == 0
