"""A lowering that is as plain as can be, so that the checker has programs to judge that ``forebay.lowering`` did not
write. No torch.

Blocks are fetched on demand, gradients are waited for one by one, and an action waits for exactly what it needs: every
dependency that is written down matters, unless another path says the same.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from math import ceil

from forebay.arenas import UPDATE_CELLS, UPDATE_RING, arenas_of, home_nbytes
from forebay.cells import cell_of
from forebay.layout import Chunk, needs_master, state_layout
from forebay.memory import Kind, Tier
from forebay.plans import Plan, Update
from forebay.program import Action, Program, Use, Verb
from forebay.timeline import Lane
from forebay.trace import Phase, Trace
from tests.null.tracing import made_bytes

__all__ = ["PlainLowering", "device_standing", "drop", "plain_program"]


def plain_program(trace: Trace, plan: Plan, steps: int = 2, micro_batches: int = 1) -> Program:
    """``plan`` as a program; it claims device memory for everything that the trace makes, twice, at any time."""
    return PlainLowering(trace, plan, steps, micro_batches).program()


def device_standing(trace: Trace, plan: Plan, *, gradients: bool = False) -> int:
    """Bytes that are on the device all the time; with ``gradients`` also those that come with a pass and stay."""
    inputs = sum(t.nbytes for t in trace.sources if t.kind is Kind.INPUT) if trace.device == "cuda" else 0
    sizes = arenas_of(trace.model, plan, trace.state_names)
    return sizes.device - (0 if gradients else sizes.device_gradients) + trace.model.buffer_nbytes + inputs


class PlainLowering:
    """Writes the actions down in order; ``last`` are ends that later actions wait for, by what they concern."""

    def __init__(self, trace: Trace, plan: Plan, steps: int, micro_batches: int) -> None:
        self.trace, self.plan, self.steps, self.micro_batches = trace, plan, steps, micro_batches
        self.blocks = {b.name: b for b in trace.model.blocks}
        self.placements = {p.block: p for p in plan.placements}
        self.names = [(p.name, b.name) for b in trace.model.blocks for p in b.parameters]
        self.roots = {i: t.root for i, t in trace.tensors()}
        self.claim = 2 * sum(made_bytes(trace).values()) + 2 * trace.held_nbytes + trace.unseen_nbytes
        self.claim += 4 * sum(b.trainable_numel for b in trace.model.blocks)  # widened, in updates on the device
        dedicated = [p.block for p in plan.placements if p.parameters is Tier.DEVICE and not p.resident]
        self.slots = (*(self.blocks[n].nbytes for n in dedicated), *plan.streaming.slots)
        self.own_slot = {name: i for i, name in enumerate(dedicated)}
        self.shared = range(len(dedicated), len(self.slots))
        self.actions: list[Action] = []
        self.step = 0
        self.last: dict[tuple[str, object], int] = {}
        # Of blocks that are updated ahead of their step: gradients that have yet to land in it, and ends of what has
        # written their other copy.
        self.due: dict[str, int] = {}
        self.other: dict[tuple[str, object], int] = {}
        self.turn = 0
        self.rings: dict[str, list[int]] = defaultdict(list)
        self.hold: list[int] = []

    def add(self, lane: Lane, verb: Verb, what: str, after: list[int | None], **more: object) -> int:
        waits = tuple(sorted({a for a in after if a is not None}))
        self.actions.append(Action(lane, verb, what, self.step, after=waits, **more))  # type: ignore[arg-type]
        return len(self.actions) - 1

    def program(self) -> Program:
        for step in range(self.steps):
            self.step = step
            trained = [self.names[v.resolve(g.parameter)][1] for _, v, op in self.trace.ops() for g in op.gradients]
            self.due = {name: trained.count(name) * self.micro_batches for name in self.plan.updated(Update.AHEAD)}
            for micro in range(self.micro_batches):
                self._pass(micro)
            for placement in self.plan.placements:
                if placement.update is not Update.AHEAD:
                    self._update(placement.block)
            self.last.update(self.other)
        sizes = arenas_of(self.trace.model, self.plan, self.trace.state_names)
        stands = {
            Tier.DEVICE: {Kind.PARAMETER: device_standing(self.trace, self.plan)},
            Tier.HOST: {Kind.STATE: sizes.host},
            Tier.DISK: {Kind.STATE: sizes.disk},
        }
        return Program(tuple(self.actions), self.slots, stands, self.steps, self.micro_batches)

    # Passes.

    def _pass(self, micro: int) -> None:
        waiting: dict[str, list[int]] = defaultdict(list)
        for place, visit in enumerate(self.trace.visits):
            ops = self.trace.segments[visit.segment].ops
            if visit.block in self.plan.recompute and visit.phase is Phase.FORWARD:
                waiting[visit.block].append(place)
            elif visit.block in self.plan.recompute:
                earlier = self.trace.visits[waiting[visit.block].pop()]
                length = self.trace.segments[earlier.segment].saves_until
                self._compute(
                    f"recompute {visit.block}", visit.block, earlier.first_op, earlier.first_op + length, again=True
                )
            start = visit.first_op
            for index, op in enumerate(ops):
                end = visit.first_op + index + 1
                if op.gradients or index == len(ops) - 1:
                    done = self._compute(f"{visit.phase.value} {visit.block}", visit.block, start, end)
                    start = end
                    for gradient in op.gradients:
                        self._land(visit.resolve(gradient.parameter), micro, done)

    def _compute(self, what: str, block: str, start: int, stop: int, again: bool = False) -> int:
        wanted = {}
        for number, visit, op in self.trace.ops():
            if start <= number < stop:
                for root in (self.roots[visit.resolve(t)] for t in op.inputs):
                    if root < len(self.names) and not self.placements[self.names[root][1]].resident:
                        wanted[self.names[root][1]] = 0
        uses = tuple(Use(name, self._fetch(name)) for name in wanted)
        after = [self.last["fetch", use.block] for use in uses]
        done = self.add(
            Lane.COMPUTE,
            Verb.COMPUTE,
            what,
            [*after, *self.hold],
            block=block,
            ops=(start, stop),
            recomputed=again,
            uses=uses,
            peak=self.claim,
        )
        self.hold = []
        for use in uses:
            self.last["read", use.slot] = done
        return done

    def _fetch(self, block: str) -> int:
        slot = self.own_slot.get(block)
        while slot is None:
            self.turn += 1
            slot = self.shared[self.turn % len(self.shared)]
            if self.slots[slot] < self.blocks[block].nbytes:
                slot = None
        source = self.last.get(("update", block))
        if self.placements[block].parameters is Tier.DISK:
            source = self._read_home(block)
        index = self.add(
            Lane.H2D,
            Verb.FETCH,
            f"fetch {block}",
            [source, self.last.get(("read", slot))],
            block=block,
            slot=slot,
            nbytes=self.blocks[block].nbytes,
        )
        if self.placements[block].parameters is Tier.DISK:
            self.rings["host"].append(index)
        self.last["fetch", block] = index
        return slot

    def _ring(self, name: str, buffers: int) -> int | None:
        """The end of the use whose buffer is taken next."""
        return self.rings[name][-buffers] if len(self.rings[name]) >= buffers else None

    def _read_home(self, block: str) -> int:
        size = home_nbytes(self.blocks[block])
        after = [
            self._ring("host", sum(n >= size for n in self.plan.streaming.host_slots)),
            self.last.get(("write", block)),
        ]
        return self.add(Lane.DISK_READ, Verb.READ, f"read {block}", after, block=block, chunk=-1, nbytes=size)

    def _land(self, parameter: int, micro: int, done: int) -> None:
        name, block = self.names[parameter]
        if self.placements[block].resident:
            return
        verb = Verb.ACCUMULATE if micro else Verb.LAND
        nbytes = self.trace.sources[parameter].nbytes
        after = [done, self.last.get(("update", block))]
        landed = self.add(Lane.D2H, verb, f"gradient {name}", after, block=block, parameter=name, nbytes=nbytes)
        self.last["land", block] = landed
        self.hold.append(landed)
        if block in self.due:
            self.due[block] -= 1
            if not self.due[block]:
                self._update(block)

    # Updates.

    def _update(self, block: str) -> None:
        layout = state_layout(
            self.blocks[block], self.trace.state_names, self.plan.streaming.update_chunk, self.plan.streaming.masters
        )
        trained = {self.names[v.resolve(g.parameter)][0] for _, v, op in self.trace.ops() for g in op.gradients}
        chunks = [i for i, c in enumerate(layout.chunks) if any(p.parameter.name in trained for p in c.pieces)]
        placement = self.placements[block]
        ahead = placement.update is Update.AHEAD
        if not chunks:
            return
        if ahead:  # the other copy has to be whole
            chunks = list(range(len(layout.chunks)))
        if placement.resident:
            self.add(Lane.COMPUTE, Verb.UPDATE, f"update {block}", [], block=block, chunk=-1, peak=self.claim)
            return
        home = self._read_home(block) if placement.parameters is Tier.DISK else None
        # What writes the other copy waits for no fetch of the step, and no fetch of the step for that.
        written = self.other if ahead else self.last
        update = -1
        for number in chunks:
            chunk = layout.chunks[number]
            read = None
            if placement.states is Tier.DISK and chunk.nbytes and placement.update is not Update.STORAGE:
                after = [self.last.get(("states", (block, number))), self._ring("states", UPDATE_RING)]
                what = f"read states of {block} at {chunk.offset}"
                read = self.add(Lane.DISK_READ, Verb.READ, what, after, block=block, chunk=number, nbytes=chunk.nbytes)
            # Parameters change only when the last fetch of the step has copied them.
            fetched = None if ahead or home is not None else self.last.get(("fetch", block))
            if placement.update in (Update.DEVICE, Update.STORAGE):
                stored, update = self._update_there(block, number, chunk, [home, fetched], read)
            else:
                after = [self.last["land", block], home, read, fetched]
                update = self.add(Lane.UPDATE, Verb.UPDATE, f"update {block}", after, block=block, chunk=number)
                stored = update
            if read is not None:
                what = f"write states of {block} at {chunk.offset}"
                write = self.add(
                    Lane.DISK_WRITE, Verb.WRITE, what, [stored], block=block, chunk=number, nbytes=chunk.nbytes
                )
                written["states", (block, number)] = write
                self.rings["states"].append(write)
        written["update", block] = update
        if home is not None:
            after = [update, None if ahead else self.last.get(("fetch", block))]
            write = self.add(Lane.DISK_WRITE, Verb.WRITE, f"write {block}", after, block=block, chunk=-1)
            written["write", block] = write
            self.rings["host"].append(write)

    def _update_there(
        self, block: str, number: int, chunk: Chunk, home: list[int | None], read: int | None
    ) -> tuple[int, int]:
        """A chunk to the device, or to the storage, and back: when its states are at home, and when its parameters are.
        ``home``: what has brought those or may still read them."""
        trained = {self.names[v.resolve(g.parameter)][0] for _, v, op in self.trace.ops() for g in op.gradients}
        own = [p for p in chunk.pieces if p.parameter.name in trained]
        nbytes = {Kind.STATE: chunk.nbytes, Kind.GRADIENT: sum(p.nbytes for p in own)}
        nbytes[Kind.PARAMETER] = sum(p.nbytes for p in own if not needs_master(p.parameter))
        beside = self.placements[block].update is Update.STORAGE
        there, update_lane, back = (Lane.H2D, Lane.DEVICE_UPDATE, Lane.D2H)
        if beside:
            there, update_lane, back = (Lane.DISK_WRITE, Lane.STORAGE_UPDATE, Lane.DISK_READ)
            nbytes[Kind.STATE] = 0
            density = self.plan.streaming.gradient_density
            if density is not None:
                nbytes[Kind.GRADIENT] = sum(
                    ceil((p.stop - p.start) * density) * (4 + p.nbytes // (p.stop - p.start)) for p in own
                )
        ring = "cells beside" if beside else "cells"
        free = self._ring(ring, UPDATE_CELLS if beside else self._cells())
        known = {
            Kind.STATE: [read, self.last.get(("kept", (block, number)))],
            Kind.PARAMETER: [*home[:1], self.last.get(("stored", (block, number)))],
            Kind.GRADIENT: [self.last["land", block]],
        }
        loads: list[int | None] = [
            self.add(
                there,
                Verb.LOAD,
                f"load {part.value}s of {block}",
                [free, *after],
                block=block,
                chunk=number,
                part=part,
                nbytes=nbytes[part],
            )
            for part, after in known.items()
            if nbytes[part]
        ]
        update = self.add(update_lane, Verb.UPDATE, f"update {block}", loads, block=block, chunk=number)
        kept = stored = update
        if nbytes[Kind.STATE]:
            what = f"store states of {block}"
            kept = self.add(
                back, Verb.STORE, what, [update], block=block, chunk=number, part=Kind.STATE, nbytes=chunk.nbytes
            )
        stored = self.add(
            back,
            Verb.STORE,
            f"store {block}",
            [update, *home],
            block=block,
            chunk=number,
            part=Kind.PARAMETER,
            nbytes=sum(p.nbytes for p in own),
        )
        self.last["kept", (block, number)], self.last["stored", (block, number)] = kept, stored
        self.rings[ring].append(stored)
        return kept, stored

    def _cells(self) -> int:
        """As many of the largest as the window holds beside the gradients that one of them widens."""
        layouts = [
            state_layout(
                self.blocks[name], self.trace.state_names, self.plan.streaming.update_chunk, self.plan.streaming.masters
            )
            for name in self.plan.updated(Update.DEVICE)
        ]
        widened = max((4 * c.elements for one in layouts if "master" in one.streams for c in one.chunks), default=0)
        largest = max(cell_of(c).nbytes for one in layouts for c in one.chunks)
        return (self.plan.streaming.update_window - widened) // largest


def drop(program: Program, index: int) -> Program:
    """``program`` without an action; whoever waited for it waits for what it had waited for, on its lane too."""
    before, dropped, behind = program.actions[:index], program.actions[index], program.actions[index + 1 :]
    gone = (*dropped.after, *[i for i, a in enumerate(before) if a.lane is dropped.lane][-1:])

    def moved(after: tuple[int, ...]) -> tuple[int, ...]:
        kept = {a for b in after for a in (gone if b == index else (b,))}
        return tuple(sorted(a - (a > index) for a in kept))

    # Those before wait for none of what is numbered anew; to make an action again takes most of all this.
    return replace(program, actions=(*before, *(replace(a, after=moved(a.after)) if a.after else a for a in behind)))
