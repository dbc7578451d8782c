"""The threads that a kernel runs on: the caller's, and one more for each further core."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from typing import Final, final

import numpy as np

__all__ = ["ALONE", "TURN", "Team", "cores", "cores_beside_compute"]

ALONE: Final = 65536
"""Elements: work on fewer is done before another thread would have woken up."""

TURN: Final = 1 << 16
"""Elements of a share that threads take in turns: some 0.1 milliseconds, for which the others wait at the end at the
most, and ten thousand times what taking costs (``shares.portions``)."""


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0))


def cores_beside_compute(spared: int) -> int:
    """The cores for work that runs while a device computes: all but those ``spared``, which are left to the thread that
    tells the device what to do and to what brings it its bytes. One where there is no other.
    """
    return max(1, cores() - spared)


@final
class _Part:
    """One share of a call, for whoever begins it first. ``outcome`` is there once ``done`` is set."""

    __slots__ = ("_begun", "_work", "done", "outcome")

    def __init__(self, work: Callable[[], float]) -> None:
        self._work: Callable[[], float] | None = work
        self._begun = threading.Lock()
        self.done = threading.Event()
        self.outcome: float | BaseException = 0.0

    def run(self) -> None:
        """Does the work, if nobody has begun to."""
        if not self._begun.acquire(blocking=False):
            return
        # A thread that comes too late must not keep alive what the work holds: the tensors whose memory it was given.
        work, self._work = self._work, None
        try:
            if work is not None:
                self.outcome = work()
        except BaseException as error:  # raised again in the thread that asked
            self.outcome = error
        self.done.set()


@final
class Team:
    """Runs a kernel's shares side by side; usable from several threads at once.

    numba's own threading layers abort the process when two Python threads use them, or bring a second OpenMP: these
    are plain threads, which kernels without the GIL keep busy. They start with the first work that is worth it and
    end with ``close``. ``prepare_thread`` runs once in each of them at first. Raises ``ValueError`` for fewer than one
    thread.
    """

    def __init__(self, threads: int, prepare_thread: Callable[[], object] | None = None) -> None:
        if threads < 1:
            raise ValueError(f"a team has at least one thread, not {threads}")
        self.size = threads
        self._prepare_thread = prepare_thread
        self._lock = threading.Lock()
        self._parts: queue.SimpleQueue[_Part | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._closed = False

    def run(self, work: Callable[[int, int], float], elements: int) -> float:
        """Calls ``work(share, shares)`` for every share and adds up what it returns, in the order of the shares.

        ``elements`` is how much work there is: little is done in the calling thread alone, and so is all of it once
        the team is closed. Raises what a share raised, after all of them have ended.
        """
        shares = self.size if elements >= ALONE and self._ready() else 1
        parts = [_Part(lambda share=share: work(share, shares)) for share in range(shares)]  # type: ignore[misc]
        for part in parts[1:]:
            self._parts.put(part)
        # What no thread has begun by now is done here: where other work has the cores, one may wake up late.
        for part in parts:
            part.run()
        total = 0.0
        for part in parts:
            part.done.wait()
        for part in parts:
            if isinstance(part.outcome, BaseException):
                raise part.outcome
            total += part.outcome
        return total

    def take_turns(self, work: Callable[[int, int], float], elements: int) -> None:
        """Calls ``work(counter, shares)`` in every thread. It does one share after the other, each the next at the
        address ``counter`` (``shares.portions``), until all are taken. Little work is ``work(0, 1)``, in this thread.

        Where other work takes cores away for a while, as copies do, a thread that has lost its core has fewer shares
        and nobody waits for half of the work. Which thread has which share is by chance, and so is what makes sums.
        """
        shares = elements // TURN if elements >= ALONE else 1
        if shares < 2:
            work(0, 1)
            return
        number = np.zeros(1, np.int64)

        def take(share: int, threads: int) -> float:
            # Who takes holds the counter: a caller that is interrupted does not wait for the others.
            return work(int(number.ctypes.data), shares)

        self.run(take, elements)

    def close(self) -> None:
        """Ends the threads once they have done what they were given. A second call does nothing."""
        with self._lock:
            threads, self._threads = self._threads, []
            self._closed = True
            for _ in threads:
                self._parts.put(None)
        for thread in threads:
            # A finalizer may run in any thread, one of the team's included.
            if thread is not threading.current_thread():
                thread.join()

    def _ready(self) -> bool:
        with self._lock:
            if not self._closed and not self._threads:
                for number in range(1, self.size):
                    name = f"forebay-team-{number}"
                    work = (self._parts, self._prepare_thread)
                    self._threads.append(threading.Thread(target=_serve, args=work, name=name, daemon=True))
                    self._threads[-1].start()
            return not self._closed


def _serve(parts: queue.SimpleQueue[_Part | None], prepare: Callable[[], object] | None) -> None:
    if prepare is not None:
        prepare()
    while (part := parts.get()) is not None:
        part.run()
        # Nor what came out of it, an error with its frames.
        del part
