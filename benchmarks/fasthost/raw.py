"""The disk without forebay: the least program that reads or writes a file past the page cache, in a process of its own.

python -m benchmarks.fasthost.raw read FILE BYTES BLOCK THREADS BUFFER

``both`` reads the first half of the file and writes the second at the same time. Each thread goes round in
``BUFFER`` bytes, a block at a time: a cache may hold a single block. Prints seconds.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading
import time
from collections.abc import Sequence

__all__ = ["HUGE", "main"]

HUGE = 2 << 20
"""Bytes of a huge page."""


def main(arguments: Sequence[str]) -> int:
    """One pass over the file."""
    verb, path = arguments[0], arguments[1]
    nbytes, block, count, room = map(int, arguments[2:])
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    half = nbytes // 2
    spans = {"read": [("read", 0, nbytes)], "write": [("write", 0, nbytes)]}
    parts = spans.get(verb, [("read", 0, half), ("write", half, nbytes)])
    threads = []
    for kind, start, stop in parts:
        for number in range(count):
            args = (fd, kind, range(start + number * block, stop, count * block), block, stop, room)
            threads.append(threading.Thread(target=_move, args=args))
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(time.perf_counter() - begin)
    os.close(fd)
    return 0


def _move(fd: int, kind: str, offsets: range, block: int, stop: int, room: int) -> None:
    # Huge pages, as of the tier's arena: fewer segments that the disk is asked for. Private: shared memory gets none,
    # whatever is advised (``/sys/kernel/mm/transparent_hugepage/shmem_enabled`` is ``never`` unless somebody sets it).
    huge = mmap.mmap(-1, room + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    huge.madvise(mmap.MADV_HUGEPAGE)
    huge.write(os.urandom(len(huge)))
    start = -ctypes.addressof(ctypes.c_char.from_buffer(huge)) % HUGE
    places = [memoryview(huge)[at : at + block] for at in range(start, start + room - block + 1, block)]
    for number, offset in enumerate(offsets):
        view = places[number % len(places)][: min(block, stop - offset)]
        done = os.preadv(fd, [view], offset) if kind == "read" else os.pwritev(fd, [view], offset)
        if done != len(view):
            raise OSError(f"{kind} of {len(view)} bytes at {offset} moved {done}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
