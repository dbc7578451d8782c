"""When the thread of a lane is told of a job: once what the job comes after is done, and in order."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from time import perf_counter, sleep

import pytest

from forebay.device.base import Completion, NoDelays
from forebay.device.lanes import EventLog, LaneCompletion, WorkerCompletion, WorkerLanes, dependency_failure
from forebay.timeline import Lane

SOON = 0.05
"""Seconds in which a thread that was told of a job has begun it."""


class Asked:
    """Waits for what a job comes after, in the lane's thread, and notes whether there was anything to wait for."""

    def __init__(self) -> None:
        self.found: list[bool] = []

    def __call__(self, completion: Completion) -> BaseException | None:
        self.found.append(completion.done())
        return dependency_failure(completion)


class Behind(LaneCompletion):
    """Some bytes that are there a while after a job has ended, as those of a copy that the job has only issued."""

    def __init__(self, issued: WorkerCompletion) -> None:
        self.issued = issued
        self.there = threading.Event()

    def wait(self) -> None:
        self.there.wait()

    def done(self) -> bool:
        return self.there.is_set()

    def failure(self) -> None:
        self.there.wait()

    def job(self) -> WorkerCompletion | None:
        return self.issued


@pytest.fixture
def lanes() -> Iterator[WorkerLanes]:
    made = WorkerLanes(perf_counter, EventLog(), NoDelays())
    yield made
    made.close()


def test_a_thread_hears_of_a_job_when_all_that_it_comes_after_is_done(lanes: WorkerLanes) -> None:
    gates, asked, seen = (threading.Event(), threading.Event()), Asked(), []
    lanes.submit(Lane.UPDATE, lambda: None).wait()  # its thread is there, and idle
    before = [lanes.submit(lane, gate.wait) for lane, gate in zip((Lane.D2H, Lane.DISK_READ), gates, strict=True)]
    job = lanes.submit(Lane.UPDATE, lambda: seen.append("first"), after=before, await_one=asked)
    behind = lanes.submit(Lane.UPDATE, lambda: seen.append("second"))
    for gate in gates:
        sleep(SOON)
        assert not seen and not asked.found and not job.done()
        gate.set()
    behind.wait()
    assert seen == ["first", "second"]
    assert asked.found == [True, True]


def test_what_has_no_job_is_waited_for_by_the_thread(lanes: WorkerLanes) -> None:
    gate, asked = threading.Event(), Asked()
    copied = Behind(lanes.submit(Lane.H2D, gate.wait))
    job = lanes.submit(Lane.UPDATE, lambda: None, after=[copied], await_one=asked)
    sleep(SOON)
    assert not asked.found
    gate.set()
    while not asked.found:
        sleep(0.001)
    assert not job.done()
    copied.there.set()
    job.wait()
    assert asked.found == [False]


def test_a_job_that_failed_is_told_of_too(lanes: WorkerLanes) -> None:
    gate = threading.Event()
    first = lanes.submit(Lane.H2D, lambda: gate.wait() and 1 // 0)
    second = lanes.submit(Lane.UPDATE, lambda: None, after=[first])
    gate.set()
    with pytest.raises(ZeroDivisionError):
        second.wait()


def test_what_a_job_comes_after_may_end_while_it_is_queued(lanes: WorkerLanes) -> None:
    """Whoever ends and whoever queues look at each other at the same time: nothing is missed, nothing told twice."""
    order: list[int] = []
    previous: list[Completion] = []
    for number in range(300):
        lane = (Lane.H2D, Lane.D2H, Lane.UPDATE)[number % 3]
        previous = [lanes.submit(lane, lambda number=number: order.append(number), after=[*previous, *previous])]
    lanes.synchronize()
    assert order == list(range(300))


def test_lanes_close_behind_a_job_that_waits(lanes: WorkerLanes) -> None:
    gate, seen = threading.Event(), []
    first = lanes.submit(Lane.H2D, gate.wait)
    lanes.submit(Lane.UPDATE, lambda: seen.append(1), after=[first])
    closer = threading.Thread(target=lanes.close)
    closer.start()
    sleep(SOON)
    assert closer.is_alive()
    gate.set()
    closer.join()
    assert seen == [1]
