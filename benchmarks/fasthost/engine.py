"""A copy engine, played by one thread of the host: bytes, and the moment at which the last of them is there.

An engine reads no line that it is about to overwrite, nor leaves what it has copied in a core's cache. A thread that
copies as C does reads one byte more for each that it writes, and updates beside it wait for memory meanwhile.
"""

from __future__ import annotations

import time
from typing import Any, Final

from numba import types

from forebay.kernels.jit import compiled
from forebay.kernels.lines import copy_past_caches
from forebay.kernels.stamp import STAMP

__all__ = ["moved"]

_CLOCK: Final = time.CLOCK_MONOTONIC
"""That of ``time.perf_counter`` where there is ``clock_gettime``."""

_clock_gettime: Final = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.intp))


@compiled
def moved(target: Any, source: Any, nbytes: Any, moment: Any) -> Any:
    """Copies ``nbytes`` between two addresses, without the interpreter's lock, and then puts seconds and nanoseconds on
    the clock of ``time.perf_counter`` where ``moment``, the address of two int64, says."""
    copy_past_caches(source, target, nbytes)
    # The stamp: what is compiled is kept until any kernel changes.
    return _clock_gettime(_CLOCK, moment) + STAMP - STAMP
