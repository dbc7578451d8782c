"""The same asked about many things, on as many cores as there are: in processes of their own beside this one, for
Python's threads have one core between them. No torch."""

from __future__ import annotations

import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from contextlib import suppress
from multiprocessing import active_children, get_context, parent_process
from typing import Final, Generic, TypeVar, final

from forebay.kernels.team import cores

__all__ = ["PATIENCE", "made_beside"]

Job = TypeVar("Job")
Made = TypeVar("Made")

PATIENCE: Final = 1.0
"""Seconds before there is any other process: some more than one takes to start (0.7 of the processor)."""

LOOK: Final = 0.1
"""Seconds between looks at whether what is to be ended has ended."""


def made_beside(
    make: Callable[[Job], Made], jobs: Sequence[Job], *, most: int | None = None, patience: float = PATIENCE
) -> list[Made]:
    """What ``make`` makes of each of ``jobs``, in their order: here, and where that is not done in ``patience`` seconds
    in other processes too, ``most`` at a time with this one (None: as many as there are cores).

    ``make``, the jobs and what is made of them are pickled. Raises what ``make`` raises for one of them. No process
    outlives the call, nor this one; those that cannot be started, or are killed, leave their jobs to this one.
    """
    beside = min(cores() if most is None else most, len(jobs)) - 1
    if beside < 1:
        return list(map(make, jobs))
    return _Together(make, jobs, beside).run(patience)


@final
class _Together(Generic[Job, Made]):
    """Jobs that are taken from the first on, by this process and in time by ``beside`` others. For each of those a
    thread here hands it one job at a time: what they have not been handed, this process takes from the last on."""

    def __init__(self, make: Callable[[Job], Made], jobs: Sequence[Job], beside: int) -> None:
        self._make = make
        self._jobs = jobs
        self._left = deque(range(len(jobs)))
        self._made: dict[int, Made] = {}
        self._failed: list[BaseException] = []
        self._beside = beside
        self._others: ProcessPoolExecutor | None = None
        self._threads: list[threading.Thread] = []

    def run(self, patience: float) -> list[Made]:
        """What is made of all jobs, in their order; there are others from ``patience`` seconds on."""
        before = frozenset(active_children())
        later = threading.Timer(patience, self._begin)
        self._threads.append(later)
        try:
            with suppress(RuntimeError):  # no more threads: all is made here
                later.start()
            self._make_here()
            later.cancel()
            self._ended()
            self._make_here()  # what was given back
        except BaseException:  # Ctrl-C above all: what the others make may take a minute, and nobody waits for it
            later.cancel()
            self._left.clear()
            while not self._ended(LOOK):
                for process in frozenset(active_children()) - before:
                    process.terminate()
            raise
        finally:
            if self._others is not None:
                self._others.shutdown()
        return [self._made[place] for place in range(len(self._jobs))]

    def _make_here(self) -> None:
        """Makes what is left. Raises what others have raised."""
        while not self._failed and (place := self._next(last=self._others is not None)) is not None:
            self._made[place] = self._make(self._jobs[place])
        if self._failed:
            raise self._failed[0]

    def _next(self, *, last: bool) -> int | None:
        try:
            return self._left.pop() if last else self._left.popleft()
        except IndexError:
            return None

    def _ended(self, seconds: float | None = None) -> bool:
        """Whether all threads have ended, waited for so long each."""
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(seconds)
        return not any(thread.is_alive() for thread in self._threads)

    def _begin(self) -> None:
        """The first thread of those that hand jobs on, which begins the others."""
        with suppress(OSError, RuntimeError):  # no more files, processes or threads
            # Not forked: this process has threads, and perhaps a card.
            self._others = ProcessPoolExecutor(self._beside, get_context("spawn"), _end_with_parent)
            # Ctrl-C goes to all processes of a terminal. Those that this thread or one of its own starts never hear of
            # it, and end as they are told. The first that ``multiprocessing`` starts, for its pools, has unblocked it.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            for _ in range(self._beside - 1):
                self._threads.append(threading.Thread(target=self._hand_on, name="forebay beside"))
                self._threads[-1].start()
            self._hand_on()

    def _hand_on(self) -> None:
        """Has one other process make what is left, as long as it does."""
        while self._others is not None and not self._failed and (place := self._next(last=False)) is not None:
            try:
                self._made[place] = self._others.submit(self._make, self._jobs[place]).result()
            except (BrokenExecutor, OSError):  # one was killed, for want of memory say, which ends all; or not begun
                self._left.append(place)
                return
            except BaseException as error:  # raised again in the thread that asked
                self._failed.append(error)


def _end_with_parent() -> None:
    """Has this process end when the one that has started it does: it would wait for another job for ever."""
    parent = parent_process()
    assert parent is not None  # it was started as the process of a pool

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="forebay parent", daemon=True).start()
