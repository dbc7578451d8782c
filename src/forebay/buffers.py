"""Buffers with a life and a size, and the addresses that they get. No torch.

The offline form of dynamic storage allocation: every buffer is known beforehand, and two that are live at the same time
must not overlap in memory. Sizes, addresses and heights are bytes; times are points in an order, without a unit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from forebay.errors import ConfigError

__all__ = ["LARGEST", "Addresses", "Buffer", "BufferSet", "peak_live"]

LARGEST = 1 << 46
"""Bytes, and points in time: no size, capacity or time is more, so that sums of 65,536 of them stay within 64 bits."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """``size`` bytes that are live from ``lower`` up to ``upper``, which is not part of its life. Its address must be a
    multiple of ``alignment`` bytes.

    Raises ``ConfigError`` for a life that is empty, a size below 0, an alignment below 1, and numbers above
    ``LARGEST``.
    """

    id: str
    lower: int
    upper: int
    size: int
    alignment: int = 1

    def __post_init__(self) -> None:
        if self.lower >= self.upper:
            raise ConfigError(
                f"buffer {self.id}: it is live from {self.lower} up to {self.upper}, which is no time at all; upper "
                f"must be more than lower"
            )
        if self.size < 0:
            raise ConfigError(f"buffer {self.id}: a size is 0 bytes or more, got {self.size}")
        if self.alignment < 1:
            raise ConfigError(f"buffer {self.id}: an alignment is 1 byte or more, got {self.alignment}")
        if max(abs(self.lower), abs(self.upper), self.size, self.alignment) > LARGEST:
            raise ConfigError(f"buffer {self.id}: no number may be more than {LARGEST}")


@dataclass(frozen=True)
class BufferSet:
    """What needs addresses, and the bytes that there are for it (None: as few as possible).

    Raises ``ConfigError`` for a capacity below 0, and for two buffers of one id.
    """

    buffers: tuple[Buffer, ...]
    capacity: int | None = None

    def __post_init__(self) -> None:
        if self.capacity is not None and not 0 <= self.capacity <= LARGEST:
            raise ConfigError(f"a capacity is 0 to {LARGEST} bytes, got {self.capacity}")
        seen: set[str] = set()
        for buffer in self.buffers:
            if buffer.id in seen:
                raise ConfigError(f"two buffers are called {buffer.id}; every buffer needs an id of its own")
            seen.add(buffer.id)

    @cached_property
    def lower_bound(self) -> int:
        """Bytes that any layout takes at least: the most that are live at one time."""
        return peak_live(self.buffers)


@dataclass(frozen=True)
class Addresses:
    """Where each of ``given.buffers`` lies: ``offsets`` in bytes from the start of the memory, in the same order.

    ``found_by`` names the method that found it. ``proven``: no layout fits into the capacity, or, where this one fits,
    none is lower. ``solve_seconds`` are the seconds that the search took.

    Raises ``ConfigError`` where there are not as many offsets as buffers.
    """

    given: BufferSet
    offsets: tuple[int, ...]
    found_by: str
    proven: bool
    solve_seconds: float

    def __post_init__(self) -> None:
        if len(self.offsets) != len(self.given.buffers):
            raise ConfigError(f"{len(self.given.buffers)} buffers have {len(self.offsets)} addresses")

    @cached_property
    def height(self) -> int:
        """Bytes of memory that the layout uses."""
        return height_of(self.given.buffers, self.offsets)

    @property
    def lower_bound(self) -> int:
        """Bytes that any layout takes at least."""
        return self.given.lower_bound

    @property
    def gap(self) -> float:
        """By how much it is higher than the lower bound, as a share of that."""
        return self.height / self.lower_bound - 1 if self.lower_bound else 0.0

    @property
    def feasible(self) -> bool:
        """Whether it fits into the capacity."""
        return self.given.capacity is None or self.height <= self.given.capacity

    def to_json_dict(self) -> dict[str, Any]:
        """The object that ``forebay layout --json`` prints."""
        return {
            "height": self.height,
            "lower_bound": self.lower_bound,
            "gap": self.gap,
            "capacity": self.given.capacity,
            "feasible": self.feasible,
            "proven": self.proven,
            "layout": self.found_by,
            "solve_seconds": self.solve_seconds,
            "offsets": {buffer.id: offset for buffer, offset in zip(self.given.buffers, self.offsets, strict=True)},
        }


def height_of(buffers: Sequence[Buffer], offsets: Sequence[int]) -> int:
    """Bytes up to the end of the highest buffer."""
    return max((offset + buffer.size for buffer, offset in zip(buffers, offsets, strict=True)), default=0)


def peak_live(buffers: Iterable[Buffer]) -> int:
    """The most bytes of ``buffers`` that are live at one time."""
    changes: dict[int, int] = {}
    for buffer in buffers:
        changes[buffer.lower] = changes.get(buffer.lower, 0) + buffer.size
        changes[buffer.upper] = changes.get(buffer.upper, 0) - buffer.size
    live = most = 0
    for time in sorted(changes):
        live += changes[time]
        most = max(most, live)
    return most
