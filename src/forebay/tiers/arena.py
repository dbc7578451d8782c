"""Host memory of exactly the size that was asked for, page-locked where the machine allows it.

torch's own pinned allocator rounds every block to a power of two, which on large models costs nearly as much host
memory again. An arena maps its pages itself and has the driver page-lock them afterwards.

Copies
    The *mapping* is the memory; it lives as long as any tensor that looks into it.
    The *registration* is the driver's promise that the mapping does not move; it ends with ``close``.
    The *account* in the ledgers ends with ``close`` too: whoever closes an arena lets go of its tensors.
"""

from __future__ import annotations

import contextlib
import mmap
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, cast, final

import torch

from forebay.errors import HostOutOfMemory, SessionClosed, UsageError
from forebay.memory import ALIGNMENT, ArenaUsage, Kind, Ledger, Tier
from forebay.tiers.host import available_host_memory
from forebay.tiers.pages import map_pages
from forebay.units import format_bytes

__all__ = ["CudaPinner", "HostArena", "NoPinner", "Pinner"]

_CUDA_HOST_REGISTER_PORTABLE: Final = 1  # page-locked for every device of the process, not only the current one


class Pinner(ABC):
    """Page-locks memory so that a device can copy from and to it without the CPU's help."""

    @property
    @abstractmethod
    def refusal(self) -> str:
        """Why ``pin`` says no, in words, for the user; empty where that is no news to anyone."""

    @abstractmethod
    def pin(self, address: int, nbytes: int) -> bool:
        """Page-locks ``nbytes`` from ``address`` (a whole number of pages). False, and no trace, if refused."""

    @abstractmethod
    def unpin(self, address: int) -> None:
        """Ends what ``pin`` began at ``address``. Whoever calls has waited for the copies that use it."""


@final
class NoPinner(Pinner):
    """For devices that gain nothing from page-locked memory."""

    @property
    def refusal(self) -> str:
        return ""

    def pin(self, address: int, nbytes: int) -> bool:
        return False

    def unpin(self, address: int) -> None:
        raise UsageError("nothing is pinned here, so nothing can be unpinned")


@final
class CudaPinner(Pinner):
    """Page-locks through the CUDA runtime.

    ``register(address, nbytes, flags)`` and ``unregister(address)`` return CUDA's error code, 0 for success;
    ``clear_error`` makes the runtime forget a failed call. ``CudaPinner.of(device)`` takes torch's own.
    """

    def __init__(
        self,
        register: Callable[[int, int, int], int],
        unregister: Callable[[int], int],
        clear_error: Callable[[], None],
    ) -> None:
        self._register = register
        self._unregister = unregister
        self._clear_error = clear_error

    @classmethod
    def of(cls, device: torch.device) -> CudaPinner:
        """The pinner of ``device``'s CUDA runtime. Starts CUDA if it has not been started yet."""
        runtime = cast(Any, torch.cuda).cudart()  # torch ships no types for it

        def clear_error() -> None:
            # A failed call stays behind as the thread's last error, and the next kernel launch of anyone reports it as
            # its own. torch does not expose cudaGetLastError, but checks (and so clears) it after each launch: one
            # tiny launch whose failure is expected takes it away, on the very runtime that torch uses.
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device=device)

        return cls(
            lambda address, nbytes, flags: int(runtime.cudaHostRegister(address, nbytes, flags)),
            lambda address: int(runtime.cudaHostUnregister(address)),
            clear_error,
        )

    @property
    def refusal(self) -> str:
        return "the driver refused to page-lock it"

    def pin(self, address: int, nbytes: int) -> bool:
        if self._register(address, nbytes, _CUDA_HOST_REGISTER_PORTABLE) == 0:
            return True
        self._clear_error()
        return False

    def unpin(self, address: int) -> None:
        if self._unregister(address) != 0:
            self._clear_error()


@final
class HostArena:
    """``nbytes`` of host memory of one ``kind``, as a 1-D uint8 tensor on the CPU, zero at birth.

    The address is page aligned. Pages cost nothing until they are touched, unless pinned. ``ledger`` (host) and
    ``pinned_ledger`` count exactly ``nbytes`` until ``close``; the mapping itself ends on a page boundary. When
    pinning is refused, by ``pinned_ledger``'s budget or by ``pinner``, the arena is pageable and ``note`` says why;
    ``note`` is empty when it is pinned, or when nobody asked (``pinner`` None or ``NoPinner``).

    Raises ``HostOutOfMemory``, and counts nothing, when the budget or the machine refuses the memory.
    """

    def __init__(
        self,
        nbytes: int,
        kind: Kind,
        *,
        ledger: Ledger,
        pinned_ledger: Ledger | None = None,
        pinner: Pinner | None = None,
        what: str,
    ) -> None:
        if nbytes < 0:
            raise UsageError(f"{what}: an arena needs 0 bytes or more, got {nbytes}")
        self.nbytes = nbytes
        self.kind = kind
        self.what = what
        ledger.charge(kind, nbytes, what)
        try:
            self._memory: torch.Tensor | None = _map(nbytes, what)
            self.pinned, self.note = (False, "") if pinner is None else self._pin(pinner, pinned_ledger)
        except BaseException:
            ledger.discharge(kind, nbytes)
            raise
        self._carved = self._handed = 0
        # Runs once: at close, or when an arena that nobody closed is collected, so that neither the budget nor the
        # driver's table of pinned pages keeps an entry for memory that is gone. It does not run at exit, where
        # transfers may still use the pages and the kernel frees everything anyway.
        self._release = weakref.finalize(
            self,
            _release,
            self._memory.data_ptr(),
            kind,
            nbytes,
            ledger,
            pinned_ledger if self.pinned else None,
            pinner if self.pinned else None,
        )
        self._release.atexit = False

    @property
    def memory(self) -> torch.Tensor:
        """All of it: uint8, shape ``(nbytes,)``. Raises ``SessionClosed`` after ``close``."""
        if self._memory is None:
            raise SessionClosed(f"{self.what}: this host arena is closed; its tensors can no longer be asked for")
        return self._memory

    def view(self, offset: int, nbytes: int) -> torch.Tensor:
        """Bytes ``offset`` to ``offset + nbytes``: uint8, shape ``(nbytes,)``.

        Raises ``UsageError`` if they are not all inside, ``SessionClosed`` after ``close``.
        """
        memory = self.memory
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise UsageError(
                f"{self.what}: bytes {offset} to {offset + nbytes} are not inside an arena of {self.nbytes} bytes"
            )
        return memory[offset : offset + nbytes]

    def carve(self, nbytes: int, align: int = ALIGNMENT) -> torch.Tensor:
        """The next ``nbytes`` that were not carved before, from an address that ``align`` divides.

        Not for use by several threads. Raises ``HostOutOfMemory`` when the rest of the arena is too small.
        """
        if align <= 0 or mmap.PAGESIZE % align:
            raise UsageError(f"{self.what}: align must divide the page size {mmap.PAGESIZE}, got {align}")
        start = -(-self._carved // align) * align
        if start + nbytes > self.nbytes:
            raise HostOutOfMemory(
                f"{self.what}: {format_bytes(nbytes)} from offset {start} do not fit into an arena of "
                f"{format_bytes(self.nbytes)}; make the arena larger",
                needed=start + nbytes,
                allowed=self.nbytes,
            )
        piece = self.view(start, nbytes)
        self._carved = start + nbytes
        self._handed += nbytes
        return piece

    def usage(self, used: int | None = None) -> ArenaUsage:
        """The account of this arena. ``used`` (bytes) where somebody else knows how much of it was in use; else all
        that was carved. May be asked after ``close`` too."""
        there = self._handed if used is None else used
        return ArenaUsage(Tier.HOST, self.what, self.nbytes, _pages(self.nbytes), there)

    def close(self) -> None:
        """Unpins, and takes the bytes off the ledgers; a second call does nothing.

        Whoever calls has waited for every transfer and drops the arena's tensors.
        """
        # Unpinned first: once the mapping is gone the address may be given to someone else, and the driver would
        # still take it for page-locked memory. The mapping itself is not unmapped here but with the last tensor that
        # looks into it (each holds the mapping): a stray view then reads old bytes instead of ending the process.
        self._release()
        self._memory = None

    def __enter__(self) -> HostArena:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _pin(self, pinner: Pinner, pinned_ledger: Ledger | None) -> tuple[bool, str]:
        """Tries to page-lock the memory; returns whether it is, and in words why not."""
        address = self.memory.data_ptr()
        headroom = None if pinned_ledger is None else pinned_ledger.headroom
        # Asked before, charged after the driver's answer: charging first would leave bytes that were never pinned in
        # the ledger's peak.
        if headroom is not None and headroom < self.nbytes:
            return False, self._pageable(
                f"pinning {format_bytes(self.nbytes)} would go over the pinned budget, "
                f"{format_bytes(headroom)} are left"
            )
        if self.nbytes == 0 or not pinner.pin(address, _pages(self.nbytes)):
            return False, self._pageable(pinner.refusal)
        if pinned_ledger is not None:
            try:
                pinned_ledger.charge(self.kind, self.nbytes, self.what)
            except HostOutOfMemory as error:  # another thread took the headroom in the meantime
                pinner.unpin(address)
                return False, self._pageable(str(error))
        return True, ""

    def _pageable(self, reason: str) -> str:
        return f"{self.what}: pageable, {reason}" if reason else ""


def _pages(nbytes: int) -> int:
    """``nbytes`` rounded up to whole pages, one at least."""
    return max(1, -(-nbytes // mmap.PAGESIZE)) * mmap.PAGESIZE


def _map(nbytes: int, what: str) -> torch.Tensor:
    """A fresh anonymous mapping as a uint8 tensor of ``nbytes``. The tensor keeps the mapping alive."""
    size = _pages(nbytes)
    try:
        pages = map_pages(size)
    except (OSError, OverflowError) as error:
        available = available_host_memory().available
        raise HostOutOfMemory(
            f"{what}: the machine refused {format_bytes(size)} of host memory ({error}), "
            f"{format_bytes(available)} are available; lower host_memory, or give a disk",
            needed=size,
            allowed=available,
        ) from error
    return torch.frombuffer(pages, dtype=torch.uint8)[:nbytes]


def _release(
    address: int, kind: Kind, nbytes: int, ledger: Ledger, pinned_ledger: Ledger | None, pinner: Pinner | None
) -> None:
    if pinner is not None:
        pinner.unpin(address)
    if pinned_ledger is not None:
        pinned_ledger.discharge(kind, nbytes)
    ledger.discharge(kind, nbytes)
