"""Whose turn it is to compute: one at a time, who is ready first first, and nothing for those that take no part."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import perf_counter

import pytest

from forebay.device.base import NoDelays
from forebay.device.event_log import EventLog
from forebay.device.lanes import WorkerLanes
from forebay.device.turn import Cancelled, Part, Turn
from forebay.errors import UsageError
from forebay.timeline import Lane

LIMIT = 20.0
"""Seconds after which a test that hangs fails."""


class Noted(Part):
    """Says in ``log`` when it goes on and when another does."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name = name
        self.log = log

    def may_pause(self) -> bool:
        return self.name != "stays"

    def pause(self) -> None:
        self.log.append(f"pause {self.name}")

    def resume(self) -> None:
        self.log.append(f"resume {self.name}")


class Runner:
    """Functions in threads that take part, and what they raised. Each is let in when it is ``begun``."""

    def __init__(self) -> None:
        self.turn = Turn()
        self.log: list[str] = []
        self.errors: dict[str, BaseException] = {}
        self.threads: list[threading.Thread] = []

    def begin(self, name: str, function: Callable[[], None]) -> None:
        def run() -> None:
            try:
                with self.turn.taken(Noted(name, self.log)):
                    function()
            except BaseException as error:
                self.errors[name] = error

        self.threads.append(threading.Thread(target=run, daemon=True))
        self.threads[-1].start()

    def end(self) -> None:
        for thread in self.threads:
            thread.join(LIMIT)
            assert not thread.is_alive()


class Gate:
    """Something that is waited for, and when somebody has begun to."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def wait(self, turn: Turn) -> None:
        with turn.given_away():
            self.reached.set()
            assert self.opened.wait(LIMIT)


@pytest.fixture
def runner() -> Runner:
    return Runner()


def test_never_two_at_once_and_everyone_gets_on(runner: Runner) -> None:
    inside, most = [0], [0]

    def work() -> None:
        for _ in range(50):
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            sum(range(2000))  # long enough for another thread to come in, if it could
            inside[0] -= 1
            runner.turn.offer()

    with runner.turn.opened():
        for number in range(3):
            runner.begin(str(number), work)
        runner.end()
    assert not runner.errors and most == [1] and inside == [0]


def test_whoever_waits_gives_the_turn_away_and_comes_back_last(runner: Runner) -> None:
    gate, order = Gate(), list[str]()

    def first() -> None:
        order.append("first")
        gate.wait(runner.turn)
        order.append("first again")

    def second() -> None:
        order.append("second")
        gate.opened.set()
        # The first one is ready, and has to wait until the second one lets it.
        while not runner.turn._queue:
            pass
        order.append("second still")
        runner.turn.offer()
        order.append("second again")

    with runner.turn.opened():
        runner.begin("first", first)
        assert gate.reached.wait(LIMIT)
        runner.begin("second", second)
        runner.end()
    assert not runner.errors
    assert order == ["first", "second", "second still", "first again", "second again"]


def test_what_threads_have_in_common_changes_with_the_turn(runner: Runner) -> None:
    gate = Gate()

    def second() -> None:
        runner.turn.offer()  # nobody is ready: nothing changes
        runner.log.append("second runs")
        gate.opened.set()

    with runner.turn.opened():
        runner.begin("first", lambda: gate.wait(runner.turn))
        assert gate.reached.wait(LIMIT)
        runner.begin("second", second)
        runner.end()
    assert not runner.errors
    expected = ["resume first", "pause first", "resume second", "second runs", "pause second"]
    # It may be ready before the second one has ended, or after: what it finds is its own.
    assert runner.log[:5] == expected
    assert runner.log[5:] in (["pause second", "resume first", "pause first"], ["resume first", "pause first"])


def test_no_part_in_it_means_no_part_in_it(runner: Runner) -> None:
    """A thread that has not asked for a turn neither gives one away nor takes one."""
    held, gate = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        assert gate.wait(LIMIT)

    with runner.turn.opened():
        runner.begin("holder", hold)
        assert held.wait(LIMIT)
        with runner.turn.given_away():
            runner.turn.offer()
        gate.set()
        runner.end()
    assert not runner.errors and runner.log == ["resume holder", "pause holder"]


def test_one_that_may_not_pause_keeps_its_turn(runner: Runner) -> None:
    gate, order = Gate(), list[str]()

    def stays() -> None:
        gate.wait(runner.turn)
        runner.turn.offer()
        order.append("stays")

    with runner.turn.opened():
        runner.begin("stays", stays)
        assert gate.reached.wait(LIMIT)
        runner.begin("other", lambda: order.append("other"))
        while not runner.turn._queue:
            pass
        gate.opened.set()
        runner.end()
    assert not runner.errors and order == ["stays", "other"]


def test_all_are_cancelled_once_and_unwind_one_at_a_time(runner: Runner) -> None:
    gates, unwound, again = [Gate(), Gate()], list[int](), list[str]()

    def work(number: int) -> None:
        try:
            gates[number].wait(runner.turn)
        finally:
            unwound.append(number)
            runner.turn.offer()
            with runner.turn.given_away():
                again.append("waits as ever")
            unwound.append(number)

    with runner.turn.opened():
        for number in (0, 1):
            runner.begin(str(number), lambda number=number: work(number))  # type: ignore[misc]
            assert gates[number].reached.wait(LIMIT)
        runner.turn.cancel()
        for gate in gates:
            gate.opened.set()
        runner.end()
    assert [type(error) for error in runner.errors.values()] == [Cancelled, Cancelled]
    assert unwound in ([0, 0, 1, 1], [1, 1, 0, 0]) and len(again) == 2


def test_one_that_never_waits_is_cancelled_at_its_next_block(runner: Runner) -> None:
    running, go_on = threading.Event(), threading.Event()

    def work() -> None:
        running.set()
        assert go_on.wait(LIMIT)
        while True:
            runner.turn.offer()

    with runner.turn.opened():
        runner.begin("busy", work)
        assert running.wait(LIMIT)
        runner.turn.cancel()
        go_on.set()
        runner.end()
    assert isinstance(runner.errors["busy"], Cancelled)


def test_one_call_at_a_time_and_another_after_it(runner: Runner) -> None:
    with runner.turn.opened():
        with pytest.raises(UsageError, match="take turns already"), runner.turn.opened():
            pass
        runner.turn.cancel()
    with runner.turn.opened():
        runner.begin("later", runner.turn.offer)  # what was cancelled before is over
        runner.end()
    assert not runner.errors


@pytest.mark.parametrize("wait", ["one", "all"])
def test_waiting_for_a_job_gives_the_turn_away(runner: Runner, wait: str) -> None:
    """The lane's own thread takes no part."""
    lanes = WorkerLanes(perf_counter, EventLog(), NoDelays(), turn=runner.turn)
    gate, begun, order = threading.Event(), threading.Event(), list[str]()

    def job() -> None:
        begun.set()
        assert gate.wait(LIMIT)

    def waiter() -> None:
        completion = lanes.submit(Lane.H2D, job)
        if wait == "one":
            completion.wait()
        else:
            lanes.synchronize()
        order.append("waiter")

    def other() -> None:
        order.append("other")
        gate.set()

    with runner.turn.opened():
        runner.begin("waiter", waiter)
        assert begun.wait(LIMIT)
        runner.begin("other", other)
        runner.end()
    lanes.close()
    assert not runner.errors and order == ["other", "waiter"]
