"""The kernel's queue for transfers past the page cache: one thread has several calls under way. No torch here.

Linux native AIO (io_submit(2), io_getevents(2)), by way of ``syscall(2)``: glibc has no names for it, and containers
that forbid io_uring allow it. A call that is under way cannot be taken back. io_destroy(2) waits for all of them, so
that whoever does not know any more which are under way (an interrupt) can have them all ended by ``close``.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final, Literal, NamedTuple, TypeAlias, final

import numpy as np

__all__ = ["CallQueue", "KernelQueue", "QueuedCall", "Verb", "address_of"]

Verb: TypeAlias = Literal["read", "write"]
"""The direction of a transfer, in the word of its errors."""


@final
class QueuedCall(NamedTuple):
    """To move ``buffer``, which stays until the call is out, to or from ``offset`` of a file; under a ``number``."""

    number: int
    verb: Verb
    fd: int
    buffer: memoryview
    offset: int


class CallQueue(ABC):
    """Calls that are under way, of one thread at a time."""

    @abstractmethod
    def submit(self, calls: Sequence[QueuedCall]) -> int:
        """Begins calls, one at least; returns how many of them, the first ones, are under way. Raises ``OSError`` where
        the kernel does not take the first."""

    @abstractmethod
    def wait(self, least: int) -> list[tuple[int, int]]:
        """Waits until ``least`` of the calls that are under way are out. The numbers of all that are by then, each with
        the bytes that it has moved, or a negative error number."""

    @abstractmethod
    def close(self) -> None:
        """Waits for all calls that are under way, and gives the queue back; a second call does nothing."""


class _Call(ctypes.Structure):
    """``struct iocb`` of <linux/aio_abi.h>, where bytes are little-endian."""

    _fields_ = (
        ("data", ctypes.c_uint64),
        ("key", ctypes.c_uint32),
        ("rw_flags", ctypes.c_uint32),
        ("opcode", ctypes.c_uint16),
        ("priority", ctypes.c_int16),
        ("fd", ctypes.c_uint32),
        ("buffer", ctypes.c_uint64),
        ("nbytes", ctypes.c_uint64),
        ("offset", ctypes.c_int64),
        ("reserved", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("event_fd", ctypes.c_uint32),
    )


class _Event(ctypes.Structure):
    """``struct io_event``: ``data`` is that of the call."""

    _fields_ = (
        ("data", ctypes.c_uint64),
        ("call", ctypes.c_uint64),
        ("result", ctypes.c_int64),
        ("result2", ctypes.c_int64),
    )


_OPCODES: Final = {"read": 0, "write": 1}
"""IOCB_CMD_PREAD, IOCB_CMD_PWRITE."""

_SYSTEM_CALLS: Final = {"x86_64": (206, 207, 209, 208), "aarch64": (0, 1, 2, 4)}
"""The numbers of io_setup, io_destroy, io_submit and io_getevents, by machine."""


@final
class KernelQueue(CallQueue):
    """A context of the kernel's with room for ``size`` calls, all of which count for the machine's ``fs.aio-max-nr``
    until ``close``, or until it is collected. It is no use in a forked child.

    Raises ``OSError``: ENOSYS where there is no such queue, or none whose system calls are known here; EAGAIN where the
    machine has no more room for calls; what a sandbox answers.
    """

    def __init__(self, size: int) -> None:
        self._setup, self._destroy, self._submit, self._events = _system_calls()
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.syscall.restype = ctypes.c_long
        self._calls = (_Call * size)()
        self._places = (ctypes.POINTER(_Call) * size)(*(ctypes.pointer(call) for call in self._calls))
        self._ended = (_Event * size)()
        self._context = ctypes.c_ulong(0)
        # Before the setup: there is no moment at which a context exists and nobody would give it back. Not at exit,
        # where a lane's thread may still be writing and the kernel waits for the calls of a process by itself.
        self._release = weakref.finalize(self, _give_back, self._libc, self._destroy, self._context, os.getpid())
        self._release.atexit = False
        _made(self._libc, self._setup, ctypes.c_long(size), ctypes.byref(self._context))

    def submit(self, calls: Sequence[QueuedCall]) -> int:
        # The kernel keeps a copy.
        for call, asked in zip(self._calls, calls, strict=False):
            call.data = asked.number
            call.opcode = _OPCODES[asked.verb]
            call.fd = asked.fd
            call.buffer = address_of(asked.buffer)
            call.nbytes = len(asked.buffer)
            call.offset = asked.offset
        return _made(self._libc, self._submit, self._context, ctypes.c_long(len(calls)), self._places)

    def wait(self, least: int) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        while len(found) < least:
            some, most = ctypes.c_long(least - len(found)), ctypes.c_long(len(self._ended))
            try:
                count = _made(self._libc, self._events, self._context, some, most, self._ended, None)
            except InterruptedError:
                continue  # by a signal whose handler raised nothing
            # Fewer than were asked for: a signal came when some were out.
            found += [(int(event.data), int(event.result)) for event in self._ended[:count]]
        return found

    def close(self) -> None:
        self._release()


def address_of(view: memoryview) -> int:
    """Where the memory of ``view`` begins."""
    return int(np.frombuffer(view, dtype=np.uint8).ctypes.data)


def _system_calls() -> tuple[int, int, int, int]:
    known = _SYSTEM_CALLS.get(platform.machine()) if platform.system() == "Linux" and sys.maxsize > 1 << 32 else None
    if known is None:  # programs of 32 bits have other numbers on the same machine
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    return known


def _made(libc: ctypes.CDLL, number: int, *arguments: object) -> int:
    """A system call. Raises ``OSError``."""
    done = int(libc.syscall(ctypes.c_long(number), *arguments))
    if done < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return done


def _give_back(libc: ctypes.CDLL, destroy: int, context: ctypes.c_ulong, pid: int) -> None:
    # A forked child inherits this finalizer and not the context, whose number another one of its own may have.
    if context.value and os.getpid() == pid:
        libc.syscall(ctypes.c_long(destroy), context)
