"""Threads that make a file's calls beside those of its caller, for as long as anybody writes. No torch here.

The pools of ``concurrent.futures`` take nothing more once the interpreter begins to end. The lanes still write then:
what the last line of a program has queued, for which the session's finalizer waits.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeAlias, TypeVar, final

__all__ = ["Crew"]

T = TypeVar("T")
_Calls: TypeAlias = "queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]"


@final
class Crew:
    """Daemon threads, ``size`` of them at most, started as calls come in; each makes one call at a time, in the order
    of ``submit``. Usable from several threads at once."""

    def __init__(self, size: int, name: str) -> None:
        self._size = size
        self._name = name
        self._calls: _Calls = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._closed = False

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Has ``call`` made by one of the threads. Once the crew is closed, it is made here and now."""
        done: Future[T] = Future()
        with self._lock:
            closed = self._closed
            if not closed:
                if len(self._threads) < self._size:
                    name = f"{self._name}-{len(self._threads)}"
                    thread = threading.Thread(target=_serve, args=(self._calls,), name=name, daemon=True)
                    thread.start()
                    self._threads.append(thread)
                self._calls.put((call, done))
        if closed:
            _make(call, done)
        return done

    def close(self) -> None:
        """Ends the threads once they have made the calls that they were given. A second call does nothing."""
        with self._lock:
            threads, self._threads = self._threads, []
            self._closed = True
            self._calls.put(None)
        for thread in threads:
            # The garbage collector may run a session's finalizer in any thread, one of the crew's included.
            if thread is not threading.current_thread():
                thread.join()


def _serve(calls: _Calls) -> None:
    while (given := calls.get()) is not None:
        _make(*given)
        # An idle thread must not keep a buffer alive, nor an error with its frames.
        del given
    calls.put(None)  # for the next of the threads


def _make(call: Callable[[], T], done: Future[T]) -> None:
    try:
        result = call()
    except BaseException as error:  # belongs to whoever asks for the result
        done.set_exception(error)
    else:
        done.set_result(result)
    finally:
        # The frames of an error would hold what holds the error.
        del call, done
