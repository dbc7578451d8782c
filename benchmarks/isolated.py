"""A contender in a process of its own, taking its turns in the same rounds as the others.

One process for all would be unfair, both ways: on the CPU forebay's byte ledger sees every op of the thread, the
rivals' too, and on a card its budget is a cap on the whole process. Peaks of memory are counted by process as well.
"""

from __future__ import annotations

import multiprocessing
import resource
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any, final

from benchmarks.case import Account, BenchmarkError, Contender, Job, OutOfMemory
from benchmarks.contenders import exhausted
from benchmarks.measure import LocalRunner, Runner, Turn, noticing_exhaustion

__all__ = ["IsolatedRunner"]

_CLOSE_SECONDS = 60.0


@dataclass(frozen=True)
class _TakeTurn:
    index: int


@dataclass(frozen=True)
class _GiveAccount:
    pass


@dataclass(frozen=True)
class _Close:
    pass


@dataclass(frozen=True)
class _Failed:
    """What a request raised; ``out_of_memory`` makes it a result."""

    text: str
    out_of_memory: bool


@final
class IsolatedRunner(Runner):
    """Starts ``contender`` in a new process, which calls ``first`` before all else. Raises ``OutOfMemory`` where it
    does not fit."""

    def __init__(self, contender: Contender, job: Job, steps: int, first: Callable[[], object] | None = None) -> None:
        self._name = contender.name
        context = multiprocessing.get_context("spawn")  # a forked process cannot use CUDA
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, contender, job, steps, first), daemon=True)
        self._process.start()
        theirs.close()  # so that the end of the process ends our wait for its answer
        try:
            self._answer()
        except BenchmarkError:
            self.close()
            raise

    def turn(self, index: int) -> Turn:
        turn: Turn = self._ask(_TakeTurn(index))
        return turn

    def account(self) -> Account:
        account: Account = self._ask(_GiveAccount())
        return account

    def close(self) -> None:
        if self._pipe.closed:
            return
        with suppress(OSError):  # it may have ended by itself
            self._pipe.send(_Close())
        self._pipe.close()
        self._process.join(_CLOSE_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _ask(self, request: object) -> Any:
        try:
            self._pipe.send(request)
        except OSError as error:
            raise self._ended() from error
        return self._answer()

    def _answer(self) -> Any:
        try:
            answer = self._pipe.recv()
        except (EOFError, ConnectionResetError) as error:
            raise self._ended() from error
        if isinstance(answer, _Failed):
            raise (OutOfMemory if answer.out_of_memory else BenchmarkError)(answer.text)
        return answer

    def _ended(self) -> BenchmarkError:
        self._process.join(_CLOSE_SECONDS)
        if self._process.exitcode == -signal.SIGKILL:
            return OutOfMemory(f"{self._name}: the kernel killed the process; the host's memory ran out")
        return BenchmarkError(f"{self._name}: its process ended with exit code {self._process.exitcode}")


def _serve(pipe: Connection, contender: Contender, job: Job, steps: int, first: Callable[[], object] | None) -> None:
    """The process: answers requests in order until it is told to close, or is left alone."""
    if first is not None:
        first()
    runner: LocalRunner | None = None
    request: object = None
    while not isinstance(request, _Close):
        try:
            answer: object = None
            if runner is None:
                with noticing_exhaustion(exhausted):
                    runner = LocalRunner(contender.start(job), steps, time.perf_counter, exhausted)
            elif isinstance(request, _TakeTurn):
                answer = runner.turn(request.index)
            elif isinstance(request, _GiveAccount):
                answer = _with_process_peak(runner.account())
        except Exception as error:
            answer = _Failed(_words(error), isinstance(error, OutOfMemory))
        try:
            pipe.send(answer)
            request = pipe.recv()
        except (EOFError, OSError):
            break
    if runner is not None:
        runner.close()


def _with_process_peak(account: Account) -> Account:
    """Adds the peak of the process's resident memory, libraries included."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return replace(account, peaks={**account.peaks, "process": peak})


def _words(error: Exception) -> str:
    return str(error) if isinstance(error, BenchmarkError) else f"{type(error).__name__}: {error}"
