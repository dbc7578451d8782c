"""Ctrl-C, SIGTERM and SIGHUP while a run trains: the step under way is finished, and nothing is lost."""

from __future__ import annotations

import signal
import threading
from typing import Any, Final, final

__all__ = ["ASKING", "Stop"]

ASKING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The signals that ask a run to stop. The last one comes when its terminal goes."""


@final
class Stop:
    """Notes that the run was asked to stop, in the place of what a signal does otherwise. The second signal does that
    again. One that the process was started to ignore (SIGHUP under ``nohup``) stays so. Does nothing in a thread that
    is not the main one, where Python takes no signals."""

    def __init__(self) -> None:
        self.by: str | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():
            for number in ASKING:
                if signal.getsignal(number) is not signal.SIG_IGN:
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
