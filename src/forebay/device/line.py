"""The jobs of one lane in order, and the moment at which its thread is told of one. No torch."""

from __future__ import annotations

import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, final

from forebay.device.base import Completion
from forebay.device.completions import WorkerCompletion

__all__ = ["Job", "Line"]


@final
class Job:
    """A queued job. ``run`` and ``after`` are dropped as soon as they have served."""

    __slots__ = (
        "after",
        "await_one",
        "awaited",
        "completion",
        "delay",
        "nbytes",
        "run",
        "timed",
        "what",
    )

    def __init__(
        self,
        run: Callable[[], Any],
        after: Sequence[Completion],
        await_one: Callable[[Completion], BaseException | None],
        completion: WorkerCompletion,
        delay: float,
        nbytes: int,
        what: str,
        timed: bool,
    ) -> None:
        self.run: Callable[[], Any] | None = run
        self.after = tuple(after)
        self.await_one = await_one
        self.awaited = 0
        self.completion = completion
        self.delay = delay
        self.nbytes = nbytes
        self.what = what
        self.timed = timed


@final
class Line:
    """Jobs, first in, first out. The thread that serves them hears of the first one when the jobs of lanes that it
    comes after are done: so it wakes up once for a job, in order to run it.

    Each time that a thread wakes up it takes a core and the interpreter's lock from whoever has them. One that was told
    of every job at once would wake up to see that it has to wait, mostly just when compute has queued the job and goes
    on.
    """

    def __init__(self) -> None:
        self.unfinished = 0
        """Jobs that were put and have not ended. The lanes count them down, under the lock that they hold for puts."""
        self._jobs: deque[Job | None] = deque()
        # Weakly: the line must not keep the result of a job alive.
        self._last: weakref.ref[WorkerCompletion] | None = None
        self._ready: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        # Re-entrant: the garbage collector may run a session's finalizer, which closes its lanes, while this thread
        # holds it.
        self._lock = threading.RLock()

    @property
    def is_idle(self) -> bool:
        """Whether all jobs that were put are done. To whoever has waited for the last of them it is: the thread need
        not have had its next turn."""
        last = None if self._last is None else self._last()
        return last is None or last.done()

    def put(self, job: Job, before: Sequence[WorkerCompletion]) -> None:
        """Adds ``job``, which waits for the jobs ``before``. One call at a time: the order of calls is that of jobs."""
        job.awaited = 1 + len(before)  # this call, and what it asks about
        with_it = self.unfinished + 1  # nobody else counts meanwhile
        try:
            with self._lock:
                self._jobs.append(job)
                self.unfinished = with_it
                self._last = weakref.ref(job.completion)
            for completion in before:
                if not completion.tell(partial(self._one_less, job)):
                    self._one_less(job)
            self._one_less(job)
        except BaseException:
            # Ctrl-C: nobody else would count the rest, and all behind the job would wait for ever. The thread hears of
            # it at once and waits itself for what the job comes after. Nobody waits for one that did not get in line.
            with self._lock:
                if job.awaited == 0 or job in self._jobs:
                    self.unfinished = with_it
                    job.awaited = 0
                    self._pass_on()
            raise

    def end(self) -> None:
        """Nothing comes after what is there; the thread hears of it as None."""
        with self._lock:
            self._jobs.append(None)
            self._pass_on()

    def get(self) -> Job | None:
        """The next job, as soon as no lane has anything to do before it, or None at the end. For the one thread."""
        while (job := self._ready.get()) is not None and job.run is None:
            pass  # it was passed on twice, and has been served
        return job

    def _one_less(self, job: Job) -> None:
        """Something that ``job`` comes after is done. Runs in the thread that has done it."""
        with self._lock:
            if job.awaited:  # 0: the call that queued the job was interrupted, and let it through
                job.awaited -= 1
                self._pass_on()

    def _pass_on(self) -> None:
        # The first one only: whatever is ready behind it has to wait for it.
        while self._jobs and ((first := self._jobs[0]) is None or first.awaited == 0):
            # In this order: an interrupt between the two has a job passed on twice, and none lost.
            self._ready.put(first)
            self._jobs.popleft()
