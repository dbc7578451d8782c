"""The handles of jobs: of those that are done, and of those that a lane's thread is to do. No torch here."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, final

from forebay.device.base import Completion
from forebay.device.turn import Turn

__all__ = ["DONE", "LaneCompletion", "ReadyCompletion", "Untold", "WorkerCompletion", "dependency_failure"]


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
    """A completion of something that is already done, with its ``result``."""

    __slots__ = ("_result",)

    def __init__(self, result: Any = None) -> None:
        self._result = result

    def wait(self) -> Any:
        return self._result

    def done(self) -> bool:
        return True

    def failure(self) -> None:
        return None


DONE = ReadyCompletion()
"""Of all jobs that are done as soon as they are asked for, and have no result."""


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
class Untold:
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

    def __init__(self, untold: Untold, turn: Turn) -> None:
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
