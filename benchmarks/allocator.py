"""Memory of the host as a device's allocator has it: what was freed stays with the process.

PyTorch's allocator for a GPU keeps what is freed and hands it out again. The host's is the C library's: glibc gives
large tensors back to the system at once, and of others as much as lies at the end of its heap by chance, and every page
that comes back is a fault and a page of zeros. Where ``cpu`` stands for a device, how many of those a contender pays is
no property of what it does. So nobody pays any: everyone's process, forebay's and its rivals', keeps what it frees.
"""

from __future__ import annotations

import ctypes
from typing import Final

__all__ = ["hold_freed_memory"]

# malloc.h
_TRIM_THRESHOLD: Final = -1
_TOP_PAD: Final = -2
_MMAP_MAX: Final = -4

TOP_PAD = 64 << 20
"""Bytes that the heap grows by at the least."""


def hold_freed_memory() -> bool:
    """Whether from now on this process keeps the memory that it frees; it cannot where the C library is not glibc."""
    library = ctypes.CDLL(None)
    try:
        mallopt = library.mallopt
    except AttributeError:
        return False
    asked = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1), (_TOP_PAD, TOP_PAD))
    return all([mallopt(option, value) == 1 for option, value in asked])
