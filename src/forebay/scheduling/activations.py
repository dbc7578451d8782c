"""When activations leave for the host and come back, and where in the host's arena they lie. No torch.

The runtime and the lowering ask the same three things: ``OffloadWindow`` how many bytes may be on their way to the
host, ``Reloads`` what is brought back and when, ``HostRanges`` which bytes of the arena are whose.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from typing import Generic, TypeVar, final

from forebay.errors import ConfigError
from forebay.layout import align
from forebay.memory import ALIGNMENT
from forebay.scheduling.gradients import GradientWindow

__all__ = ["HostRanges", "OffloadWindow", "Reloads", "described", "host_nbytes"]

OffloadWindow = GradientWindow
"""At most ``window`` bytes of activations are under way to the host, under the rules of gradients: ``admit`` before a
copy is queued, ``sent`` after, ``empty`` when backward begins."""

Item = TypeVar("Item")


def host_nbytes(nbytes: int) -> int:
    """Bytes that a tensor of ``nbytes`` takes in the arena on the host."""
    return align(nbytes, ALIGNMENT)


@final
class Reloads(Generic[Item]):
    """What has been offloaded and when it comes back.

    Backward asks for things in about the reverse of the order in which forward made them. So, when backward begins and
    each time that something is asked for the first time, what is next in reverse order is brought back too, as long as
    the bytes that are back and were not asked for yet stay within ``window``. The order is kept strictly: something
    large that does not fit yet is not overtaken, because it is what will be asked for next.

    ``reload`` is called with an item when its copy to the device is to be queued, once for each item; when it raises,
    the item is still on the host only.
    """

    def __init__(self, window: int, reload: Callable[[Item], None]) -> None:
        self._window = window
        self._reload = reload
        # In the order in which they were offloaded. On the host only; on the device again and not asked for yet.
        self._away: dict[Item, int] = {}
        self._ahead: dict[Item, int] = {}
        self._ahead_nbytes = 0

    @property
    def ahead(self) -> int:
        """Bytes that are on the device again, or on their way, and were not asked for yet."""
        return self._ahead_nbytes

    def offloaded(self, item: Item, nbytes: int) -> None:
        """``item`` (hashable, ``nbytes`` on the device) is the latest to leave for the host."""
        if item in self._away or item in self._ahead:
            raise ConfigError(f"{item} was offloaded twice")
        self._away[item] = nbytes

    def begin_backward(self) -> None:
        """Backward begins: brings back what it will ask for first."""
        self._fill()

    def demand(self, item: Item) -> None:
        """``item`` is read now. The first time it is brought back, if it was not ahead of time, and then what comes
        next; later calls do nothing."""
        if item in self._away:
            self._reload(item)
            del self._away[item]
        elif item in self._ahead:
            self._ahead_nbytes -= self._ahead.pop(item)
        else:
            return
        self._fill()

    def forget(self, item: Item) -> None:
        """Nobody will ask for ``item`` any more; one that was asked for, or forgotten, before is let pass."""
        self._away.pop(item, None)
        self._ahead_nbytes -= self._ahead.pop(item, 0)

    def _fill(self) -> None:
        while self._away:
            item = next(reversed(self._away))
            nbytes = self._away[item]
            if self._ahead_nbytes + nbytes > self._window:
                return
            self._reload(item)
            del self._away[item]
            self._ahead[item] = nbytes
            self._ahead_nbytes += nbytes


@final
class HostRanges:
    """Who has which bytes of an arena of ``capacity``: each takes the first range that is free and large enough."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        # Free ranges by offset, (offset, length), none next to another; and what was taken, by offset.
        self._free: list[tuple[int, int]] = [(0, capacity)] if capacity else []
        self._taken: dict[int, int] = {}

    @property
    def taken(self) -> int:
        """Bytes that are taken."""
        return sum(self._taken.values())

    def take(self, nbytes: int) -> int | None:
        """The offset, a multiple of ``ALIGNMENT``, of ``host_nbytes(nbytes)`` bytes; None if there is no such room."""
        needed = host_nbytes(nbytes)
        if needed <= 0:
            raise ConfigError(f"a range has more than 0 bytes, got {nbytes}")
        for place, (offset, length) in enumerate(self._free):
            if length >= needed:
                rest = [(offset + needed, length - needed)] if length > needed else []
                self._free[place : place + 1] = rest
                self._taken[offset] = needed
                return offset
        return None

    def give_back(self, offset: int) -> None:
        """Frees what ``take`` gave. ConfigError for anything else."""
        length = self._taken.pop(offset, None)
        if length is None:
            raise ConfigError(f"no range at {offset} is taken")
        place = bisect_left(self._free, (offset, 0))
        if place < len(self._free) and self._free[place][0] == offset + length:
            length += self._free.pop(place)[1]
        if place and sum(self._free[place - 1]) == offset:
            place -= 1
            offset, before = self._free.pop(place)
            length += before
        insort(self._free, (offset, length))


def described(block: str, op: str, occurrence: int, root: int) -> str:
    """What the events call the ``root``-th storage (from 0) that an op has made."""
    return f"{block} {op}#{occurrence}" + (f".{root}" if root else "")
