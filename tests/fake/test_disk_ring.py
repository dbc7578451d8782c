"""The ring between device and disk: who has which of its bytes, and what is read into it ahead of time."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.device.base import Completion
from forebay.errors import ConfigError
from forebay.layout import PAGE
from forebay.scheduling.activations import DiskRing, ReadAhead, RingPlace, disk_nbytes


class Job(Completion):
    """Something queued; ``after`` is all that it waits for, directly or not."""

    def __init__(self, *after: Completion) -> None:
        self.after = {self, *(one for a in after if isinstance(a, Job) for one in a.after)}

    def wait(self) -> None:
        return

    def done(self) -> bool:
        return False


def test_bytes_are_given_out_one_after_the_other_in_whole_pages() -> None:
    ring = DiskRing(4 * PAGE)
    places = [ring.take(n)[0] for n in (1, PAGE, PAGE + 1)]
    assert [(p.offset, p.nbytes) for p in places] == [(0, PAGE), (PAGE, PAGE), (2 * PAGE, 2 * PAGE)]


def test_an_item_lies_in_one_piece_and_the_end_of_the_ring_is_left_out() -> None:
    ring = DiskRing(4 * PAGE)
    first, writes = ring.take(3 * PAGE)[0], Job()
    first.busy = (writes,)
    second, after = ring.take(2 * PAGE)
    assert (second.offset, after) == (0, (writes,))
    second.busy = (Job(),)
    third, after = ring.take(PAGE)
    # What is left of the first is still the first's.
    assert (third.offset, after) == (2 * PAGE, (writes,))
    third.busy = (Job(),)
    fourth, after = ring.take(PAGE)
    assert (fourth.offset, after) == (3 * PAGE, ())


def test_a_place_that_nobody_has_said_is_free_is_not_given_away() -> None:
    ring = DiskRing(2 * PAGE)
    first, second = ring.take(PAGE)[0], ring.take(PAGE)[0]
    assert ring.blocking(PAGE) == (first,)
    assert ring.blocking(2 * PAGE) == (first, second)
    with pytest.raises(ConfigError, match=r"bytes 0 to 4096 of the ring to disk are in use"):
        ring.take(PAGE)
    first.busy = ()
    assert ring.blocking(PAGE) == ()
    assert ring.take(PAGE)[0].offset == 0


@pytest.mark.parametrize("capacity", [0, PAGE - 1, PAGE])
def test_an_item_that_is_larger_than_the_ring(capacity: int) -> None:
    with pytest.raises(ConfigError, match=f"the ring to disk has {capacity} bytes and 8192 are needed"):
        DiskRing(capacity).take(PAGE + 1)


@given(capacity=st.integers(4, 9), sizes=st.lists(st.integers(1, 4 * PAGE), max_size=40))
def test_whoever_writes_waits_for_whoever_had_the_bytes(capacity: int, sizes: list[int]) -> None:
    ring = DiskRing(capacity * PAGE + 100)
    last: dict[int, Job] = {}  # by page
    for nbytes in sizes:
        place, after = ring.take(nbytes)
        job = Job(*after)
        place.busy = (job,)
        pages = range(place.offset // PAGE, (place.offset + place.nbytes) // PAGE)
        assert place.nbytes == disk_nbytes(nbytes)
        assert place.offset + place.nbytes <= ring.capacity
        assert {last[page] for page in pages if page in last} <= job.after
        last.update(dict.fromkeys(pages, job))


# Reading ahead.


class Disk:
    """Items of some pages each, all on disk; ``reads`` are the items read, in order."""

    def __init__(self, capacity: int, *pages: int) -> None:
        self.pages = pages
        self.reads: list[int] = []
        self.ahead = ReadAhead[int](DiskRing(capacity * PAGE), self.read)
        for item, count in enumerate(pages):
            place, _ = self.ahead.take(count * PAGE)
            place.busy = (Job(),)
            self.ahead.left(item, count * PAGE)

    def read(self, item: int, place: RingPlace, after: tuple[Completion, ...]) -> Completion:
        self.reads.append(item)
        return Job(*after)

    def bring(self, item: int) -> None:
        """To the device."""
        _, read = self.ahead.demand(item)
        self.ahead.sent(item, Job(read))


def test_what_left_last_is_read_first_as_far_as_the_ring_goes() -> None:
    disk = Disk(3, 1, 1, 1, 1)
    disk.ahead.fill()
    assert disk.reads == [3, 2, 1]
    disk.ahead.fill()
    assert disk.reads == [3, 2, 1]
    disk.bring(3)
    disk.ahead.fill()
    assert disk.reads == [3, 2, 1, 0]


def test_what_has_no_room_is_not_overtaken() -> None:
    disk = Disk(3, 1, 3, 1, 1)
    disk.ahead.fill()
    assert disk.reads == [3, 2]
    disk.bring(3)
    disk.ahead.fill()
    assert disk.reads == [3, 2]
    disk.bring(2)
    disk.ahead.fill()
    assert disk.reads == [3, 2, 1]


def test_what_was_not_read_is_read_when_it_is_asked_for_whoever_was_read_ahead() -> None:
    disk = Disk(2, 1, 1, 1)
    disk.ahead.fill()
    assert disk.reads == [2, 1]
    disk.bring(0)  # into the bytes of 2, which is read a second time
    assert disk.reads == [2, 1, 0]
    disk.bring(1)
    disk.bring(2)
    assert disk.reads == [2, 1, 0, 2]


def test_something_leaves_while_the_ring_is_full_of_what_was_read_ahead() -> None:
    disk = Disk(2, 1, 1)
    disk.ahead.fill()
    place, after = disk.ahead.take(2 * PAGE)
    assert len(after) == 2  # the reads
    place.busy = (Job(),)
    disk.ahead.left(2, 2 * PAGE)
    for item in (2, 1, 0):
        disk.bring(item)
    assert disk.reads == [1, 0, 2, 1, 0]


def test_what_nobody_will_ask_for_is_not_read_and_makes_room() -> None:
    disk = Disk(2, 1, 1, 1, 1)
    disk.ahead.forget(3)
    disk.ahead.forget(3)
    disk.ahead.fill()
    assert disk.reads == [2, 1]
    disk.ahead.forget(2)
    disk.ahead.fill()
    assert disk.reads == [2, 1, 0]


def test_a_read_that_no_lane_takes_can_be_tried_again() -> None:
    def refuse(item: int, place: RingPlace, after: tuple[Completion, ...]) -> Completion:
        raise MemoryError

    reads: list[Callable[[int, RingPlace, tuple[Completion, ...]], Completion]] = [refuse, lambda *_: Job()]
    ahead = ReadAhead[int](DiskRing(PAGE), lambda *given: reads.pop(0)(*given))
    ahead.left(0, PAGE)
    with pytest.raises(MemoryError):
        ahead.demand(0)
    assert ahead.demand(0)[0].offset == 0


@given(capacity=st.integers(4, 8), pages=st.lists(st.integers(1, 4), min_size=1, max_size=12), seed=st.integers(0, 9))
def test_in_reverse_order_each_is_read_once_and_in_any_order_all_arrive(
    capacity: int, pages: list[int], seed: int
) -> None:
    """No place is used by two at a time: what is read waits for whoever was there."""
    last: dict[int, Job] = {}
    reads: list[int] = []

    def read(item: int, place: RingPlace, after: tuple[Completion, ...]) -> Completion:
        job = Job(*after)
        touched = range(place.offset // PAGE, (place.offset + place.nbytes) // PAGE)
        assert {last[page] for page in touched if page in last} <= job.after
        last.update(dict.fromkeys(touched, job))
        reads.append(item)
        return job

    for order in (list(reversed(range(len(pages)))), random.Random(seed).sample(range(len(pages)), len(pages))):
        reads.clear()
        last.clear()
        ahead = ReadAhead[int](DiskRing(capacity * PAGE), read)
        for item, count in enumerate(pages):
            ahead.left(item, count * PAGE)
        ahead.fill()
        for item in order:
            place, here = ahead.demand(item)
            copied = Job(here)
            last.update(dict.fromkeys(range(place.offset // PAGE, (place.offset + place.nbytes) // PAGE), copied))
            ahead.sent(item, copied)
            ahead.fill()
        assert set(reads) == set(range(len(pages)))
        if order == sorted(order, reverse=True):
            assert reads == order
