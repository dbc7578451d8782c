"""Whether every trainable element is updated once in every step, or every turn, after its gradient and with its states.
No torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import final

from forebay.arenas import UPDATE_RING
from forebay.checking.cells import Cells, Work
from forebay.checking.computing import Passes
from forebay.checking.order import Order
from forebay.checking.rounds import Turns
from forebay.checking.step import Step
from forebay.checking.words import fault, listed
from forebay.layout import PAGE, StateLayout
from forebay.memory import Tier
from forebay.plans import Placement, Plan, Update
from forebay.program import Action, Program, Verb
from forebay.timeline import Lane

__all__ = ["Updates"]

Key = tuple[str, int, int]
"""Block, chunk, step."""

WHERE = {
    Lane.UPDATE: "on the host",
    Lane.DEVICE_UPDATE: "on the device",
    Lane.STORAGE_UPDATE: "beside the storage",
}


@final
class Updates:
    """Updates, reads and writes by block, chunk and step. ``landed`` is what ``gradients.landings`` found, ``sources``
    are those of ``Residency``."""

    def __init__(
        self,
        step: Step,
        plan: Plan,
        program: Program,
        order: Order,
        layouts: Mapping[str, StateLayout],
        passes: Passes,
        landed: Mapping[tuple[int, int], int],
        sources: Mapping[int, int],
        turns: Turns,
    ) -> None:
        self._step = step
        self._plan = plan
        self._program = program
        self._order = order
        self._layouts = layouts
        self._passes = passes
        self._landed = landed
        self._turns = turns
        self._fetched = {read: fetch for fetch, read in sources.items()}
        self._placements = {p.block: p for p in plan.placements}
        self._ahead = frozenset(plan.updated(Update.AHEAD))
        self._in_backward = frozenset(plan.updated(Update.BACKWARD))
        self._cells = Cells(plan, program, order, layouts)
        self._ids = step.ids
        # Parameters with a gradient, of every block, and those that have elements in a chunk of it.
        self._trained_of = {
            b.name: [p.name for p in b.parameters if step.ids[p.name] in step.with_gradient]
            for b in step.trace.model.blocks
        }
        self._trained = {
            (block, number): [n for n in (p.parameter.name for p in chunk.pieces) if step.ids[n] in step.with_gradient]
            for block, layout in layouts.items()
            for number, chunk in enumerate(layout.chunks)
        }
        self._latest_landing: dict[Key, int] = {}
        self._moves: dict[tuple[str, int], list[int]] = defaultdict(list)
        self._seen: dict[Verb, dict[Key, list[int]]] = {verb: defaultdict(list) for verb in Verb}
        for index, action in enumerate(program.actions):
            if action.verb in (Verb.UPDATE, Verb.READ, Verb.WRITE) and action.tensor < 0:
                self._note(index, action)
            elif action.verb in (Verb.LAND, Verb.ACCUMULATE):
                self._moves[action.parameter, action.step].append(index)

    def check(self) -> None:
        """Raises ``PlanInvalid`` at the first update that is missing, repeated, or not ordered as it must be."""
        for name, placement in self._placements.items():
            chunks = self._layouts[name].chunks
            for step in range(self._program.steps):
                if placement.resident:
                    self._check_resident(name, step)
                if placement.resident or not self._turns.has_turn(name, step):
                    continue
                for chunk in range(len(chunks)):
                    self._check_chunk(placement, chunk, step)
                if placement.parameters is Tier.DISK:
                    self._check_home(name, step)
        self._check_ring()
        self._check_host_slots()
        self._check_buffers(*self._cells.uses(beside=False), "cells of the update_window")
        self._check_buffers(*self._cells.uses(beside=True), "cells beside the storage")

    def _note(self, index: int, action: Action) -> None:
        placement = self._placements.get(action.block)
        if placement is None:
            raise fault(self._program, index, action.block, f"the model has no block {action.block!r}")
        chunks = len(self._layouts[action.block].chunks)
        whole = placement.resident if action.verb is Verb.UPDATE else True
        if not (-1 if whole else 0) <= action.chunk < chunks:
            text = f"block {action.block} has no chunk {action.chunk} to {action.verb.value}"
            raise fault(self._program, index, action.block, text)
        if not 0 <= action.step < self._program.steps:
            raise fault(self._program, index, action.block, f"there is no step {action.step}")
        home = placement.parameters if action.chunk < 0 else placement.states
        if action.verb is not Verb.UPDATE and action.chunk >= 0 and action.block in self._cells.beside:
            name, verb = action.block, action.verb.value
            text = f"the states of block {name} are updated where they lie: there is nothing to {verb}"
            raise fault(self._program, index, action.block, text)
        if action.verb is not Verb.UPDATE and home is not Tier.DISK:
            what = "parameters" if action.chunk < 0 else "states"
            raise fault(self._program, index, action.block, f"the {what} of block {action.block} are not on disk")
        self._seen[action.verb][action.block, action.chunk, action.step].append(index)

    def _wanted(self, block: str, chunk: int) -> list[str]:
        """Parameters for which the chunk is updated. What is updated ahead of its step goes to the other copy, and all
        of the block has to be there: chunks without a gradient as well."""
        return self._trained_of[block] if block in self._ahead else self._trained[block, chunk]

    def _once(self, verb: Verb, key: Key, names: list[str], near: int) -> int | None:
        """The one action of ``verb`` for ``key``; None if there is none and, without ``names``, need be none."""
        found = self._seen[verb][key]
        if len(found) == 1 and names:
            return found[0]
        block, chunk, step = key
        what = f"chunk {chunk} of block {block}" if chunk >= 0 else f"block {block}"
        if found[1:]:
            text = f"{what} has its {verb.value} twice in step {step}, first in action {found[0]}"
            raise fault(self._program, found[1], names[0] if names else block, text)
        if found:
            raise fault(self._program, found[0], block, f"nothing in {what} has a gradient to {verb.value} it for")
        if names:
            text = f"{what} ({listed(names)}) has no {verb.value} in step {step}, after its gradients"
            raise fault(self._program, near, names[0], text)
        return None

    def _check_resident(self, block: str, step: int) -> None:
        names = self._trained_of[block]
        last = self._passes.ends[step]
        update = self._once(Verb.UPDATE, (block, -1, step), names, last)
        if update is None:
            return
        # One in backward comes after its gradients, which ``in_backward`` has found there.
        too_soon = block not in self._in_backward and not self._order.before(last, update)
        if self._program.actions[update].lane is not Lane.COMPUTE or too_soon:
            text = f"block {block} is resident: its update belongs on the compute lane, after the step's last backward"
            raise fault(self._program, update, block, text)
        following = self._passes.first[(step + 1) * self._program.micro_batches :][:1]
        if following and not self._order.before(update, following[0]):
            text = f"block {block} is updated for step {step} after the forward of the next step has begun"
            raise fault(self._program, update, block, text)

    def _check_chunk(self, placement: Placement, chunk: int, step: int) -> None:
        program, order, block = self._program, self._order, placement.block
        names = self._wanted(block, chunk)
        latest = self._latest(block, chunk, step)
        update = self._once(Verb.UPDATE, (block, chunk, step), names, latest)
        there = block in self._cells.blocks
        lane = self._cells.lane(block, Verb.UPDATE) if there else Lane.UPDATE
        if update is not None and program.actions[update].lane is not lane:
            raise fault(program, update, block, f"block {block} is updated {WHERE[lane]}, on the {lane.value} lane")
        if there:
            self._cells.check_chunk(block, chunk, step, names, -1 if update is None else update)
        if update is None:
            return
        for reader in self._work(block, chunk, step, update).gradients if there else (update,):
            self._check_time(block, names if latest < 0 or not order.before(latest, reader) else [], step, reader)
            # Of gradients that are used up others land in the place: see ``passing``.
            for name in self._trained[block, chunk] if block not in self._in_backward else ():
                following = self._moves[name, step + 1][:1]
                if following and not order.before(reader, following[0]):
                    text = f"the next gradient of {name} may overwrite the one that action {reader} reads"
                    raise fault(program, following[0], name, text)
        moves = placement.states is Tier.DISK and block not in self._cells.beside
        if moves and self._layouts[block].chunks[chunk].nbytes:
            self._check_states(block, chunk, step, names, update)

    def _work(self, block: str, chunk: int, step: int, update: int) -> Work:
        """What an update does where things are at home."""
        return self._cells.work(block, chunk, step) if block in self._cells.blocks else Work.at_home(update)

    def _landing(self, name: str, step: int) -> int:
        """The action by whose end the gradient of a parameter has landed for the last time in a step."""
        return self._landed[self._ids[name], (step + 1) * self._program.micro_batches - 1]

    def _latest(self, block: str, chunk: int, step: int) -> int:
        """The last landing of what a chunk is updated for (-1: nothing). Landings are on one lane, in order: who comes
        after that one comes after all of them."""
        key = block, -1 if block in self._ahead else chunk, step
        if key not in self._latest_landing:
            landings = (self._landing(name, step) for name in self._wanted(block, chunk))
            self._latest_landing[key] = max(landings, default=-1)
        return self._latest_landing[key]

    def _check_time(self, block: str, names: list[str], step: int, update: int) -> None:
        """An update (or what reads gradients for it) comes after the gradients of ``names``, and when the step is asked
        for, which is after all of backward is issued. One ahead of its step comes after all that lands in its block:
        whatever lands later tells the step that the update has to be done again. One in backward comes after the
        gradients that it reads."""
        program = self._program
        for name in names:
            landing = self._landing(name, step)
            if not self._order.before(landing, update):
                text = f"the gradient of {name} lands in action {landing}, which may not be done"
                raise fault(program, update, name, text)
        early = block in self._ahead or block in self._in_backward
        if not early and update < self._passes.ends[step]:
            text = f"block {block} is updated before backward of step {step} is over, and the plan does not update it"
            raise fault(program, update, block, f"{text} ahead of its step or in backward")

    def _is_current(self, block: str, step: int, read: int) -> bool:
        """Whether a read of a block finds the copy that the updates of ``step`` work on: of two copies, the current one
        is another when the step before is over (``Residency``)."""
        return block not in self._ahead or not step or read > self._passes.ends[step - 1]

    def _check_states(self, block: str, chunk: int, step: int, names: list[str], update: int) -> None:
        read = self._once(Verb.READ, (block, chunk, step), names, update)
        write = self._once(Verb.WRITE, (block, chunk, step), names, update)
        if read is None or write is None:
            return
        work = self._work(block, chunk, step, update)
        for user in work.states:
            if not self._order.before(read, user):
                text = f"the states of chunk {chunk} of block {block} may not have been read (action {read})"
                raise fault(self._program, user, block, text)
        for user in work.stored:
            if not self._order.before(user, write):
                text = f"it writes the states of chunk {chunk} of block {block}, which action {user} may still change"
                raise fault(self._program, write, block, text)
        earlier = self._seen[Verb.WRITE][block, chunk, self._turns.previous(block, step)]
        if earlier and not self._order.before(earlier[0], read):
            text = f"it reads states of chunk {chunk} of block {block} that action {earlier[0]} may not have written"
            raise fault(self._program, read, block, text)
        if not self._is_current(block, step, read):
            text = f"it reads states of chunk {chunk} of block {block} out of the copy that step {step - 1} began with"
            raise fault(self._program, read, block, text)

    def _updates_of(self, block: str, step: int) -> list[int]:
        """The actions by which the updates of a block in a step read or write its parameters at home."""
        chunks = range(len(self._layouts[block].chunks))
        updates = ((chunk, i) for chunk in chunks for i in self._seen[Verb.UPDATE][block, chunk, step])
        return [use for chunk, i in updates for use in self._work(block, chunk, step, i).parameters]

    def _check_home(self, block: str, step: int) -> None:
        """Parameters on disk: read before the updates of the step, written once after them."""
        updates = self._updates_of(block, step)
        program, order = self._program, self._order
        write = self._once(Verb.WRITE, (block, -1, step), [block] if updates else [], max(updates, default=-1))
        if write is None:
            return
        for update in updates:
            if not order.before(update, write):
                text = f"it writes the parameters of block {block}, which action {update} may still change"
                raise fault(program, write, block, text)
        if self._source(block, step, updates) is None:
            text = f"the parameters of block {block} live on disk and are not read before this update"
            raise fault(program, min(updates), block, text)

    def _source(self, block: str, step: int, updates: list[int]) -> int | None:
        """The read that the updates of a step work on: after the write of the step before, before every update."""
        writes = self._seen[Verb.WRITE][block, -1, self._turns.previous(block, step)]
        reads = [i for s in range(self._program.steps) for i in self._seen[Verb.READ][block, -1, s]]
        # Not one whose buffer has gone to a fetch since.
        known = [
            r
            for r in sorted(reads)
            if r not in self._fetched
            and self._is_current(block, step, r)
            and all(self._order.before(r, u) for u in updates)
            and all(self._order.before(w, r) for w in writes)
        ]
        return known[-1] if known else None

    # Staging.

    def _check_ring(self) -> None:
        """States on disk pass through ``UPDATE_RING`` buffers, each taken from its read to its write."""
        uses = []
        for key, reads in self._seen[Verb.READ].items():
            if key[1] >= 0 and reads:
                uses.append((reads[0], self._seen[Verb.WRITE][key][0]))
        self._check_buffers(sorted(uses), UPDATE_RING, "buffers for states")

    def _check_host_slots(self) -> None:
        """Parameters from disk pass through host slots, each taken from its read to the fetch, or to the write (or, by
        a read that serves nobody, until it is done)."""
        uses: dict[int, list[tuple[int, int]]] = defaultdict(list)
        blocks = {b.name: b for b in self._step.trace.model.blocks}
        for name, placement in self._placements.items():
            if placement.parameters is not Tier.DISK:
                continue
            size = -(-blocks[name].nbytes // PAGE) * PAGE
            ends: dict[int, int] = {}
            for step in range(self._program.steps):
                ends.update((r, self._fetched.get(r, r)) for r in self._seen[Verb.READ][name, -1, step])
            for step in range(self._program.steps):
                source = self._source(name, step, self._updates_of(name, step))
                for write in self._seen[Verb.WRITE][name, -1, step]:
                    if source is not None:
                        ends[source] = write
            uses[size] += ends.items()
        for size in uses:
            large = sorted(use for other, own in uses.items() if other >= size for use in own)
            count = sum(slot >= size for slot in self._plan.streaming.host_slots)
            self._check_buffers(large, count, f"host slots of {size} bytes")

    def _check_buffers(self, uses: list[tuple[int, int]], count: int, what: str) -> None:
        """Of the uses (read, end) that began before one, at most ``count - 1`` may still go on when it begins."""
        open_uses: list[tuple[int, int]] = []
        for start, end in uses:
            open_uses = [use for use in open_uses if not self._order.before(use[1], start)]
            open_uses.append((start, end))
            if len(open_uses) > count:
                block = self._program.actions[start].block
                text = (
                    f"it needs one of {count} {what}, and action {open_uses[0][1]} may still use the one it would get"
                )
                raise fault(self._program, start, block, text)
