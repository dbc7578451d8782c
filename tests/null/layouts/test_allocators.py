"""Models of allocators: PyTorch's rules one by one, laws that hold for every recording, what is said of the worst
moment."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.buffers import Buffer
from forebay.errors import ConfigError
from forebay.recording import Recording, Request, recording_of
from forebay.simulation.allocators import (
    ALLOCATORS,
    Allocator,
    CachingAllocator,
    PlannedAllocator,
    least,
    replay,
    room_for,
)
from forebay.simulation.allocators.caching import CachingSettings
from forebay.simulation.allocators.limits import EXACT
from forebay.units import MiB


@st.composite
def recordings(draw: st.DrawFn) -> Recording:
    """Up to 40 requests of all size classes on two streams, given back in any order, some of them never."""
    sizes = st.one_of(st.integers(0, 4096), st.integers(1, 64).map(lambda n: n * 512 * 1024 + 7))
    requests: list[Request] = []
    events: list[int] = []
    live: list[int] = []
    for _ in range(draw(st.integers(0, 60))):
        if live and draw(st.booleans()):
            events.append(-1 - live.pop(draw(st.integers(0, len(live) - 1))))
        elif len(requests) < 40:
            requests.append(Request("made", draw(sizes), draw(st.integers(0, 1))))
            live.append(len(requests) - 1)
            events.append(live[-1])
    return Recording(tuple(requests), tuple(events))


def expect_whole(allocator: Allocator, live: Iterable[int]) -> None:
    """No two boxes overlap, each lies in its segment, and segments and reserved bytes agree."""
    segments = sorted(allocator.segments(), key=lambda segment: segment.address)
    assert sum(segment.nbytes for segment in segments) == allocator.reserved
    end = -1
    for segment in segments:
        assert segment.address >= end and segment.free >= 0
        end = segment.address + segment.nbytes
        reached = segment.address
        for box in sorted(segment.boxes, key=lambda box: box.address):
            assert box.address >= reached
            reached = box.address + box.nbytes
        assert reached <= end
    assert {box.number for segment in segments for box in segment.boxes} == set(live)


@pytest.mark.parametrize("name", sorted(ALLOCATORS))
@settings(max_examples=40, deadline=None)
@given(recording=recordings())
def test_memory_is_whole_after_every_event(name: str, recording: Recording) -> None:
    allocator = ALLOCATORS[name](recording, None)
    live: set[int] = set()
    for event in recording.events:
        if event < 0:
            allocator.free(-1 - event)
            live.discard(-1 - event)
        else:
            request = recording.requests[event]
            boxes = allocator.allocate(event, request.nbytes, request.stream)
            assert sum(box.nbytes for box in boxes) >= request.nbytes
            if request.nbytes:
                live.add(event)
        expect_whole(allocator, live)
        assert allocator.reserved >= sum(recording.requests[n].nbytes for n in live)


def sizes(*asked: int, free: tuple[int, ...] = ()) -> tuple[CachingAllocator, list[int]]:
    """The caching allocator after requests of so many bytes; those at the places ``free`` are given back at once."""
    allocator, reserved = CachingAllocator(), []
    for number, nbytes in enumerate(asked):
        allocator.allocate(number, nbytes, 0)
        if number in free:
            allocator.free(number)
        reserved.append(allocator.reserved)
    return allocator, reserved


@pytest.mark.parametrize(
    ("asked", "reserved"),
    [
        (1, 2 * MiB),
        (MiB, 2 * MiB),
        (MiB + 1, 20 * MiB),
        (10 * MiB - 512, 20 * MiB),
        (10 * MiB, 10 * MiB),
        (10 * MiB + 1, 12 * MiB),
        (0, 0),
    ],
)
def test_size_classes(asked: int, reserved: int) -> None:
    assert sizes(asked)[1] == [reserved]


def test_blocks_are_split_shared_and_joined() -> None:
    # Four small ones of 512 KiB fill a segment of 2 MiB, the fifth needs another.
    assert sizes(*[MiB // 2] * 5)[1] == [2 * MiB] * 4 + [4 * MiB]
    # 19.5 MiB are left as they are: half a MiB of the segment is too little to be a block for large requests.
    kept, _ = sizes(20 * MiB - MiB // 2, free=(0,))
    kept.allocate(1, 19 * MiB, 0)
    (segment,) = kept.segments()
    assert segment.free == 0
    # Neighbours that are free are one block again.
    joined, reserved = sizes(5 * MiB, 5 * MiB, 10 * MiB - 512)
    assert reserved == [20 * MiB] * 3
    for number in range(3):
        joined.free(number)
    joined.allocate(3, 20 * MiB, 0)
    assert joined.reserved == 20 * MiB


def test_streams_share_nothing() -> None:
    allocator = CachingAllocator()
    allocator.allocate(0, 32 * MiB, 0)
    allocator.free(0)
    allocator.allocate(1, 32 * MiB, 1)
    assert allocator.reserved == 64 * MiB
    allocator.allocate(2, 32 * MiB, 0)
    assert allocator.reserved == 64 * MiB


def test_a_limit_gives_back_what_is_free_and_counts_what_does_not_fit() -> None:
    allocator = CachingAllocator(CachingSettings(limit=100 * MiB))
    allocator.allocate(0, 60 * MiB, 0)
    allocator.free(0)
    allocator.allocate(1, 80 * MiB, 0)
    assert (allocator.reserved, allocator.out_of_memory) == (80 * MiB, 0)
    allocator.allocate(2, 80 * MiB, 0)
    assert allocator.out_of_memory == 1


def test_garbage_goes_before_memory_is_short() -> None:
    allocator = CachingAllocator(CachingSettings(limit=1000 * MiB, collect_from=0.1))
    allocator.allocate(0, 200 * MiB, 0)
    allocator.free(0)
    allocator.allocate(1, 50 * MiB, 1)  # another stream: the first segment is of no use to it
    assert allocator.reserved == 50 * MiB


def test_large_blocks_may_be_kept_whole() -> None:
    allocator = CachingAllocator(CachingSettings(max_split=64 * MiB))
    allocator.allocate(0, 128 * MiB, 0)
    allocator.free(0)
    allocator.allocate(1, 32 * MiB, 0)
    assert allocator.reserved == 160 * MiB
    for wrong in ({"max_split": MiB}, {"collect_from": 1.0}, {"collect_from": 0.5}):
        with pytest.raises(ConfigError):
            CachingSettings(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", sorted(ALLOCATORS))
@settings(max_examples=40, deadline=None)
@given(recording=recordings())
def test_on_the_least_device_everything_has_room_and_on_a_smaller_one_not(name: str, recording: Recording) -> None:
    def has_room(limit: int) -> bool:
        allocator = ALLOCATORS[name](recording, limit)
        for event in recording.events:
            if event < 0:
                allocator.free(-1 - event)
            else:
                allocator.allocate(event, recording.requests[event].nbytes, recording.requests[event].stream)
                if allocator.out_of_memory or allocator.reserved > limit:
                    return False
        return True

    room, live = room_for(recording, partial(ALLOCATORS[name], recording)), max(recording.live, default=0)
    assert room >= live and has_room(room)
    assert room == live or not has_room(room - EXACT)


@given(threshold=st.integers(0, 1 << 40), low=st.integers(0, 1 << 40), exact=st.integers(1, 1 << 20))
def test_the_least_that_fits(threshold: int, low: int, exact: int) -> None:
    found = least(lambda nbytes: nbytes >= threshold, low, exact)
    assert max(low, threshold) <= found < max(low + 1, threshold + exact)


def test_a_device_need_not_have_what_nobody_uses() -> None:
    """One large request after the other: what the first had goes back for the second."""
    recording = recording_of([Buffer(f"activation-{n}", n, n + 1, (100 + 2 * n) * MiB) for n in range(8)])
    found = replay("caching", recording, partial(ALLOCATORS["caching"], recording))
    assert found.peak_reserved == sum(range(100, 116, 2)) * MiB
    assert room_for(recording, partial(ALLOCATORS["caching"], recording)) == 114 * MiB


def growing(steps: int = 8) -> Recording:
    """Ever larger tensors, each given back when the next but one is made: the worst for segments of one size."""
    count = 6 * steps
    buffers = [Buffer(f"activation-{n}", n, n + 2, (30 + 3 * n) * MiB) for n in range(count)]
    return recording_of(buffers)


def test_segments_of_one_size_are_wasted_where_stitched_ones_and_expandable_ones_are_not() -> None:
    recording = growing()
    over = {name: replay(name, recording, partial(make, recording)).over for name, make in ALLOCATORS.items()}
    assert over["caching"] > 1
    assert over["gmlake"] < 0.02
    assert over["expandable"] < over["caching"]


def test_the_worst_moment_names_who_holds_the_memory() -> None:
    # A small leftover keeps a segment of 400 MiB: the request beside it is gone.
    buffers = (Buffer("weight-0", 0, 1, 400 * MiB), Buffer("statistic-0", 1, 9, 300 * MiB), Buffer("late-0", 2, 9, MiB))
    found = replay("caching", recording_of(buffers), lambda limit: CachingAllocator())
    assert found.peak_reserved == 402 * MiB
    assert (found.worst, found.unused) == (3, 101 * MiB)
    first, second = found.holders
    assert (first.what, first.nbytes, first.segment) == ("statistic", 300 * MiB, 400 * MiB)
    assert (first.free, second.what, second.free) == (100 * MiB, "late", MiB)


def test_planned_addresses_take_what_was_planned() -> None:
    buffers = (Buffer("a", 0, 2, 100), Buffer("b", 1, 3, 50), Buffer("c", 2, 4, 100))
    recording = recording_of(buffers, steps=2)
    offsets = {0: 0, 1: 100, 2: 0, 3: 0, 4: 100, 5: 0}
    found = replay("arena", recording, lambda limit: PlannedAllocator(offsets, 150))
    assert (found.peak_reserved, found.peak_live, found.over) == (150, 150, 0.0)
    assert {(life.box.address, life.box.nbytes) for life in found.lives} == {(0, 100), (100, 50)}


def test_recordings_that_are_none_are_refused() -> None:
    one = (Request("a", 1),)
    for events in ((0, 0), (-1,), (0, -1, -1), (1,)):
        with pytest.raises(ConfigError, match="makes each request once"):
            Recording(one, events)
    assert Recording(one, (0, -1)).live == (1, 0)
