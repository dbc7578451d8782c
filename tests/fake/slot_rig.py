"""A slot pool over a scripted clock and a scripted source: what the tests of slots are made with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from forebay.device.base import Completion
from forebay.device.fake import FakeBuffer, FakeDevice
from forebay.scheduling.slots import Residency, Slot, SlotPool
from forebay.timeline import Lane

__all__ = ["FETCH", "NBYTES", "Rig", "ScriptedSource", "names", "rig", "there_and_back"]

NBYTES = 100
FETCH = 10.0  # seconds for NBYTES at RATE
RATE = NBYTES / FETCH


class ScriptedSource:
    """Blocks that come from nowhere: remembers which block each buffer got last, and when it was there.

    A block in ``broken`` fails in its lane. What somebody may still read (``reading``) must not be a target.
    """

    def __init__(self, device: FakeDevice, sizes: Mapping[str, int]) -> None:
        self.broken: set[str] = set()
        self.reading: list[FakeBuffer] = []
        self.content: dict[FakeBuffer, str] = {}
        self.there: dict[FakeBuffer, float] = {}
        self.fetched: list[str] = []
        self._device = device
        self._sizes = sizes

    def fetch(self, block: str, target: FakeBuffer, after: Sequence[Completion]) -> Completion:
        assert target not in self.reading
        assert target.nbytes >= self._sizes[block]

        def job() -> None:
            # Bytes that were half copied are nobody's.
            self.content.pop(target, None)
            if block in self.broken:
                raise OSError(f"cannot read {block}")
            self.content[target] = block

        self.fetched.append(block)
        done = self._device.submit(Lane.H2D, job, after=after, nbytes=self._sizes[block], what=block)
        self.there[target] = done.end
        return done


class Rig:
    """A pool over a scripted device and source; ``use`` is what a module's forward or backward does with a block."""

    def __init__(
        self,
        sizes: Mapping[str, int],
        shared: Sequence[int],
        *,
        dedicated: Sequence[str] = (),
        distance: int = 1,
        compute: float = 0.0,
    ) -> None:
        self.device = FakeDevice(None, {Lane.H2D: RATE})
        self.source = ScriptedSource(self.device, sizes)
        self.vacated: list[FakeBuffer] = []
        self.pool = SlotPool(self.device, self.source, sizes, shared, dedicated, distance, self.vacated.append)
        self._blocks = list(sizes)
        self._compute = compute

    def acquire(self, block: str) -> Slot:
        slot = self.pool.acquire(block)
        assert (slot.occupant, slot.residency) == (block, Residency.READY)
        assert self.source.content[slot.buffer] == block
        assert self.source.there[slot.buffer] <= self.device.now()
        self.source.reading.append(slot.buffer)
        return slot

    def release(self, slot: Slot) -> None:
        self.source.reading.remove(slot.buffer)
        self.pool.release(slot)

    def use(self, block: str) -> None:
        slot = self.acquire(block)
        self.device.compute(self._compute, block)
        self.release(slot)

    def run(self, blocks: Sequence[str], kind: str = "training") -> list[str]:
        """One pass over ``blocks``; returns what was fetched, in order."""
        before = len(self.source.fetched)
        self.pool.order.begin(kind)
        for block in blocks:
            self.use(block)
        return self.source.fetched[before:]

    def step(self, blocks: Sequence[str]) -> list[str]:
        """An optimizer step, after which every slot is stale, and the pass that follows it."""
        before = len(self.source.fetched)
        for block in self._blocks:
            self.pool.invalidate(block)
        self.pool.order.begin("training")
        self.pool.prefetch()
        self.run(blocks)
        return self.source.fetched[before:]


def names(n: int) -> list[str]:
    return [str(i) for i in range(n)]


def there_and_back(n: int) -> list[str]:
    """The uses of one training step: forward, then backward."""
    return [*names(n), *reversed(names(n))]


def rig(n: int, slots: int, distance: int, compute: float) -> Rig:
    return Rig(dict.fromkeys(names(n), NBYTES), [NBYTES] * slots, distance=distance, compute=compute)
