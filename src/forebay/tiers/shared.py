"""Host memory that another process can have too."""

from __future__ import annotations

import mmap
import os
import weakref
from contextlib import ExitStack
from types import TracebackType
from typing import final

import torch

from forebay.errors import HostOutOfMemory
from forebay.memory import Kind, Ledger
from forebay.units import format_bytes

__all__ = ["SharedArena", "mapped"]


def mapped(descriptor: int, nbytes: int) -> torch.Tensor:
    """The memory behind ``descriptor`` as a 1-D uint8 tensor from a page on, which keeps it mapped."""
    pages = mmap.mmap(descriptor, nbytes)
    pages.madvise(mmap.MADV_DONTFORK)  # a forked child (a data loader's worker, say) has no business there
    return torch.frombuffer(pages, dtype=torch.uint8)


@final
class SharedArena:
    """``nbytes`` of host memory without a name, zero at birth: ``memory`` is 1-D uint8 from a page on. Who is given
    ``descriptor`` maps the same bytes (``mapped``); nothing is left of them when the last one that has them is gone,
    however it ends.

    ``ledger`` (host) counts them as staging until ``close``. Raises ``HostOutOfMemory``, and counts nothing, when the
    budget or the machine refuses the memory.
    """

    def __init__(self, nbytes: int, *, ledger: Ledger, what: str) -> None:
        self.nbytes = nbytes
        with ExitStack() as opened:
            ledger.charge(Kind.STAGING, nbytes, what)
            opened.callback(ledger.discharge, Kind.STAGING, nbytes)
            try:
                self.descriptor = os.memfd_create("forebay", os.MFD_CLOEXEC)
                opened.callback(os.close, self.descriptor)
                os.ftruncate(self.descriptor, nbytes)
                self.memory = mapped(self.descriptor, nbytes)
            except OSError as error:
                raise HostOutOfMemory(
                    f"{what}: the machine refused {format_bytes(nbytes)} of shared memory ({error}); lower "
                    f"update_chunk, or update elsewhere",
                    needed=nbytes,
                    allowed=0,
                ) from error
            self._release = weakref.finalize(self, opened.pop_all().close)
        # Not at exit, where a lane may still use it: the kernel takes back what nobody has.
        self._release.atexit = False

    def close(self) -> None:
        """Takes the bytes off the ledger; a second call does nothing. Whoever calls drops the tensors."""
        self._release()
        self.memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    def __enter__(self) -> SharedArena:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
