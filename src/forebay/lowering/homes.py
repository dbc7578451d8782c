"""Home copies on paper: the order of reads, updates and writes that ``runtime.homes`` and ``runtime.updates`` keep.
No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from forebay.arenas import UPDATE_RING, Arenas, home_nbytes, home_tier
from forebay.device.base import Completion
from forebay.layout import STATE_ITEMSIZE, needs_master, state_layout
from forebay.lowering.recorder import Paper, Recorded, Recorder
from forebay.memory import Tier
from forebay.plans import Placement, Plan
from forebay.program import Change, Verb
from forebay.scheduling.slots import SlotPool
from forebay.scheduling.staging import StagingRing
from forebay.timeline import Lane
from forebay.trace import Block, Trace

__all__ = ["BlockHome", "Homes"]


@dataclass(frozen=True, slots=True)
class _Chunk:
    """One update job: its place in the block's states, its bytes there, the bytes that it touches, the bytes of its
    widened gradients, and the places of its parameters in the block."""

    offset: int
    nbytes: int
    touched: int
    widened: int
    parameters: frozenset[int]


@final
class BlockHome:
    """One block: where it is at home, and who wrote or reads that last."""

    def __init__(self, block: Block, placement: Placement, chunks: tuple[_Chunk, ...]) -> None:
        self.block = block
        self.placement = placement
        self.chunks = chunks
        self.on_disk = home_tier(placement) is Tier.DISK
        self.states_on_disk = placement.states is Tier.DISK and any(chunk.nbytes for chunk in chunks)
        self.written: Completion | None = None
        self.states_written: dict[int, Completion] = {}  # by chunk
        self.fetched: Completion | None = None
        self.arrived: dict[int, Completion] = {}  # by the place of the parameter in the block
        self.read_by: dict[int, Completion] = {}

    def settle(self) -> None:
        """Waits until the home holds what the last update made."""
        for completion in (self.written, *self.states_written.values()):
            if completion is not None:
                completion.wait()
        self.written = None
        self.states_written.clear()


@final
class Homes:
    """All blocks of a plan at home; a ``slots.BlockSource``."""

    def __init__(self, trace: Trace, plan: Plan, sizes: Arenas, recorder: Recorder) -> None:
        self._recorder = recorder
        chunks: dict[object, tuple[_Chunk, ...]] = {}
        self.blocks: dict[str, BlockHome] = {}
        for placement in plan.placements:
            block = trace.model.block(placement.block)
            alike = tuple((p.numel, p.nbytes, p.dtype, p.trainable) for p in block.parameters)
            if alike not in chunks:  # layers are alike: their states are cut once
                chunks[alike] = _chunks(block, trace.state_names, plan.streaming.update_chunk)
            self.blocks[block.name] = BlockHome(block, placement, chunks[alike])
        largest = sizes.update_ring // UPDATE_RING
        self._chunk_ring = StagingRing([Paper(largest)] * UPDATE_RING if largest else [])
        self._slot_ring = StagingRing([Paper(n) for n in plan.streaming.host_slots] if sizes.host_slots else [])
        self._slot_numbers: Mapping[int, int] = {}

    def number_slots(self, pool: SlotPool) -> None:
        """Learns the slots of the pool, whose buffers ``fetch`` is given."""
        self._slot_numbers = {id(slot.buffer): number for number, slot in enumerate(pool.slots)}

    def fetch(self, block: str, target: Paper, after: Sequence[Completion]) -> Completion:
        """A block's way into a slot: from the host, or from disk by way of a host slot."""
        home = self.blocks[block]
        pending = () if home.written is None else (home.written,)
        staging = None
        if home.on_disk:
            staging, busy = self._slot_ring.take(home_nbytes(home.block))
            pending = (self._read(home, f"read {block}", home_nbytes(home.block), -1, (*busy, *pending)),)
            staging.busy = pending[0]
        fetched = self._recorder.add(
            Lane.H2D,
            Verb.FETCH,
            f"fetch {block}",
            after=(*after, *pending),
            nbytes=home.block.nbytes,
            block=block,
            slot=self._slot_numbers[id(target)],
        )
        if staging is not None:
            staging.busy = fetched
        else:
            home.fetched = fetched
        return fetched

    def update(self, home: BlockHome, tasks: frozenset[int]) -> None:
        """The update, on the host, of the parameters in ``tasks`` (places in the block)."""
        name = home.block.name
        landed = [home.arrived[i] for i in sorted(tasks) if i in home.arrived]
        ready = tuple(c for c in (home.written, home.fetched) if c is not None)
        staging = None
        if home.on_disk:
            staging, busy = self._slot_ring.take(home_nbytes(home.block))
            ready = (self._read(home, f"read {name}", home_nbytes(home.block), -1, (*busy, *ready)),)
            staging.busy = ready[0]
        before = self._recorder.latest((*landed, *ready))
        done: Recorded | None = None
        for number, chunk in enumerate(home.chunks):
            if chunk.parameters.isdisjoint(tasks):
                continue
            done = self._update_chunk(home, number, chunk, before)
        if done is None:
            return
        home.written = done
        if staging is not None:
            home.written = staging.busy = self._write(home, f"write {name}", home_nbytes(home.block), -1, done)
        for i in tasks:
            home.read_by[i] = done

    def _update_chunk(self, home: BlockHome, number: int, chunk: _Chunk, after: tuple[Completion, ...]) -> Recorded:
        name = home.block.name
        what = f"states of {name} at {chunk.offset}"
        # Only of the same chunk: the next one is read while this one is written.
        states = () if number not in home.states_written else (home.states_written[number],)
        if home.states_on_disk:
            staging, busy = self._chunk_ring.take(chunk.nbytes)
            states = (self._read(home, f"read {what}", chunk.nbytes, number, (*busy, *states)),)
        done = self._recorder.add(
            Lane.UPDATE,
            Verb.UPDATE,
            f"update {name}",
            after=(*after, *states),
            nbytes=chunk.touched,
            block=name,
            chunk=number,
        )
        home.states_written[number] = done
        if home.states_on_disk:
            home.states_written[number] = staging.busy = self._write(home, f"write {what}", chunk.nbytes, number, done)
        return done

    def update_resident(self, home: BlockHome, tasks: frozenset[int], changes: tuple[Change, ...] = ()) -> None:
        """The update of a block that stays on the device, in the compute order; ``changes`` come with its end."""
        chunks = [chunk for chunk in home.chunks if not chunk.parameters.isdisjoint(tasks)]
        if chunks:
            self._recorder.add(
                Lane.COMPUTE,
                Verb.UPDATE,
                f"update {home.block.name}",
                nbytes=sum(chunk.touched for chunk in chunks),
                block=home.block.name,
                chunk=-1,
                peak=max(chunk.widened for chunk in chunks),
                changes=changes,
            )

    def settle(self) -> None:
        """Waits until every update of every block is at home."""
        for home in self.blocks.values():
            home.settle()

    def _read(self, home: BlockHome, what: str, nbytes: int, chunk: int, after: Sequence[Completion]) -> Recorded:
        return self._recorder.add(
            Lane.DISK_READ, Verb.READ, what, after=after, nbytes=nbytes, block=home.block.name, chunk=chunk
        )

    def _write(self, home: BlockHome, what: str, nbytes: int, chunk: int, after: Recorded) -> Recorded:
        return self._recorder.add(
            Lane.DISK_WRITE, Verb.WRITE, what, after=(after,), nbytes=nbytes, block=home.block.name, chunk=chunk
        )


def _chunks(block: Block, state_names: tuple[str, ...], update_chunk: int) -> tuple[_Chunk, ...]:
    layout = state_layout(block, state_names, update_chunk)
    places = {p.name: i for i, p in enumerate(block.parameters)}
    made = []
    for chunk in layout.chunks:
        own = sum((p.stop - p.start) * p.parameter.nbytes // max(1, p.parameter.numel) for p in chunk.pieces)
        widened = sum((p.stop - p.start) * STATE_ITEMSIZE for p in chunk.pieces if needs_master(p.parameter))
        touched = 2 * chunk.elements * STATE_ITEMSIZE * len(layout.streams) + 3 * own
        parameters = frozenset(places[p.parameter.name] for p in chunk.pieces)
        made.append(_Chunk(chunk.offset, chunk.nbytes, touched, widened, parameters))
    return tuple(made)
