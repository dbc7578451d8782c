"""PyTorch's caching allocator. No torch.

Requests are rounded up to 512 bytes. Those of up to 1 MiB come out of segments of 2 MiB, others of up to 10 MiB out of
segments of 20 MiB, larger ones get a segment of their own, rounded up to 2 MiB. A request takes the smallest free block
of its stream and pool that holds it; what is left over becomes a block of its own if it is large enough. A block that
is given back joins its free neighbours. A segment goes back to the device only when memory is short, or when the
garbage collection wants it (``c10/cuda/CUDACachingAllocator.cpp`` of PyTorch 2.x: ``malloc``, ``get_free_block``,
``should_split``, ``free_block``, ``release_cached_blocks``, ``garbage_collect_cached_blocks``).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, final

from forebay.errors import ConfigError
from forebay.recording import Box
from forebay.simulation.allocators.base import (
    LARGE_SEGMENT,
    MIN_BLOCK,
    SMALL_LIMIT,
    Allocator,
    Places,
    Ranges,
    Segment,
    rounded,
    segment_nbytes,
)

__all__ = ["CachingAllocator", "CachingSettings"]

FREE: Final = -1
"""In the place of a request's number: nobody has the block."""

Pool = tuple[int, bool]
"""The stream, and whether it is for small requests."""


@dataclass(frozen=True)
class CachingSettings:
    """``limit``: bytes of the device (None: as many as are asked for). ``max_split``: blocks of so many bytes and more
    are not split (``max_split_size_mb``). ``collect_from``: the share of the limit above which blocks that were not
    used for long are given back before more is taken (``garbage_collection_threshold``; 0: never).

    Raises ``ConfigError`` for values that PyTorch refuses too.
    """

    limit: int | None = None
    max_split: int | None = None
    collect_from: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.collect_from < 1 or (self.collect_from and self.limit is None):
            raise ConfigError("garbage is collected from a share of a limit on, at least 0 and less than 1")
        if self.max_split is not None and self.max_split <= LARGE_SEGMENT:
            raise ConfigError(f"blocks that are not split have more than {LARGE_SEGMENT} bytes, got {self.max_split}")


@dataclass(eq=False, slots=True)
class _Block:
    """A piece of a segment, between its neighbours there. ``since`` is the number of requests when it became free."""

    pool: Pool
    segment: int
    address: int
    nbytes: int
    owner: int = FREE
    before: _Block | None = None
    after: _Block | None = None
    since: int = 0

    @property
    def whole(self) -> bool:
        """Whether it is all of its segment."""
        return self.before is None and self.after is None


@dataclass
class _Free:
    """The free blocks of a pool, the smallest first, of equal ones the one of the lowest address."""

    order: list[tuple[int, int]] = field(default_factory=list)
    blocks: dict[int, _Block] = field(default_factory=dict)

    def add(self, block: _Block) -> None:
        insort(self.order, (block.nbytes, block.address))
        self.blocks[block.address] = block

    def remove(self, block: _Block) -> None:
        del self.order[bisect_left(self.order, (block.nbytes, block.address))]
        del self.blocks[block.address]

    def smallest(self, nbytes: int) -> _Block | None:
        """The smallest block of so many bytes or more."""
        at = bisect_left(self.order, (nbytes, 0))
        return self.blocks[self.order[at][1]] if at < len(self.order) else None


@final
class CachingAllocator(Allocator):
    """The model. ``out_of_memory`` counts requests that went over the limit; they are served all the same.

    ``places`` says where segments lie, as low as they go if nothing is given. Of free blocks of one size the one of the
    lowest address is taken, so that what is reserved later hangs on that.
    """

    def __init__(self, settings: CachingSettings = CachingSettings(), places: Places | None = None) -> None:
        self._settings = settings
        self._pools: dict[Pool, _Free] = {}
        self._owned: dict[int, _Block] = {}
        self._first: dict[int, _Block] = {}
        self._places: Places = Ranges() if places is None else places
        self._reserved = self._requests = 0
        self.out_of_memory = 0

    @property
    def reserved(self) -> int:
        """Bytes of all segments."""
        return self._reserved

    def allocate(self, number: int, nbytes: int, stream: int) -> tuple[Box, ...]:
        """See ``Allocator``. Nothing is reserved for 0 bytes."""
        if nbytes == 0:
            return ()
        self._requests += 1
        size = rounded(nbytes)
        pool = stream, size <= SMALL_LIMIT
        free = self._pools.setdefault(pool, _Free())
        block = self._cached(free, size)
        if block is None:
            block = self._new(pool, size)
        else:
            free.remove(block)
        if self._splits(pool, block.nbytes - size, size):
            self._split(block, size)
        block.owner = number
        self._owned[number] = block
        return (Box(number, block.address, size),)

    def free(self, number: int) -> None:
        """See ``Allocator``."""
        block = self._owned.pop(number, None)
        if block is None:
            return
        block.owner, block.since = FREE, self._requests
        free = self._pools[block.pool]
        for other in (block.before, block.after):
            if other is not None and other.owner == FREE:
                free.remove(other)
                block = self._joined(block, other)
        free.add(block)

    def segments(self) -> Iterator[Segment]:
        """See ``Allocator``. A box is as large as its block, which may be more than was asked for."""
        for address, first in self._first.items():
            boxes, nbytes, block = [], 0, first
            while True:
                nbytes += block.nbytes
                if block.owner != FREE:
                    boxes.append(Box(block.owner, block.address, block.nbytes))
                if block.after is None:
                    break
                block = block.after
            yield Segment(address, nbytes, tuple(boxes))

    def _cached(self, free: _Free, size: int) -> _Block | None:
        block, most = free.smallest(size), self._settings.max_split
        if block is None or most is None:
            return block
        if size < most <= block.nbytes or (size >= most and block.nbytes >= size + LARGE_SEGMENT):
            return None
        return block

    def _splits(self, pool: Pool, left: int, size: int) -> bool:
        if pool[1]:
            return left >= MIN_BLOCK
        most = self._settings.max_split
        return left > SMALL_LIMIT and (most is None or size < most)

    def _new(self, pool: Pool, size: int) -> _Block:
        """A segment for ``size`` bytes, after others were given back if there is no room."""
        nbytes = segment_nbytes(size)
        limit = self._settings.limit
        if limit is not None:
            if self._settings.collect_from:
                self._collect(self._reserved - int(self._settings.collect_from * limit))
            if self._reserved + nbytes > limit:
                for block in self._whole():
                    self._give_back(block)
            self.out_of_memory += self._reserved + nbytes > limit
        address = self._places.take(nbytes)
        block = _Block(pool, address, address, nbytes)
        self._first[address] = block
        self._reserved += nbytes
        return block

    def _whole(self, small: bool = True) -> list[_Block]:
        """Free blocks that are all of their segment."""
        pools = (free for (_, is_small), free in self._pools.items() if small or not is_small)
        return [block for free in pools for block in free.blocks.values() if block.whole]

    def _collect(self, wanted: int) -> None:
        """Gives large segments back until ``wanted`` bytes are, those first that were free for longer than the mean."""
        while wanted > 0:
            found = self._whole(small=False)
            if not found:
                return
            mean = sum(self._requests - block.since for block in found) / len(found)
            for block in found:
                if wanted > 0 and self._requests - block.since >= mean:
                    wanted -= block.nbytes
                    self._give_back(block)

    def _give_back(self, block: _Block) -> None:
        self._pools[block.pool].remove(block)
        self._places.give_back(block.segment)
        del self._first[block.segment]
        self._reserved -= block.nbytes

    def _split(self, block: _Block, size: int) -> None:
        """Cuts ``block`` behind ``size`` bytes; the rest is free."""
        rest = _Block(block.pool, block.segment, block.address + size, block.nbytes - size, since=self._requests)
        rest.before, rest.after = block, block.after
        if block.after is not None:
            block.after.before = rest
        block.after, block.nbytes = rest, size
        self._pools[block.pool].add(rest)

    def _joined(self, block: _Block, other: _Block) -> _Block:
        """Two neighbours as one."""
        first, second = (other, block) if other is block.before else (block, other)
        first.nbytes += second.nbytes
        first.after, first.since = second.after, block.since
        if second.after is not None:
            second.after.before = first
        return first
