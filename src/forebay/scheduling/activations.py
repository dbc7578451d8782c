"""When activations leave for the host or for disk and come back, and where they lie there. No torch.

The runtime and the lowering ask the same things: ``Reloads`` what is brought back to the device and when, ``Ranges``
which bytes of the arena, or of the file, are whose (how many may be on their way off the device: ``window``).
``DiskRing`` gives out the bytes on the host through which everything on its way to disk, or from there, passes, and
``ReadAhead`` says what is read into them before it is asked for.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from typing import Generic, TypeVar, final

from forebay.device.base import Completion
from forebay.errors import ConfigError
from forebay.layout import PAGE, align
from forebay.memory import ALIGNMENT

__all__ = [
    "DiskRing",
    "Ranges",
    "ReadAhead",
    "Reloads",
    "RingPlace",
    "described",
    "disk_nbytes",
    "host_nbytes",
]

Item = TypeVar("Item")


def host_nbytes(nbytes: int) -> int:
    """Bytes that a tensor of ``nbytes`` takes in the arena on the host."""
    return align(nbytes, ALIGNMENT)


def disk_nbytes(nbytes: int) -> int:
    """Bytes that a tensor of ``nbytes`` takes in the file for activations, and in the ring on the way there."""
    return align(nbytes, PAGE)


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
class Ranges:
    """Who has which bytes of an arena or file of ``capacity``: each takes the first range that is free and large
    enough. Offsets and lengths are multiples of ``alignment``."""

    def __init__(self, capacity: int, alignment: int = ALIGNMENT) -> None:
        self.capacity = capacity
        self._alignment = alignment
        # Free ranges by offset, (offset, length), none next to another; and what was taken, by offset.
        self._free: list[tuple[int, int]] = [(0, capacity)] if capacity else []
        self._taken: dict[int, int] = {}
        self.taken = 0
        """Bytes that are taken."""
        self.most = 0
        """The most bytes that were taken at a time."""

    def take(self, nbytes: int) -> int | None:
        """The offset of ``nbytes``, rounded up to the alignment; None if there is no such room."""
        needed = align(nbytes, self._alignment)
        if needed <= 0:
            raise ConfigError(f"a range has more than 0 bytes, got {nbytes}")
        for place, (offset, length) in enumerate(self._free):
            if length >= needed:
                rest = [(offset + needed, length - needed)] if length > needed else []
                self._free[place : place + 1] = rest
                self._taken[offset] = needed
                self.taken += needed
                self.most = max(self.most, self.taken)
                return offset
        return None

    def give_back(self, offset: int) -> None:
        """Frees what ``take`` gave. ConfigError for anything else."""
        length = self._taken.pop(offset, None)
        if length is None:
            raise ConfigError(f"no range at {offset} is taken")
        self.taken -= length
        place = bisect_left(self._free, (offset, 0))
        if place < len(self._free) and self._free[place][0] == offset + length:
            length += self._free.pop(place)[1]
        if place and sum(self._free[place - 1]) == offset:
            place -= 1
            offset, before = self._free.pop(place)
            length += before
        insort(self._free, (offset, length))


# The ring between device and disk.


@final
class RingPlace:
    """Bytes of a ``DiskRing``, from ``offset`` on. ``busy`` are the completions after which they may be written anew;
    None: nobody can say yet, and they are not given to anyone else."""

    __slots__ = ("busy", "nbytes", "offset")

    def __init__(self, offset: int, nbytes: int) -> None:
        self.offset = offset
        self.nbytes = nbytes
        self.busy: tuple[Completion, ...] | None = None


@final
class DiskRing:
    """``capacity`` bytes that are given out one after the other, and from the beginning again: first in, first out.

    An item lies in one piece; what is too small at the end of the ring is left out. Used from one thread; the jobs that
    fill and drain the bytes may be anywhere.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._next = 0
        # Who was given bytes that nobody was given since: first byte, end, whose. In no order, none over another.
        self._held: list[tuple[int, int, RingPlace]] = []

    def blocking(self, nbytes: int) -> tuple[RingPlace, ...]:
        """Of the places over whose bytes ``take(nbytes)`` would go, those that nobody has said are free. ConfigError
        for more bytes than the ring has."""
        start, end = self._coming(nbytes)
        return tuple(one for first, last, one in self._held if first < end and start < last and one.busy is None)

    def take(self, nbytes: int) -> tuple[RingPlace, tuple[Completion, ...]]:
        """The next ``nbytes``, rounded up to pages, and what must be done before anyone writes there.

        The caller sets ``busy`` as soon as it knows which job is the last to use them. ConfigError for more bytes than
        the ring has, and where a place is in the way that is not free.
        """
        start, end = self._coming(nbytes)
        after: list[Completion] = []
        held: list[tuple[int, int, RingPlace]] = []
        for first, last, one in self._held:
            if last <= start or end <= first:
                held.append((first, last, one))
                continue
            if one.busy is None:
                raise ConfigError(f"bytes {first} to {last} of the ring to disk are in use; {nbytes} were asked for")
            after += one.busy
            # What is left of it on either side is still to be waited for by whoever comes there.
            held += [(a, b, one) for a, b in ((first, start), (end, last)) if a < b]
        place = RingPlace(start, end - start)
        self._held = [*held, (start, end, place)]
        self._next = end
        return place, tuple(dict.fromkeys(after))

    def tidy(self) -> None:
        """Lets go of completions that are done. One that failed holds its error, and that what its frames hold, which
        may be more than the bytes of the ring."""
        for _, _, one in self._held:
            if one.busy and all(completion.done() for completion in one.busy):
                one.busy = ()

    def _coming(self, nbytes: int) -> tuple[int, int]:
        needed = disk_nbytes(nbytes)
        if not 0 < needed <= self.capacity:
            raise ConfigError(f"the ring to disk has {self.capacity} bytes and {needed} are needed; raise disk_window")
        start = self._next if self._next + needed <= self.capacity else 0
        return start, start + needed


@final
class ReadAhead(Generic[Item]):
    """What is on disk, and when it is read into the ring.

    When backward begins, and after everything that is asked for, what is next in reverse order of leaving is read, for
    as long as the ring has room: bytes that were read and whose copy to the device is not queued yet are not given
    away. The order is kept strictly. What is asked for and was not read is read at once; if that needs bytes of others,
    which happens only when backward goes another way, those are read a second time later.

    ``read`` queues the read of an item into a place, after some completions, and returns its completion.
    """

    def __init__(self, ring: DiskRing, read: Callable[[Item, RingPlace, tuple[Completion, ...]], Completion]) -> None:
        self._ring = ring
        self._read = read
        self._count = 0
        # Items by their number, in order of leaving; the numbers of those that are only on disk, sorted; and where
        # those are that were read and whose copy to the device is not queued.
        self._items: dict[int, tuple[Item, int]] = {}
        self._number: dict[Item, int] = {}
        self._away: list[int] = []
        self._here: dict[Item, tuple[RingPlace, Completion]] = {}

    def take(self, nbytes: int) -> tuple[RingPlace, tuple[Completion, ...]]:
        """A place for ``nbytes``, and what to wait for before they are written, whoever was read ahead into it."""
        for place in self._ring.blocking(nbytes):
            for item, (taken, read) in list(self._here.items()):
                if taken is place:
                    self._here.pop(item)
                    taken.busy = (read,)
                    insort(self._away, self._number[item])
        return self._ring.take(nbytes)

    def left(self, item: Item, nbytes: int) -> None:
        """``item`` (hashable) is the latest to leave for disk."""
        self._items[self._count] = item, nbytes
        self._number[item] = self._count
        self._away.append(self._count)
        self._count += 1

    def fill(self) -> None:
        """Reads what will be asked for next, as far as the ring has room."""
        while self._away:
            item, nbytes = self._items[self._away[-1]]
            if self._ring.blocking(nbytes):
                return
            self._bring(item, nbytes)

    def demand(self, item: Item) -> tuple[RingPlace, Completion]:
        """Where ``item`` is in the ring once the completion is done. To be followed by ``sent``."""
        if item not in self._here:
            self._bring(item, self._items[self._number[item]][1])
        return self._here[item]

    def sent(self, item: Item, completion: Completion) -> None:
        """``completion`` is that of the copy of ``item`` to the device: its place is free then."""
        place, _ = self._here.pop(item)
        place.busy = (completion,)
        self._drop(item)

    def forget(self, item: Item) -> None:
        """Nobody will ask for ``item`` any more; one that was sent, or forgotten, before is let pass."""
        if item in self._here:
            place, read = self._here.pop(item)
            place.busy = (read,)
        if item in self._number:
            self._drop(item)

    def _bring(self, item: Item, nbytes: int) -> None:
        place, after = self.take(nbytes)
        place.busy = after  # unless it is read after all
        read = self._read(item, place, after)
        place.busy = None
        self._here[item] = place, read
        del self._away[bisect_left(self._away, self._number[item])]

    def _drop(self, item: Item) -> None:
        number = self._number.pop(item)
        del self._items[number]
        at = bisect_left(self._away, number)
        if at < len(self._away) and self._away[at] == number:
            del self._away[at]


def described(block: str, op: str, occurrence: int, root: int) -> str:
    """What the events call the ``root``-th storage (from 0) that an op has made."""
    return f"{block} {op}#{occurrence}" + (f".{root}" if root else "")
