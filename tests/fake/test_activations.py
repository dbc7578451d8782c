"""When offloaded activations come back, and where they lie on the host: windows, order, and ranges of the arena."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.device.fake import FakeBuffer, FakeDevice
from forebay.errors import ConfigError
from forebay.memory import ALIGNMENT
from forebay.scheduling.activations import Ranges, Reloads, host_nbytes
from forebay.scheduling.window import TransferWindow
from forebay.timeline import Lane

SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=12)


def reloading(window: int, sizes: list[int]) -> tuple[Reloads[int], list[int]]:
    """Items 0, 1, ... of ``sizes``, offloaded in that order; and the list of what is reloaded."""
    queued: list[int] = []
    reloads = Reloads[int](window, queued.append)
    for item, nbytes in enumerate(sizes):
        reloads.offloaded(item, nbytes)
    return reloads, queued


def test_what_was_offloaded_last_comes_back_first_and_no_more_than_the_window() -> None:
    reloads, queued = reloading(20, [10, 10, 10, 10])
    assert queued == []  # forward has the device to itself
    reloads.begin_backward()
    assert queued == [3, 2]
    reloads.demand(3)
    assert queued == [3, 2, 1]
    assert reloads.ahead == 20
    reloads.demand(3)  # a second view of the same storage
    assert queued == [3, 2, 1]
    for item in (2, 1, 0):
        reloads.demand(item)
    assert queued == [3, 2, 1, 0]
    assert reloads.ahead == 0


def test_without_a_window_each_comes_when_it_is_asked_for() -> None:
    reloads, queued = reloading(0, [1, 1, 1])
    reloads.begin_backward()
    assert queued == []
    for item in (2, 0, 1):
        reloads.demand(item)
    assert queued == [2, 0, 1]


def test_what_does_not_fit_ahead_is_not_overtaken() -> None:
    reloads, queued = reloading(10, [4, 30, 4, 4])
    reloads.begin_backward()
    assert queued == [3, 2]
    reloads.demand(3)
    reloads.demand(2)
    assert queued == [3, 2]  # 30 bytes are next, and 0 comes after them
    reloads.demand(1)
    assert queued == [3, 2, 1, 0]


def test_a_demand_out_of_order_is_met_at_once() -> None:
    reloads, queued = reloading(10, [10, 10, 10])
    reloads.begin_backward()
    reloads.demand(0)
    assert queued == [2, 0]  # 2 was not asked for and still fills the window
    reloads.demand(2)
    assert queued == [2, 0, 1]


def test_what_nobody_will_ask_for_makes_room() -> None:
    reloads, queued = reloading(10, [10, 10, 10])
    reloads.begin_backward()
    reloads.forget(2)
    reloads.forget(1)
    reloads.forget(1)
    assert reloads.ahead == 0
    reloads.begin_backward()
    assert queued == [2, 0]


def test_a_reload_that_fails_can_be_tried_again() -> None:
    calls: list[int] = []

    def fail_once(item: int) -> None:
        calls.append(item)
        if len(calls) == 1:
            raise MemoryError

    reloads = Reloads[int](0, fail_once)
    reloads.offloaded(7, 10)
    with pytest.raises(MemoryError):
        reloads.demand(7)
    reloads.demand(7)
    assert calls == [7, 7]


def test_the_same_thing_is_not_offloaded_twice() -> None:
    reloads, _ = reloading(0, [1])
    with pytest.raises(ConfigError, match="twice"):
        reloads.offloaded(0, 1)


@given(sizes=SIZES, window=st.integers(0, 60), seed=st.integers(0, 9))
def test_everything_comes_back_once_and_the_window_holds(sizes: list[int], window: int, seed: int) -> None:
    reloads, queued = reloading(window, sizes)
    reloads.begin_backward()
    order = random.Random(seed).sample(range(len(sizes)), len(sizes))
    for place, item in enumerate(order):
        reloads.demand(item)
        ahead = [sizes[i] for i in queued if i not in order[: place + 1]]
        assert sum(ahead) == reloads.ahead <= window
    assert sorted(queued) == list(range(len(sizes)))


def test_offloads_are_held_by_the_window_and_done_when_backward_begins() -> None:
    """At 1 byte a second: the third waits for the first, and emptying the window waits for the last."""
    device = FakeDevice(None, {Lane.D2H: 1.0})
    window = TransferWindow(device, 20)
    for _ in range(3):
        window.admit(10)
        window.sent(device.copy(Lane.D2H, FakeBuffer(10), FakeBuffer(10)), 10)
    assert device.now() == 10.0
    window.empty()
    assert device.now() == 30.0


# Ranges of the arena.


def test_ranges_begin_on_the_alignment_and_merge_when_they_are_free_again() -> None:
    ranges = Ranges(3 * ALIGNMENT)
    assert [ranges.take(1), ranges.take(ALIGNMENT), ranges.take(ALIGNMENT - 1)] == [0, ALIGNMENT, 2 * ALIGNMENT]
    assert ranges.take(1) is None
    for offset in (0, 2 * ALIGNMENT, ALIGNMENT):
        ranges.give_back(offset)
    assert ranges.taken == 0
    assert ranges.take(3 * ALIGNMENT) == 0


def test_the_first_range_that_is_large_enough_is_taken() -> None:
    ranges = Ranges(10 * ALIGNMENT)
    first, second, third = (ranges.take(n * ALIGNMENT) for n in (2, 3, 4))
    assert (first, second, third) == (0, 2 * ALIGNMENT, 5 * ALIGNMENT)
    ranges.give_back(0)
    assert ranges.take(3 * ALIGNMENT) is None  # 2 and 1 are free, and not next to each other
    assert ranges.take(ALIGNMENT) == 0
    assert ranges.take(ALIGNMENT) == ALIGNMENT


@pytest.mark.parametrize("capacity", [0, ALIGNMENT - 1])
def test_an_arena_without_room(capacity: int) -> None:
    assert Ranges(capacity).take(1) is None


def test_only_what_was_taken_is_given_back() -> None:
    ranges = Ranges(ALIGNMENT)
    with pytest.raises(ConfigError, match="no range"):
        ranges.give_back(0)
    with pytest.raises(ConfigError, match="more than 0"):
        ranges.take(0)


@given(steps=st.lists(st.tuples(st.booleans(), st.integers(1, 500), st.integers(0, 20)), max_size=60))
def test_no_two_ranges_overlap_and_none_is_lost(steps: list[tuple[bool, int, int]]) -> None:
    ranges, held = Ranges(2048), dict[int, int]()
    for takes, nbytes, which in steps:
        if takes:
            offset = ranges.take(nbytes)
            if offset is not None:
                end = offset + host_nbytes(nbytes)
                assert end <= 2048
                assert all(end <= o or o + n <= offset for o, n in held.items())
                held[offset] = host_nbytes(nbytes)
        elif held:
            offset = sorted(held)[which % len(held)]
            del held[offset]
            ranges.give_back(offset)
        assert ranges.taken == sum(held.values())
    for offset in held:
        ranges.give_back(offset)
    assert ranges.take(2048) == 0
