"""Lanes served by worker threads. No torch here.

One thread per lane runs its jobs in the order of submission. A job waits for what it depends on, then for the
delay that a test injected, then runs. The event's start lies after the first wait and before the delay: a delayed
transfer looks like a slow one, which is what the delay stands for.
"""

from __future__ import annotations

import threading
import time
import traceback
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, final

from forebay.device.base import Completion, Delays
from forebay.device.event_log import EventLog
from forebay.device.line import Job, Line
from forebay.device.turn import Turn
from forebay.errors import SessionClosed
from forebay.timeline import Event, Lane

__all__ = [
    "WORKER_LANES",
    "LaneCompletion",
    "ReadyCompletion",
    "WorkerCompletion",
    "WorkerLanes",
    "dependency_failure",
]

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


class LaneCompletion(Completion):
    """A completion that a lane can wait for on behalf of a job."""

    @abstractmethod
    def failure(self) -> BaseException | None:
        """Blocks like ``wait``, and returns what it would raise.

        Does not count as having been told: only ``wait`` and ``synchronize`` reach whoever started the job.
        """

    def job(self) -> WorkerCompletion | None:
        """A job before whose end this is not done; None where none is known, or needed."""
        return None


@final
class ReadyCompletion(LaneCompletion):
    """A completion of something that is already done."""

    def wait(self) -> None:
        return None

    def done(self) -> bool:
        return True

    def failure(self) -> None:
        return None


def dependency_failure(dependency: Completion) -> BaseException | None:
    """Blocks until ``dependency`` is done; what it raised, or None."""
    if isinstance(dependency, LaneCompletion):
        return dependency.failure()
    try:
        dependency.wait()
    except BaseException as error:  # handed on to the dependent job, whatever it is
        return error
    return None


@final
class _Untold:
    """The exceptions of jobs that nobody has been told of yet, in the order they were raised."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._errors: list[BaseException] = []

    def add(self, error: BaseException) -> None:
        with self._lock:
            # A job that waits for another inside its own body raises the other's exception: one error, told once.
            if not any(known is error for known in self._errors):
                self._errors.append(error)

    def told(self, error: BaseException) -> None:
        with self._lock:
            self._errors = [known for known in self._errors if known is not error]

    def take(self) -> BaseException | None:
        """The first error; the others followed from the same fault, or will not matter any more."""
        with self._lock:
            first = self._errors[0] if self._errors else None
            self._errors.clear()
            return first


@final
class WorkerCompletion(LaneCompletion):
    """The handle of a job of ``WorkerLanes``."""

    __slots__ = ("_calls", "_done", "_failure", "_gate", "_lock", "_result", "_turn", "_untold")

    def __init__(self, untold: _Untold, turn: Turn) -> None:
        self._untold = untold
        self._turn = turn
        self._done = False
        # Closed until the job is done; whoever waits goes through and leaves it open. A ``threading.Event`` takes a
        # lock and a condition more, for every job.
        self._gate = threading.Lock()
        self._gate.acquire()
        # Re-entrant, as the lock of a line is.
        self._lock = threading.RLock()
        self._calls: list[Callable[[], None]] = []
        self._result: Any = None
        self._failure: BaseException | None = None

    def wait(self) -> Any:
        if not self._done:
            with self._turn.given_away():
                self._pass()
        if self._failure is not None:
            self._untold.told(self._failure)
            # Without the frames of an earlier waiter: every raise would lengthen the shared traceback.
            raise self._failure.with_traceback(None)
        return self._result

    def done(self) -> bool:
        return self._done

    def failure(self) -> BaseException | None:
        self._pass()
        return self._failure

    def job(self) -> WorkerCompletion:
        return self

    def tell(self, call: Callable[[], None]) -> bool:
        """Has ``call`` called when the job is done, in the thread that has done it. False: it is done already, and
        nobody calls."""
        with self._lock:
            if self._done:
                return False
            self._calls.append(call)
        return True

    def _pass(self) -> None:
        """Blocks until the job is done."""
        if not self._done:
            with self._gate:
                pass

    def _succeed(self, result: Any) -> None:
        self._result = result
        self._finish()

    def _fail(self, error: BaseException) -> None:
        self._failure = error
        self._finish()

    def _finish(self) -> None:
        with self._lock:
            self._done = True
            self._gate.release()
            calls, self._calls = self._calls, []
        for call in calls:
            call()


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
        self._untold = _Untold()
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
    ) -> WorkerCompletion:
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
            completion = WorkerCompletion(self._untold, self._turn)
            delay = self._delays.seconds(lane, what)
            job = Job(run, after, await_one, completion, delay, nbytes, what, timed)
            idle = lane not in self._lines or self._lines[lane].is_idle
            if inline and not delay and idle and all(c.done() for c in after):
                # With the lock: a job that is submitted meanwhile must not begin before this one has ended.
                self._finish(lane, job)
                if not isinstance(completion.failure(), Exception | None):
                    completion.wait()  # an interrupt is the caller's
                return completion
            if lane not in self._lines:
                self._start(lane)
            before = [j for c in after if isinstance(c, LaneCompletion) and (j := c.job()) is not None]
            self._lines[lane].put(job, before)
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
            thread.start()
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
