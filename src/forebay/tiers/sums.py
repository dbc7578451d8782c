"""Sums of pages: what is read back from a disk is held against what was written there.

A page is the sum of its 64-bit words, modulo 2^64. One flipped bit always changes it, and so does nearly every other
damage: a page of zeros, one of before, one of somewhere else. Words of one page that have changed places do not. It
costs little more than the memory that it reads.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
import zlib
from typing import Any, Final, TypeAlias, final

import numpy as np

from forebay.errors import StorageError
from forebay.memory import Kind, Ledger

__all__ = ["SUMMED", "SUM_BYTES", "PageSums", "checksum"]

SUMMED: Final = 4096
"""Bytes of a page."""

SUM_BYTES: Final = 8

_Sums: TypeAlias = np.ndarray[Any, np.dtype[np.uint64]]


def _words(content: memoryview) -> _Sums:
    """The words of whole pages, a page a row."""
    return np.frombuffer(content, dtype=np.uint64).reshape(-1, SUMMED // SUM_BYTES)


def checksum(content: memoryview, before: int = 0) -> int:
    """The CRC-32 of the sums of whole pages: it shows pages in the wrong place too. ``before`` is that of the pages
    that come before them."""
    return zlib.crc32(_words(content).sum(axis=1, dtype=np.uint64), before)


@final
class PageSums:
    """The sums of a file of ``nbytes``, whole pages, in memory that another process can have too: ``descriptor`` (None:
    of a file that holds zeros) is that of the sums that another ``PageSums`` has begun. ``ledger`` (host) counts it
    until ``close``.

    Several threads may note and compare at one time, of pages that are not the same. Raises ``HostOutOfMemory``, and
    ``StorageError`` where the operating system gives none.
    """

    def __init__(self, nbytes: int, *, ledger: Ledger | None = None, descriptor: int | None = None) -> None:
        size = nbytes // SUMMED * SUM_BYTES
        if ledger is not None:
            ledger.charge(Kind.STAGING, size, "checksums of a file")
        with contextlib.ExitStack() as undo:
            if ledger is not None:
                undo.callback(ledger.discharge, Kind.STAGING, size)
            try:
                self.descriptor = _opened(size) if descriptor is None else descriptor
                undo.callback(os.close, self.descriptor)
                self._sums: _Sums = np.frombuffer(mmap.mmap(self.descriptor, size), dtype=np.uint64)
            except OSError as error:
                raise StorageError(f"no memory for the checksums of a file: {error.strerror}") from error
            self._release = weakref.finalize(self, undo.pop_all().close)
        self._release.atexit = False

    def note(self, offset: int, content: memoryview) -> None:
        """``content`` is about to be written at ``offset``; both are whole pages."""
        _words(content).sum(axis=1, dtype=np.uint64, out=self._of(offset, content))

    def damaged(self, offset: int, content: memoryview) -> int | None:
        """Where in the file the first page is of which ``content``, read at ``offset``, is not what was written there.
        None: there is no such page."""
        differs = _words(content).sum(axis=1, dtype=np.uint64) != self._of(offset, content)
        return offset + int(differs.argmax()) * SUMMED if differs.any() else None

    def close(self) -> None:
        """Lets go of the memory; a second call does nothing."""
        self._sums = np.empty(0, dtype=np.uint64)
        self._release()

    def _of(self, offset: int, content: memoryview) -> _Sums:
        first = offset // SUMMED
        return self._sums[first : first + len(content) // SUMMED]


def _opened(size: int) -> int:
    descriptor = os.memfd_create("forebay-sums", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, size)  # zeros: the sums of pages of zeros
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
