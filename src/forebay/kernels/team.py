"""The threads that a kernel runs on: the caller's, and one more for each further core."""

from __future__ import annotations

import itertools
import os
import queue
import threading
from collections.abc import Callable
from typing import Final, final

__all__ = ["ALONE", "Team", "cores"]

ALONE: Final = 65536
"""Elements: work on fewer is done before another thread would have woken up."""

TURN: Final = 1 << 19
"""Elements of a share that threads take in turns: a few tenths of a millisecond, some fifty times what taking costs."""


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0))


@final
class _Part:
    """One share of a call, in another thread. ``outcome`` is there once ``done`` is set."""

    __slots__ = ("done", "outcome", "work")

    def __init__(self, work: Callable[[], float]) -> None:
        self.work = work
        self.done = threading.Event()
        self.outcome: float | BaseException = 0.0

    def run(self) -> None:
        try:
            self.outcome = self.work()
        except BaseException as error:  # raised again in the thread that asked
            self.outcome = error
        self.done.set()


@final
class Team:
    """Runs a kernel's shares side by side; usable from several threads at once.

    numba's own threading layers abort the process when two Python threads use them, or bring a second OpenMP: these
    are plain threads, which kernels without the GIL keep busy. They start with the first work that is worth it and
    end with ``close``. Raises ``ValueError`` for fewer than one thread.
    """

    def __init__(self, threads: int) -> None:
        if threads < 1:
            raise ValueError(f"a team has at least one thread, not {threads}")
        self.size = threads
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
        parts = [_Part(lambda share=share: work(share, shares)) for share in range(1, shares)]  # type: ignore[misc]
        for part in parts:
            self._parts.put(part)
        first = _Part(lambda: work(0, shares))
        first.run()
        total = 0.0
        for part in (first, *parts):
            part.done.wait()
        for part in (first, *parts):
            if isinstance(part.outcome, BaseException):
                raise part.outcome
            total += part.outcome
        return total

    def take_turns(self, work: Callable[[int, int], float], elements: int) -> None:
        """Like ``run``, in more shares than threads: who is done with one takes the next, until all are taken.

        Where other work takes cores away for a while, as copies do, a thread that has lost its core has fewer shares
        and nobody waits for half of the work. Which thread has which share is by chance, and so is what makes sums.
        """
        shares = max(self.size, elements // TURN) if elements >= ALONE else 1
        numbers = itertools.count()  # one call of next() at a time: the interpreter's lock sees to it

        def take(share: int, threads: int) -> float:
            while (turn := next(numbers)) < shares:
                work(turn, shares)
            return 0.0

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
                    self._threads.append(threading.Thread(target=_serve, args=(self._parts,), name=name, daemon=True))
                    self._threads[-1].start()
            return not self._closed


def _serve(parts: queue.SimpleQueue[_Part | None]) -> None:
    while (part := parts.get()) is not None:
        part.run()
        # An idle thread must not keep alive what the work held: the tensors whose memory it was given.
        del part
