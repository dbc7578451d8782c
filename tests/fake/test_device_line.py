"""When the thread of a lane is told of a job: once what the job comes after is done, and in order."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from time import perf_counter, sleep
from types import FrameType
from typing import NoReturn

import pytest

from forebay.device import lanes as lanes_module
from forebay.device import line as line_module
from forebay.device.base import Completion, NoDelays
from forebay.device.completions import LaneCompletion, WorkerCompletion, dependency_failure
from forebay.device.event_log import EventLog
from forebay.device.lanes import WorkerLanes
from forebay.device.line import Line
from forebay.errors import ForebayError
from forebay.timeline import Lane
from tests.faults.interrupting import NEVER, interrupt_at

SOON = 0.05
"""Seconds in which a thread that was told of a job has begun it."""

DEADLINE = 20.0
"""Seconds after which a thread that was told of a job is not going to begin it."""


class Asked:
    """Waits for what a job comes after, in the lane's thread, and notes whether there was anything to wait for."""

    def __init__(self) -> None:
        self.found: list[bool] = []
        self.told = threading.Event()

    def __call__(self, completion: Completion) -> BaseException | None:
        self.found.append(completion.done())
        self.told.set()
        return dependency_failure(completion)


class Behind(LaneCompletion):
    """Some bytes that are there a while after a job has ended, as those of a copy that the job has only issued."""

    def __init__(self, issued: WorkerCompletion, there: threading.Event) -> None:
        self.issued = issued
        self.there = there

    def wait(self) -> None:
        self.there.wait()

    def done(self) -> bool:
        return self.there.is_set()

    def failure(self) -> None:
        self.there.wait()

    def job(self) -> WorkerCompletion | None:
        return self.issued


class Gates:
    """What the jobs of a test wait for, until it says that they may go on."""

    def __init__(self) -> None:
        self._made: list[threading.Event] = []

    def one(self) -> threading.Event:
        """A gate that is closed until it is set."""
        self._made.append(threading.Event())
        return self._made[-1]

    def open(self) -> None:
        for gate in self._made:
            gate.set()


@pytest.fixture
def lanes() -> Iterator[WorkerLanes]:
    made = WorkerLanes(perf_counter, EventLog(), NoDelays())
    yield made
    made.close()


@pytest.fixture
def gates(lanes: WorkerLanes) -> Iterator[Gates]:
    """Opened before ``lanes`` are closed, which waits for every job: so a test that fails ends too."""
    made = Gates()
    yield made
    made.open()


def test_a_thread_hears_of_a_job_when_all_that_it_comes_after_is_done(lanes: WorkerLanes, gates: Gates) -> None:
    both, asked, seen = (gates.one(), gates.one()), Asked(), []
    lanes.submit(Lane.UPDATE, lambda: None).wait()  # its thread is there, and idle
    before = [lanes.submit(lane, gate.wait) for lane, gate in zip((Lane.D2H, Lane.DISK_READ), both, strict=True)]
    job = lanes.submit(Lane.UPDATE, lambda: seen.append("first"), after=before, await_one=asked)
    behind = lanes.submit(Lane.UPDATE, lambda: seen.append("second"))
    for gate in both:
        sleep(SOON)
        assert not seen and not asked.found and not job.done()
        gate.set()
    behind.wait()
    assert seen == ["first", "second"]
    assert asked.found == [True, True]


def test_what_has_no_job_is_waited_for_by_the_thread(lanes: WorkerLanes, gates: Gates) -> None:
    gate, asked = gates.one(), Asked()
    copied = Behind(lanes.submit(Lane.H2D, gate.wait), gates.one())
    job = lanes.submit(Lane.UPDATE, lambda: None, after=[copied], await_one=asked)
    sleep(SOON)
    assert not asked.found
    gate.set()
    assert asked.told.wait(DEADLINE)
    assert not job.done()
    copied.there.set()
    job.wait()
    assert asked.found == [False]


def test_a_job_that_failed_is_told_of_too(lanes: WorkerLanes, gates: Gates) -> None:
    gate = gates.one()
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


def test_lanes_close_behind_a_job_that_waits(lanes: WorkerLanes, gates: Gates) -> None:
    gate, seen = gates.one(), []
    first = lanes.submit(Lane.H2D, gate.wait)
    lanes.submit(Lane.UPDATE, lambda: seen.append(1), after=[first])
    closer = threading.Thread(target=lanes.close, daemon=True)
    closer.start()
    sleep(SOON)
    assert closer.is_alive()
    gate.set()
    closer.join(DEADLINE)
    assert not closer.is_alive()
    assert seen == [1]


SUBMITTING = {inspect.getfile(lanes_module), inspect.getfile(line_module)}


class Interrupt:
    """Ctrl-C at the ``nth`` place of ``submit`` where Python looks for one: as a function begins, or one of C ends."""

    def __init__(self, nth: int) -> None:
        self.left = nth

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if event in ("call", "c_return") and frame.f_code.co_filename in SUBMITTING:
            self.left -= 1
            if self.left == -1:
                raise KeyboardInterrupt


@contextmanager
def at_a_call(nth: int) -> Iterator[None]:
    profiler = sys.getprofile()
    sys.setprofile(Interrupt(nth))
    try:
        yield
    finally:
        sys.setprofile(profiler)


@contextmanager
def at_an_instruction(nth: int) -> Iterator[None]:
    """Of what puts a job in line."""
    tracer = sys.gettrace()
    sys.settrace(interrupt_at(nth, *(method.__code__ for method in (Line.put, Line._one_less, Line._pass_on))))
    try:
        yield
    finally:
        sys.settrace(tracer)


def interrupted(lanes: WorkerLanes, before: WorkerCompletion, place: AbstractContextManager[None]) -> bool:
    """Submits a job that comes after ``before``; whether it was interrupted at its ``place``."""
    try:
        with place:
            lanes.submit(Lane.UPDATE, lambda: None, after=[before, before])
    except KeyboardInterrupt:
        return True
    return False


@pytest.mark.parametrize("place", [at_a_call, at_an_instruction])
@pytest.mark.parametrize("when", ["no thread yet", "first", "behind another", "nothing before it"])
def test_lanes_end_wherever_a_call_of_submit_was_interrupted(
    when: str, place: Callable[[int], AbstractContextManager[None]]
) -> None:
    nth, was = 0, True
    while was:
        gates, prepared, order = (threading.Event(), threading.Event()), list[int](), list[int]()
        lanes = WorkerLanes(perf_counter, EventLog(), NoDelays(), lambda prepared=prepared: prepared.append(1))
        with place(NEVER):
            before, other = lanes.submit(Lane.H2D, gates[0].wait), lanes.submit(Lane.D2H, gates[1].wait)
            if when != "no thread yet":
                lanes.submit(Lane.UPDATE, lambda: None).wait()
            if when == "behind another":
                lanes.submit(Lane.UPDATE, lambda order=order: order.append(0), after=[other])
            if when == "nothing before it":
                gates[0].set()
                before.wait()
        was = interrupted(lanes, before, place(nth))
        behind = lanes.submit(Lane.UPDATE, lambda order=order: order.append(1), after=[before])
        gates[0].set()
        before.wait()
        gates[1].set()
        closer = threading.Thread(target=lambda lanes=lanes: (lanes.synchronize(), lanes.close()), daemon=True)
        closer.start()
        closer.join(10)
        assert not closer.is_alive(), nth
        assert behind.done() and order == [0, 1][when != "behind another" :] and prepared
        nth += 1
    assert nth > 10


def test_a_lane_whose_thread_is_refused_is_started_by_the_next_job(
    lanes: WorkerLanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(_: threading.Thread) -> NoReturn:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        with pytest.raises(ForebayError, match=r"thread forebay-update \(can't start new thread\); raise .*ulimit -u"):
            lanes.submit(Lane.UPDATE, lambda: 1)
    assert lanes.submit(Lane.UPDATE, lambda: 2).wait() == 2
    lanes.synchronize()
