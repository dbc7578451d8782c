"""Worker lanes: order, dependencies, failures, and what a thread leaves behind."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from time import perf_counter

import pytest

from forebay.device.base import Completion, NoDelays
from forebay.device.completions import ReadyCompletion
from forebay.device.delays import DelayOne, RandomDelays
from forebay.device.event_log import EventLog
from forebay.device.lanes import WORKER_LANES, WorkerLanes
from forebay.errors import SessionClosed
from forebay.timeline import Event, Lane


class Payload:
    """Something that a weak reference can watch."""


class Foreign(Completion):
    """A completion that the lanes know nothing about."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.waits = 0
        self.error = error

    def wait(self) -> None:
        self.waits += 1
        if self.error is not None:
            raise self.error

    def done(self) -> bool:
        return False


def forebay_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("forebay-")]


def make(delays: NoDelays | DelayOne | RandomDelays | None = None, limit: int = 100) -> tuple[WorkerLanes, EventLog]:
    log = EventLog(limit)
    return WorkerLanes(perf_counter, log, delays or NoDelays()), log


@pytest.fixture
def lanes() -> Iterator[WorkerLanes]:
    made, _ = make()
    yield made
    made.close()


def test_no_thread_before_the_first_job_and_none_after_close() -> None:
    lanes, _ = make()
    assert forebay_threads() == []
    for lane in WORKER_LANES:
        lanes.submit(lane, lambda: None)
        lanes.submit(lane, lambda: None)
    assert sorted(t.name for t in forebay_threads()) == sorted(f"forebay-{lane.value}" for lane in WORKER_LANES)
    lanes.close()
    assert forebay_threads() == []
    lanes.close()


def test_close_finishes_what_is_queued() -> None:
    lanes, _ = make()
    gate = threading.Event()
    seen: list[int] = []
    lanes.submit(Lane.UPDATE, gate.wait)
    handles = [lanes.submit(Lane.UPDATE, lambda i=i: seen.append(i)) for i in range(5)]
    closer = threading.Thread(target=lanes.close)
    closer.start()
    gate.set()
    closer.join()
    assert seen == [0, 1, 2, 3, 4]
    assert all(handle.done() for handle in handles)


def test_submit_after_close_is_refused() -> None:
    lanes, _ = make()
    lanes.close()
    with pytest.raises(SessionClosed, match="block 3"):
        lanes.submit(Lane.H2D, lambda: None, what="block 3")


def test_close_inside_a_job_does_not_wait_for_itself() -> None:
    lanes, _ = make()
    lanes.submit(Lane.UPDATE, lanes.close).wait()
    for thread in forebay_threads():
        thread.join()
    with pytest.raises(SessionClosed):
        lanes.submit(Lane.UPDATE, lambda: None)


@pytest.mark.parametrize("lane", [Lane.COMPUTE, Lane.STALL])
def test_compute_takes_no_jobs(lanes: WorkerLanes, lane: Lane) -> None:
    with pytest.raises(ValueError, match=lane.value):
        lanes.submit(lane, lambda: None)


def test_a_lane_keeps_the_order_and_lanes_do_not_wait_for_each_other(lanes: WorkerLanes) -> None:
    gate = threading.Event()
    seen: list[str] = []
    lanes.submit(Lane.H2D, gate.wait)
    for name in "abc":
        lanes.submit(Lane.H2D, lambda name=name: seen.append(name))
    lanes.submit(Lane.D2H, lambda: seen.append("other")).wait()
    gate.set()
    lanes.synchronize()
    assert seen == ["other", "a", "b", "c"]


def test_a_job_starts_after_its_dependencies_and_passes_its_result(lanes: WorkerLanes) -> None:
    gate = threading.Event()
    foreign = Foreign()
    first = lanes.submit(Lane.DISK_READ, lambda: gate.wait() and 7)
    second = lanes.submit(Lane.H2D, lambda: first.done(), after=[first, foreign, ReadyCompletion()])
    assert not second.done()
    gate.set()
    assert second.wait() is True
    assert first.wait() == 7
    assert foreign.waits == 1


def test_a_failure_passes_to_the_dependents_without_running_them(lanes: WorkerLanes) -> None:
    error = OSError("disk on fire")

    def fail() -> None:
        raise error

    ran: list[int] = []
    first = lanes.submit(Lane.DISK_READ, fail)
    second = lanes.submit(Lane.H2D, lambda: ran.append(2), after=[first])
    third = lanes.submit(Lane.UPDATE, lambda: ran.append(3), after=[second])
    with pytest.raises(OSError) as caught:
        third.wait()
    assert caught.value is error
    assert ran == []
    lanes.synchronize()  # told once, by wait
    lanes.submit(Lane.H2D, lambda: ran.append(4)).wait()
    assert ran == [4]


def test_a_failure_of_a_foreign_dependency_passes_too(lanes: WorkerLanes) -> None:
    ran: list[int] = []
    handle = lanes.submit(Lane.H2D, lambda: ran.append(1), after=[Foreign(KeyError("x"))])
    with pytest.raises(KeyError):
        handle.wait()
    assert ran == []


def test_synchronize_raises_an_untold_error_once(lanes: WorkerLanes) -> None:
    first = lanes.submit(Lane.UPDATE, lambda: 1 // 0)
    lanes.submit(Lane.D2H, lambda: None, after=[first])  # a lane's wait is not a person's
    with pytest.raises(ZeroDivisionError):
        lanes.synchronize()
    lanes.synchronize()


def test_an_error_that_passes_through_another_job_is_told_once(lanes: WorkerLanes) -> None:
    first = lanes.submit(Lane.DISK_READ, lambda: 1 // 0)
    lanes.submit(Lane.UPDATE, first.wait)
    with pytest.raises(ZeroDivisionError):
        lanes.synchronize()
    lanes.synchronize()


def test_waiting_twice_raises_twice_and_does_not_lengthen_the_traceback(lanes: WorkerLanes) -> None:
    handle = lanes.submit(Lane.UPDATE, lambda: 1 // 0)
    lengths = []
    for _ in range(3):
        with pytest.raises(ZeroDivisionError) as caught:
            handle.wait()
        lengths.append(len(caught.traceback))
    assert len(set(lengths)) == 1


def test_an_idle_thread_keeps_nothing_of_a_finished_job(lanes: WorkerLanes) -> None:
    def submit() -> tuple[weakref.ref[Payload], weakref.ref[Payload], Completion]:
        captured, result = Payload(), Payload()
        handle = lanes.submit(Lane.D2H, lambda captured=captured, result=result: (captured, result)[1])
        return weakref.ref(captured), weakref.ref(result), handle

    gc.disable()  # reference counts alone must do it
    try:
        captured, result, handle = submit()
        handle.wait()
        assert captured() is None  # at the moment the completion is done, not one job later
        del handle
        lanes.synchronize()
        assert result() is None
    finally:
        gc.enable()


def test_a_failed_job_keeps_nothing_either(lanes: WorkerLanes) -> None:
    def submit() -> tuple[weakref.ref[Payload], Completion]:
        captured = Payload()

        def fail() -> None:
            local = captured
            raise ValueError(str(type(local)))

        return weakref.ref(captured), lanes.submit(Lane.D2H, fail)

    captured, handle = submit()
    with pytest.raises(ValueError, match="Payload") as caught:
        handle.wait()
    assert "in fail" in caught.value.__notes__[0]
    assert captured() is None


def test_the_job_that_was_not_run_keeps_nothing(lanes: WorkerLanes) -> None:
    def submit() -> tuple[weakref.ref[Payload], Completion]:
        captured = Payload()
        first = lanes.submit(Lane.H2D, lambda: 1 // 0)
        return weakref.ref(captured), lanes.submit(Lane.D2H, lambda captured=captured: None, after=[first])

    captured, handle = submit()
    with pytest.raises(ZeroDivisionError):
        handle.wait()
    assert captured() is None


def test_events_name_lane_bytes_and_job_and_include_the_delay() -> None:
    lanes, log = make(DelayOne(1, 0.02))
    first = lanes.submit(Lane.H2D, lambda: None, nbytes=64, what="block 0")
    lanes.submit(Lane.H2D, lambda: None, after=[first], nbytes=32, what="block 1").wait()
    lanes.close()
    events = log.drain()
    assert [(e.lane, e.nbytes, e.what) for e in events] == [(Lane.H2D, 64, "block 0"), (Lane.H2D, 32, "block 1")]
    assert events[0].end <= events[1].start
    assert events[1].end - events[1].start >= 0.02
    assert log.drain() == []


def test_untimed_and_failed_jobs_leave_no_event() -> None:
    lanes, log = make()
    lanes.submit(Lane.H2D, lambda: None, timed=False).wait()
    assert lanes.submit(Lane.H2D, lambda: 1 // 0).failure() is not None
    lanes.close()
    assert log.drain() == []


def test_the_log_is_bounded_and_sorted() -> None:
    log = EventLog(limit=3)
    for start in (5.0, 1.0, 4.0, 2.0, 3.0):
        log.add(Event(Lane.H2D, start, start + 1))
    assert log.dropped == 2
    assert [event.start for event in log.drain()] == [2.0, 3.0, 4.0]


def test_prepare_thread_runs_once_in_each_thread_before_its_first_job() -> None:
    names: list[str] = []
    log = EventLog()
    lanes = WorkerLanes(perf_counter, log, NoDelays(), lambda: names.append(threading.current_thread().name))
    assert lanes.submit(Lane.H2D, lambda: list(names)).wait() == ["forebay-h2d"]
    lanes.submit(Lane.H2D, lambda: None).wait()
    lanes.submit(Lane.UPDATE, lambda: None).wait()
    lanes.close()
    assert names == ["forebay-h2d", "forebay-update"]
    assert len(log.drain()) == 3


def test_a_failing_prepare_thread_is_told() -> None:
    lanes = WorkerLanes(perf_counter, EventLog(), NoDelays(), lambda: [][0])
    lanes.submit(Lane.H2D, lambda: None).wait()
    with pytest.raises(IndexError):
        lanes.synchronize()
    lanes.close()


def test_dependencies_hold_under_random_delays() -> None:
    lanes, _ = make(RandomDelays(seed=3, max_seconds=0.002))
    order: list[int] = []
    previous: list[Completion] = []
    for i in range(40):
        lane = WORKER_LANES[(i * 7) % len(WORKER_LANES)]
        previous = [lanes.submit(lane, lambda i=i: order.append(i), after=previous)]
    lanes.synchronize()
    lanes.close()
    assert order == list(range(40))


def test_random_delays_are_repeatable_bounded_and_only_on_the_named_lanes() -> None:
    def draw() -> list[float]:
        delays = RandomDelays(seed=1, max_seconds=0.5, lanes=[Lane.H2D])
        return [delays.seconds(lane, "") for lane in (Lane.H2D, Lane.D2H, Lane.H2D)]

    first = draw()
    assert first == draw()
    assert first[1] == 0.0
    assert 0 < first[0] <= 0.5 and 0 < first[2] <= 0.5 and first[0] != first[2]


def test_delay_one_holds_back_exactly_one() -> None:
    delays = DelayOne(2, 0.25)
    assert [delays.seconds(lane, "") for lane in (Lane.H2D, Lane.D2H, Lane.UPDATE, Lane.H2D)] == [0, 0, 0.25, 0]
    assert delays.count == 4


def test_negative_delays_are_refused() -> None:
    with pytest.raises(ValueError, match="max_seconds"):
        RandomDelays(0, -1.0)
    with pytest.raises(ValueError, match="seconds"):
        DelayOne(0, -1.0)


def test_an_inline_job_of_an_idle_lane_is_run_by_its_caller() -> None:
    lanes, log = make()
    assert lanes.submit(Lane.D2H, threading.get_ident, inline=True).wait() == threading.get_ident()  # before any thread
    lanes.submit(Lane.D2H, lambda: None).wait()
    ran = lanes.submit(Lane.D2H, threading.get_ident, inline=True, after=(ReadyCompletion(),), nbytes=3, what="small")
    assert ran.done() and ran.wait() == threading.get_ident()
    assert [(e.lane, e.nbytes, e.what) for e in log.drain()][-1] == (Lane.D2H, 3, "small")
    assert lanes.submit(Lane.D2H, threading.get_ident).wait() != threading.get_ident()
    lanes.close()
    with pytest.raises(SessionClosed):
        lanes.submit(Lane.D2H, lambda: None, inline=True)


def test_an_inline_job_waits_its_turn_as_any_other(lanes: WorkerLanes) -> None:
    """Behind what the lane has, and behind what it comes after on another one."""
    gate, seen = threading.Event(), list[str]()
    lanes.submit(Lane.D2H, gate.wait)
    for name in ("one", "two"):
        lanes.submit(Lane.D2H, lambda name=name: seen.append(name), inline=name == "two")
    other = lanes.submit(
        Lane.H2D, lambda: seen.append("three"), inline=True, after=(lanes.submit(Lane.UPDATE, gate.wait),)
    )
    assert seen == [] and not other.done()
    gate.set()
    lanes.synchronize()
    assert sorted(seen) == ["one", "three", "two"] and seen.index("one") < seen.index("two")


def test_an_inline_job_that_is_to_be_late_is_late() -> None:
    lanes, _ = make(DelayOne(1, 0.02))
    lanes.submit(Lane.D2H, lambda: None).wait()
    lanes.synchronize()
    late = lanes.submit(Lane.D2H, threading.get_ident, inline=True)
    assert not late.done() and late.wait() != threading.get_ident()
    lanes.close()


def test_an_inline_job_that_fails_is_told_as_any_other_and_an_interrupt_at_once(lanes: WorkerLanes) -> None:
    def fail(error: BaseException) -> None:
        raise error

    lanes.submit(Lane.D2H, lambda: None).wait()
    lanes.synchronize()
    failed = lanes.submit(Lane.D2H, lambda: fail(ValueError("small")), inline=True)
    with pytest.raises(ValueError, match="small"):
        lanes.submit(Lane.H2D, lambda: None, after=(failed,)).wait()
    with pytest.raises(KeyboardInterrupt):
        lanes.submit(Lane.D2H, lambda: fail(KeyboardInterrupt()), inline=True)
    lanes.synchronize()  # both have been told
    assert lanes.submit(Lane.D2H, lambda: 7, inline=True).wait() == 7
