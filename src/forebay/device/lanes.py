"""Lanes served by worker threads. No torch here.

One thread per lane runs its jobs in the order of submission. A job waits for what it depends on, then for the
delay that a test injected, then runs. The event's start lies after the first wait and before the delay: a delayed
transfer looks like a slow one, which is what the delay stands for.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Sequence
from operator import methodcaller
from typing import Any, final

from forebay.device.base import Completion, Delays
from forebay.device.completions import (
    DONE,
    LaneCompletion,
    ReadyCompletion,
    Untold,
    WorkerCompletion,
    dependency_failure,
)
from forebay.device.event_log import EventLog
from forebay.device.line import Job, Line
from forebay.device.turn import Turn
from forebay.errors import ForebayError, SessionClosed
from forebay.timeline import Event, Lane

__all__ = ["WORKER_LANES", "WorkerLanes"]

_asked_if_done = methodcaller("done")

WORKER_LANES = (
    Lane.H2D,
    Lane.D2H,
    Lane.UPDATE,
    Lane.NORM,
    Lane.DEVICE_UPDATE,
    Lane.STORAGE_UPDATE,
    Lane.DISK_READ,
    Lane.DISK_WRITE,
)
"""The lanes that take jobs. ``COMPUTE`` and ``STALL`` only name events: the caller's own thread is their worker."""


@final
class WorkerLanes:
    """One daemon thread per lane, started by the lane's first job.

    ``now`` is the clock of the events in seconds; ``log`` receives one event per job that succeeded; ``delays`` is
    asked in the order of submission, so that a test that submits from one thread is repeatable. ``prepare_thread``
    runs once in each thread before its first job: thread-local state of a library (grad mode, current device) is
    set there. Whoever waits for a job gives its ``turn`` away meanwhile.
    """

    def __init__(
        self,
        now: Callable[[], float],
        log: EventLog,
        delays: Delays,
        prepare_thread: Callable[[], object] | None = None,
        turn: Turn | None = None,
    ) -> None:
        self._now = now
        self._log = log
        self._delays = delays
        self._prepare_thread = prepare_thread
        self._turn = turn or Turn()
        self._untold = Untold()
        self._state = threading.Condition()
        self._lines: dict[Lane, Line] = {}
        self._threads: list[threading.Thread] = []
        self._closed = False

    def submit(
        self,
        lane: Lane,
        run: Callable[[], Any],
        *,
        after: Sequence[Completion] = (),
        nbytes: int = 0,
        what: str = "",
        await_one: Callable[[Completion], BaseException | None] = dependency_failure,
        timed: bool = True,
        inline: bool = False,
    ) -> LaneCompletion:
        """Queues ``run`` on ``lane``. A failed dependency fails the job with the same exception, without running it.

        ``await_one`` says how the lane's thread waits for one of ``after`` and returns its failure. ``timed`` False:
        the caller records the event. ``inline``: the caller runs the job, if the lane has nothing else to do and it
        need not wait. Raises ``SessionClosed`` after ``close``.
        """
        if lane not in WORKER_LANES:
            raise ValueError(
                f"{lane.value} takes no jobs; use one of {', '.join(known.value for known in WORKER_LANES)}"
            )
        with self._state:
            if self._closed:
                raise SessionClosed(
                    f"{what or 'a job'} was given to the {lane.value} lane of a device that is closed; prepare again"
                )
            delay = self._delays.seconds(lane, what)
            if inline and not delay and self._may_begin(lane, after):
                # With the lock: a job that is submitted meanwhile must not begin before this one has ended.
                return self._run_here(lane, run, after, await_one, nbytes, what, timed)
            completion = WorkerCompletion(self._untold, self._turn)
            job = Job(run, after, await_one, completion, delay, nbytes, what, timed)
            if lane not in self._lines:
                self._start(lane)
            before = [j for c in after if isinstance(c, LaneCompletion) and (j := c.job()) is not None]
            self._lines[lane].put(job, before)
        return completion

    def _may_begin(self, lane: Lane, after: Sequence[Completion]) -> bool:
        """Whether ``lane`` has nothing to do, and nothing of ``after`` is still to come."""
        line = self._lines.get(lane)
        return (line is None or line.is_idle) and all(map(_asked_if_done, after))

    def _run_here(
        self,
        lane: Lane,
        run: Callable[[], Any],
        after: Sequence[Completion],
        await_one: Callable[[Completion], BaseException | None],
        nbytes: int,
        what: str,
        timed: bool,
    ) -> LaneCompletion:
        """What a lane's thread does with a job (``_finish``), in the calling thread: with nothing that hands it over,
        as hundreds are made in a step, between the ops of that thread."""
        for dependency in after:
            failure = await_one(dependency)
            if failure is not None:
                return self._failed(failure)
        start = self._now()
        try:
            result = run()
        except Exception as error:  # an interrupt is the caller's
            _turn_traceback_into_words(error)
            self._untold.add(error)
            return self._failed(error)
        if timed:
            self._log.add(Event(lane, start, self._now(), nbytes, what))
        return DONE if result is None else ReadyCompletion(result)

    def _failed(self, error: BaseException) -> WorkerCompletion:
        completion = WorkerCompletion(self._untold, self._turn)
        completion._fail(error)
        return completion

    def synchronize(self) -> None:
        """Waits until all lanes are idle; raises the first error that nobody was told of, once.

        Not for use inside a job, which would wait for itself.
        """
        with self._turn.given_away(), self._state:
            self._state.wait_for(self._idle)
        error = self._untold.take()
        if error is not None:
            raise error

    def close(self) -> None:
        """Finishes what is queued and ends the threads. A second call does nothing."""
        with self._state:
            if not self._closed:
                self._closed = True
                for line in self._lines.values():
                    line.end()
            threads, self._threads = self._threads, []
        for thread in threads:
            # The garbage collector may run a session's finalizer in any thread, one of ours included.
            if thread is not threading.current_thread():
                thread.join()

    def _start(self, lane: Lane) -> None:
        line = Line()
        thread = threading.Thread(
            target=self._serve,
            args=(lane, line),
            name=f"forebay-{lane.value}",
            daemon=True,
        )
        try:
            if self._prepare_thread is not None:
                # As a job: what it raises is told like any other failure, instead of ending the thread in silence.
                completion = WorkerCompletion(self._untold, self._turn)
                line.put(Job(self._prepare_thread, (), dependency_failure, completion, 0.0, 0, "prepare", False), ())
            _begin(thread)
            self._threads.append(thread)
            self._lines[lane] = line
        except BaseException:
            # Refused by the system, or Ctrl-C: the next job starts another, and this one ends if there is one.
            line.end()
            self._threads = [known for known in self._threads if known is not thread]
            raise

    def _idle(self) -> bool:
        return not any(line.unfinished for line in self._lines.values())

    def _serve(self, lane: Lane, line: Line) -> None:
        while (job := line.get()) is not None:
            self._finish(lane, job)
            # An idle thread must not keep a result alive: it may hold the tensors of a gradient.
            del job
            with self._state:
                line.unfinished -= 1
                if self._idle():
                    self._state.notify_all()

    def _finish(self, lane: Lane, job: Job) -> None:
        failure = self._await_all(job)
        if failure is not None:
            job.run = None
            job.completion._fail(failure)
            return
        start = self._now()
        if job.delay > 0:
            time.sleep(job.delay)
        try:
            result = _run_and_drop(job)
        except BaseException as error:  # belongs to whoever waits, whatever it is; the lane goes on
            _turn_traceback_into_words(error)
            self._untold.add(error)
            job.completion._fail(error)
            return
        if job.timed:
            # Before the completion: whoever has waited for a job finds its event in the log.
            self._log.add(Event(lane, start, self._now(), job.nbytes, job.what))
        job.completion._succeed(result)

    @staticmethod
    def _await_all(job: Job) -> BaseException | None:
        after, job.after = job.after, ()
        for dependency in after:
            failure = job.await_one(dependency)
            if failure is not None:
                return failure
        return None


def _begin(thread: threading.Thread) -> None:
    try:
        thread.start()
    except RuntimeError as error:
        raise ForebayError(
            f"the system refused the thread {thread.name} ({error}); raise its limits of processes and memory (ulimit "
            f"-u, ulimit -v, pids.max of the control group)"
        ) from error


def _run_and_drop(job: Job) -> Any:
    """Runs the job and lets go of it before its completion is set.

    Whoever waits for a copy and then drops its source must see the bytes go at that moment, not when this thread
    gets its next turn.
    """
    run, job.run = job.run, None
    if run is None:
        raise RuntimeError(f"the job {job.what!r} was run twice")
    return run()


def _turn_traceback_into_words(error: BaseException) -> None:
    """Keeps where ``error`` was raised as a note, and drops its traceback and those of its causes.

    The frames of a traceback hold the job's tensors, and the function of a frame what it closes over; whoever keeps
    the error must not keep those.
    """
    where = "".join(traceback.format_tb(error.__traceback__))
    error.add_note(f"raised by a job in {threading.current_thread().name}:\n{where}")
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
