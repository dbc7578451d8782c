"""Home copies on paper: the order of reads, updates and writes that ``runtime.homes`` and ``runtime.updates`` keep.
No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from forebay.arenas import UPDATE_RING, Arenas, home_nbytes, home_tier
from forebay.device.base import Completion
from forebay.layout import untrained_nbytes
from forebay.lowering.cells import paper_cells
from forebay.lowering.jobs import Job, Jobs
from forebay.lowering.recorder import Paper, Recorded, Recorder
from forebay.memory import Tier
from forebay.model import Block
from forebay.plans import Placement, Plan, Update
from forebay.program import Change, Verb
from forebay.scheduling.slots import SlotPool
from forebay.scheduling.staging import StagingRing
from forebay.timeline import Lane
from forebay.trace import Trace

__all__ = ["BlockHome", "Homes"]


@final
class _Copy:
    """One copy of a block's parameters and states: who wrote them last (states by chunk, where that is not the order of
    the update lane), who fetched from it last."""

    def __init__(self) -> None:
        self.written: Completion | None = None
        self.states_written: dict[int, Completion] = {}
        self.fetched: Completion | None = None

    def settle(self) -> None:
        """Waits until it holds what the last update made."""
        for completion in (self.written, *self.states_written.values()):
            if completion is not None:
                completion.wait()
        self.written = None
        self.states_written.clear()


@dataclass(frozen=True, slots=True)
class _Waits:
    """What an update of the parameters in ``tasks`` comes after: the landing of gradients, the parameters, both."""

    tasks: frozenset[int]
    landed: tuple[Completion, ...]
    ready: tuple[Completion, ...]
    both: tuple[Completion, ...]


@final
class BlockHome:
    """One block: where it is at home, and who wrote or reads that last. A block that speculates has a ``spare`` copy;
    with ``ahead`` the outcome of the step is in it already. ``deferred`` are the tasks of an update on the device that
    is not written down yet, and the step that has asked for it."""

    def __init__(self, block: Block, placement: Placement, jobs: tuple[Job, ...]) -> None:
        self.block = block
        self.placement = placement
        self.jobs = jobs
        self.untrained = untrained_nbytes(block)
        self.trained = sum(parameter.trainable for parameter in block.parameters)
        self.on_disk = home_tier(placement) is Tier.DISK
        self.stateless = not any(job.nbytes for job in jobs)
        self.states_move = placement.update is not Update.STORAGE
        # Those that are updated where they lie do not come from there.
        self.states_on_disk = placement.states is Tier.DISK and not self.stateless and self.states_move
        self.current = _Copy()
        self.spare = _Copy() if placement.update is Update.AHEAD else None
        self.ahead = False
        self.deferred: tuple[frozenset[int], int] | None = None
        self.arrived: dict[int, Completion] = {}  # by the place of the parameter in the block
        self.read_by: dict[int, Completion] = {}

    def commit(self) -> bool:
        """Whether the update of this step ran ahead of it; if so, its outcome is the current copy now."""
        if not self.ahead or self.spare is None:
            return False
        self.current, self.spare, self.ahead = self.spare, self.current, False
        return True


@final
class Homes:
    """All blocks of a plan at home; a ``slots.BlockSource``."""

    def __init__(self, trace: Trace, plan: Plan, sizes: Arenas, recorder: Recorder, jobs: Jobs) -> None:
        self._recorder = recorder
        self.blocks: dict[str, BlockHome] = {}
        for placement in plan.placements:
            block = trace.model.block(placement.block)
            self.blocks[block.name] = BlockHome(block, placement, jobs.of(block, plan.streaming))
        largest = sizes.update_ring // UPDATE_RING
        self._chunk_ring = StagingRing([Paper(largest)] * UPDATE_RING if largest else [])
        self._slot_ring = StagingRing([Paper(n) for n in plan.streaming.host_slots] if sizes.host_slots else [])
        self._slot_numbers: Mapping[int, int] = {}
        self._cells = paper_cells(plan, sizes, recorder, jobs)

    def number_slots(self, pool: SlotPool) -> None:
        """Learns the slots of the pool, whose buffers ``fetch`` is given."""
        self._slot_numbers = {id(slot.buffer): number for number, slot in enumerate(pool.slots)}

    def fetch(self, block: str, target: Paper, after: Sequence[Completion]) -> Completion:
        """A block's way into a slot: from the host, or from disk by way of a host slot."""
        home = self.blocks[block]
        self.queue_deferred(home)
        written = home.current.written
        pending = () if written is None else (written,)
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
            home.current.fetched = fetched
        return fetched

    def step(self, home: BlockHome, tasks: frozenset[int]) -> None:
        """An optimizer step over the parameters in ``tasks``. An update on the device is written down when it is needed
        (``runtime.deferred``)."""
        if home.block.name in self._cells:
            self.queue_deferred(home)
            home.deferred = tasks, self._recorder.step
        elif not home.commit():
            self.update(home, tasks)

    def queue_deferred(self, home: BlockHome) -> None:
        """Whoever calls needs what the last step has asked for. It is that step's, whenever it comes."""
        deferred, home.deferred = home.deferred, None
        if deferred is not None:
            now, self._recorder.step = self._recorder.step, deferred[1]
            self.update(home, deferred[0])
            self._recorder.step = now

    def queue_all(self) -> None:
        """Nothing that a step has asked for is left to be written down."""
        for home in self.blocks.values():
            self.queue_deferred(home)

    def update_ahead(self, home: BlockHome, tasks: frozenset[int]) -> None:
        """The update of ``tasks`` into the spare copy, ahead of the step that ``BlockHome.commit`` makes it part of."""
        if home.spare is not None:
            self.update(home, tasks, home.spare)
            home.ahead = True

    def update(self, home: BlockHome, tasks: frozenset[int], into: _Copy | None = None) -> None:
        """The update of the parameters in ``tasks`` (places in the block). With ``into``, the spare copy, the outcome
        goes there, whole."""
        name, source = home.block.name, home.current
        target = into or source
        landed = [home.arrived[i] for i in sorted(tasks) if i in home.arrived]
        ready = tuple(c for c in (source.written, target.fetched) if c is not None)
        staging = None
        if home.on_disk:
            staging, busy = self._slot_ring.take(home_nbytes(home.block))
            ready = (self._read(home, f"read {name}", home_nbytes(home.block), -1, (*busy, *ready)),)
            staging.busy = ready[0]
        before = self._recorder.latest((*landed, *ready))
        waits = _Waits(tasks, self._recorder.latest(landed), self._recorder.latest(ready), before)
        chunks = [n for n, c in enumerate(home.jobs) if into is not None or not c.parameters.isdisjoint(tasks)]
        if not chunks:
            return
        sizes = [home.jobs[number].touched for number in chunks]
        # What of the block is in no chunk goes along with the first, into a copy that is in memory.
        sizes[0] += 0 if into is None or home.on_disk else 2 * home.untrained
        if home.states_on_disk or name in self._cells:
            for number, touched in zip(chunks, sizes, strict=True):
                read, done = self._update_chunk(home, number, touched, target, waits)
        else:
            # The states are in memory, where only this lane writes them: its order is all that they wait for.
            apart = into is not None and not (home.on_disk and home.stateless)
            pairs = zip(chunks, sizes, strict=True)
            read = done = self._recorder.add_updates(f"update {name}", name, waits.both, pairs, apart=apart)
        target.written = done
        if staging is not None:
            target.written = staging.busy = self._write(home, f"write {name}", home_nbytes(home.block), -1, done)
        for i in tasks:
            home.read_by[i] = read

    def _update_chunk(
        self, home: BlockHome, number: int, touched: int, target: _Copy, waits: _Waits
    ) -> tuple[Recorded, Recorded]:
        """Returns what has read the gradients, and what has made the chunk."""
        name, chunk, written = home.block.name, home.jobs[number], home.current.states_written
        what = f"states of {name} at {chunk.offset}"
        # Only of the same chunk: the next one is read while this one is written.
        states = (written[number],) if number in written else ()
        if home.states_on_disk:
            staging, busy = self._chunk_ring.take(chunk.nbytes)
            states = (self._read(home, f"read {what}", chunk.nbytes, number, (*busy, *states)),)
        if name in self._cells:
            cells = self._cells[name]
            read, done = cells.update(home.block, waits.tasks, number, touched, waits.landed, waits.ready, states)
        else:
            read = done = self._recorder.add(
                Lane.UPDATE,
                Verb.UPDATE,
                f"update {name}",
                after=(*waits.both, *states),
                nbytes=touched,
                block=name,
                chunk=number,
                # What comes from disk and goes there is updated where it lies in between.
                apart=target is not home.current and not home.on_disk,
            )
        target.states_written[number] = done
        if home.states_on_disk:
            target.states_written[number] = staging.busy = self._write(
                home, f"write {what}", chunk.nbytes, number, done
            )
        return read, done

    def update_resident(self, home: BlockHome, tasks: frozenset[int], changes: tuple[Change, ...] = ()) -> None:
        """The update of a block that stays on the device, in the compute order; ``changes`` come with its end."""
        chunks = [chunk for chunk in home.jobs if not chunk.parameters.isdisjoint(tasks)]
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
        self.queue_all()
        for home in self.blocks.values():
            home.current.settle()

    def _read(self, home: BlockHome, what: str, nbytes: int, chunk: int, after: Sequence[Completion]) -> Recorded:
        return self._recorder.add(
            Lane.DISK_READ, Verb.READ, what, after=after, nbytes=nbytes, block=home.block.name, chunk=chunk
        )

    def _write(self, home: BlockHome, what: str, nbytes: int, chunk: int, after: Recorded) -> Recorded:
        return self._recorder.add(
            Lane.DISK_WRITE, Verb.WRITE, what, after=(after,), nbytes=nbytes, block=home.block.name, chunk=chunk
        )
