"""Where bytes are, what they are, and the account that is kept of them.

Four ledgers (device, host, its page-locked part, disk) count every byte that forebay places, by kind. A ledger refuses
a byte over its budget before it is used, so a budget is a promise and not a hope. Nothing here imports torch.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from forebay.errors import BudgetExceeded, DeviceOutOfMemory, DiskFull, HostOutOfMemory
from forebay.units import MiB, format_bytes

__all__ = ["ALIGNMENT", "PAGES", "ArenaUsage", "Kind", "Ledger", "Tier", "TierUsage"]


ALIGNMENT = 64
"""Bytes: every parameter starts on a multiple of this inside its block (a cache line; kernels want 16)."""

PAGES = 128 * MiB
"""Bytes of a card that plans leave to what pages of the allocator's expandable segments have more than is in them: six
of 20 MiB for what is large and four of 2 MiB for what is small. A GPT-2 that streams needs 116 MiB more than what it
has live at most, a small Llama in plain PyTorch 111, a small GPT-2 29 (docs/log.md). What a plan needs beyond that is
found by playing its step (``planners.pages``)."""


class Tier(StrEnum):
    """A place for bytes. ``PINNED`` is the page-locked part of ``HOST``: its bytes count in both ledgers."""

    DEVICE = "device"
    HOST = "host"
    PINNED = "pinned"
    DISK = "disk"


class Kind(StrEnum):
    """What a byte is part of."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    INPUT = "input"
    ACTIVATION = "activation"
    GRADIENT = "gradient"
    STATE = "state"
    STAGING = "staging"
    TEMPORARY = "temporary"


@dataclass(frozen=True)
class TierUsage:
    """Bytes of one ``tier``: the budget (``limit``; None: there is none), ``live`` now, the ``peak``, and what the peak
    was made of (``at_peak``)."""

    tier: Tier
    limit: int | None
    live: int
    peak: int
    at_peak: Mapping[Kind, int]

    def __post_init__(self) -> None:
        # A copy of its own, which no ledger changes later, and a dict, which JSON writers know.
        object.__setattr__(self, "at_peak", dict(self.at_peak))


@dataclass(frozen=True)
class ArenaUsage:
    """One piece of memory of a tier that was taken from the machine once, and out of which others get theirs.

    ``nbytes`` are those that the ledger counts, ``reserved`` what the machine gave for them (whole pages), and ``used``
    the most that were somebody's at a time: neither padding nor a hole.
    """

    tier: Tier
    what: str
    nbytes: int
    reserved: int
    used: int


_OUT_OF_MEMORY: Mapping[Tier, type[BudgetExceeded]] = MappingProxyType(
    {
        Tier.DEVICE: DeviceOutOfMemory,
        Tier.HOST: HostOutOfMemory,
        Tier.PINNED: HostOutOfMemory,
        Tier.DISK: DiskFull,
    }
)

_REMEDY: Mapping[Tier, str] = MappingProxyType(
    {
        Tier.DEVICE: "use a smaller batch or a shorter sequence, or raise device_memory",
        Tier.HOST: "raise host_memory, or give a disk",
        Tier.PINNED: "raise the pinned limit, or let the arena be pageable",
        Tier.DISK: "raise the size of the disk budget",
    }
)


class Ledger:
    """Counts the live bytes of one tier by kind, and refuses what would go over ``limit`` (bytes; None: no limit).

    ``within`` is the account of several, each with a part of the tier: what is counted here counts there too.

    Safe to use from several threads: transfers and finalizers report from threads of their own.
    """

    def __init__(self, tier: Tier, limit: int | None = None, within: Ledger | None = None) -> None:
        self.tier = tier
        self.limit = limit
        self.within = within
        # Re-entrant: a finalizer may discharge inside a charge of the same thread, also from another part of the same
        # account. One lock for all parts: with two, two threads with such finalizers could wait for each other.
        self._lock: threading.RLock = threading.RLock() if within is None else within._lock
        self._live: dict[Kind, int] = dict.fromkeys(Kind, 0)
        self._total = 0
        self._peak = 0
        self._at_peak: dict[Kind, int] = dict(self._live)
        self._high = 0
        self.remark = ""
        """What an error for want of room says of how it came to it, and what to change, before what it always says."""

    @property
    def live(self) -> int:
        """Bytes live now."""
        return self._total

    @property
    def headroom(self) -> int | None:
        """Bytes left under the limit, or None without a limit."""
        own = None if self.limit is None else self.limit - self._total
        beside = None if self.within is None else self.within.headroom
        return min((room for room in (own, beside) if room is not None), default=None)

    def charge(self, kind: Kind, nbytes: int, what: str = "") -> None:
        """Counts ``nbytes`` more of ``kind``.

        Raises the tier's ``BudgetExceeded``, and counts nothing, when that would go over the limit.
        """
        with self._lock:
            total = self._total + nbytes
            if self.limit is not None and total > self.limit:
                raise self.exceeded(kind, nbytes, what)
            if self.within is not None:
                self.within.charge(kind, nbytes, what)
            self._live[kind] += nbytes
            self._total = total
            if total > self._high:
                self._high = total
            if total > self._peak:
                self._peak = total
                self._at_peak = dict(self._live)

    def discharge(self, kind: Kind, nbytes: int) -> None:
        """Takes ``nbytes`` of ``kind`` off again."""
        with self._lock:
            if self.within is not None:
                self.within.discharge(kind, nbytes)
            self._live[kind] -= nbytes
            self._total -= nbytes

    def move(self, old: Kind, new: Kind, nbytes: int) -> None:
        """Counts ``nbytes`` that were ``old`` as ``new`` from now on; the total does not change."""
        with self._lock:
            if self.within is not None:
                self.within.move(old, new, nbytes)
            self._live[old] -= nbytes
            self._live[new] += nbytes

    def exceeded(self, kind: Kind, nbytes: int, what: str) -> BudgetExceeded:
        """The error for ``nbytes`` of ``kind`` that do not fit: who asked, what is held, what to change."""
        limit = self.limit if self.limit is not None else 0
        held = ", ".join(f"{k.value} {format_bytes(n)}" for k, n in self._live.items() if n > 0) or "nothing"
        message = (
            f"{self.tier.value} memory: {what or kind.value} needs {format_bytes(nbytes)} more, "
            f"{format_bytes(self._total)} of {format_bytes(limit)} are in use ({held}); {self.remedy}"
        )
        return _OUT_OF_MEMORY[self.tier](message, needed=self._total + nbytes, allowed=limit)

    @property
    def remedy(self) -> str:
        """What to change where something does not fit."""
        always = _REMEDY[self.tier]
        return f"{self.remark}; or {always}" if self.remark else always

    def usage(self) -> TierUsage:
        """A frozen account of this moment."""
        with self._lock:
            return TierUsage(self.tier, self.limit, self._total, self._peak, self._at_peak)

    def level(self) -> tuple[dict[Kind, int], int]:
        """Bytes live now by kind, and the most that were live at a time since the last call."""
        with self._lock:
            high, self._high = self._high, self._total
            return {kind: nbytes for kind, nbytes in self._live.items() if nbytes}, high

    def reset_peak(self) -> None:
        """Starts a new measurement: the peak becomes what is live now."""
        with self._lock:
            self._peak = self._total
            self._at_peak = dict(self._live)
