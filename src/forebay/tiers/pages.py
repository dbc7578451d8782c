"""Fresh memory of the process for arenas and for transfers of the disk tier."""

from __future__ import annotations

import contextlib
import mmap

__all__ = ["map_pages"]


def map_pages(nbytes: int) -> mmap.mmap:
    """``nbytes`` of private anonymous memory, zeros, in huge pages where the kernel has them.

    Raises ``OSError`` or ``OverflowError`` where the machine refuses.
    """
    # Not shared, which is what ``mmap`` makes of its own accord: shared memory has no huge pages, whatever is advised.
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A forked child (a data loader's worker, say) would share the pages copy-on-write: the next update would then
    # double the host memory, and a device or an O_DIRECT read under way could be left with the old copy of a page.
    # Children do without these pages.
    pages.madvise(mmap.MADV_DONTFORK)
    # Swept from end to end, so that 2 MiB pages waste nothing and spare most page faults at first touch. And a transfer
    # of a disk that goes past the page cache is cut where its pages are not neighbours in physical memory: with small
    # pages it comes to half a MiB a request, and to a third of the rate (both measured, docs/log.md). Kernels without
    # huge pages refuse the advice, and nothing else changes.
    with contextlib.suppress(OSError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages
