"""Rings of staging buffers: a few buffers through which any amount of bytes passes, each reused in turn. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, final

from forebay.device.base import Completion
from forebay.errors import ForebayError

__all__ = ["Sized", "StagingBuffer", "StagingRing"]


class Sized(Protocol):
    """A buffer: whatever says how many bytes it has."""

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""


@final
class StagingBuffer:
    """One buffer of a ring (at run time 1-D uint8) and the completion after which it may be overwritten."""

    def __init__(self, buffer: Any) -> None:
        self.buffer = buffer
        self.nbytes: int = buffer.nbytes
        self.busy: Completion | None = None

    def view(self, nbytes: int) -> Any:
        """The first ``nbytes``."""
        return self.buffer[:nbytes]


@final
class StagingRing:
    """Hands out its buffers in turn. Used from one thread; the jobs that fill and drain the buffers may be anywhere."""

    def __init__(self, buffers: Sequence[Sized]) -> None:
        self._buffers = sorted((StagingBuffer(b) for b in buffers), key=lambda s: s.nbytes)
        self._turn = 0

    def take(self, nbytes: int) -> tuple[StagingBuffer, tuple[Completion, ...]]:
        """The next buffer that holds ``nbytes``, and what a job must wait for before it writes there.

        The caller sets ``busy`` to the completion of the buffer's last reader; until then nobody else may take it.
        """
        fitting = [s for s in self._buffers if s.nbytes >= nbytes]
        if not fitting:
            largest = self._buffers[-1].nbytes if self._buffers else 0
            raise ForebayError(f"staging needs a buffer of {nbytes} bytes, the largest has {largest}")
        self._turn += 1
        staging = fitting[self._turn % len(fitting)]
        # Whoever read the buffer last may still be queued: the job that fills it waits for that reader.
        after = () if staging.busy is None else (staging.busy,)
        return staging, after
