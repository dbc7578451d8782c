"""Threads whose work is for later leave the cores to those whose work is for now. No torch."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress
from typing import Final

__all__ = ["STEP", "step_back"]

STEP: Final = 10
"""Added to the nice value: where others want the same core they have nine tenths of it (Linux gives shares by 1.25 to
the power of the difference). Where nobody does, nothing changes."""

_LAST: Final = 19


def step_back() -> None:
    """Has the calling thread step back behind the process's first one, for good; a second call does nothing. Nor does
    the first one where a thread has no such value of its own, which only Linux's have."""
    if sys.platform == "linux":
        # A sandbox may refuse any of these calls: then the thread stays where it is. The value of the process is that
        # of its first thread; the thread's own may be inherited from one that has stepped back. An unprivileged thread
        # may not come forward again.
        with suppress(OSError):
            process, thread = (os.getpriority(os.PRIO_PROCESS, number) for number in (os.getpid(), 0))
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), max(thread, min(_LAST, process + STEP)))
