"""Ctrl-C and SIGTERM while a run trains: the step under way is finished, and nothing is lost."""

from __future__ import annotations

import signal
import threading
from typing import Any, final

__all__ = ["Stop"]


@final
class Stop:
    """Notes that the run was asked to stop, in the place of what a signal does otherwise. The second signal does that
    again. Does nothing in a thread that is not the main one, where Python takes no signals."""

    def __init__(self) -> None:
        self.by: str | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._asked)
        return self

    def __exit__(self, *error: object) -> None:
        self._restore()

    def requested(self) -> bool:
        """Whether a signal has come."""
        return self.by is not None

    def _asked(self, number: int, frame: object) -> None:
        self.by = signal.Signals(number).name
        self._restore()

    def _restore(self) -> None:
        while self._before:
            number, handler = self._before.popitem()
            # None: it was not set from Python, and cannot be set from there.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
