"""Whether compute finds every parameter on the device, with the values of the step. No torch."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping
from typing import final

from forebay.checking.computing import Passes
from forebay.checking.order import Order
from forebay.checking.rounds import Turns
from forebay.checking.step import Step
from forebay.checking.words import fault
from forebay.memory import Kind, Tier
from forebay.plans import Plan, Update
from forebay.program import Action, Program, Use, Verb

__all__ = ["Residency"]


@final
class Residency:
    """Every fetch and every use of a slot.

    A fetch is *fresh* for step k if what it copies has seen the updates of all steps before k and none of k: an update
    in the wrong order, or at the same time, would hand compute old values or half-written ones.

    Of a block that is updated ahead of its step there are two copies at home. The updates of step k write the one that
    nobody reads in step k, while others may still read the current one, and the two change places when the step is
    over. Actions do not name copies; which one is current is a matter of the order in which they are issued, which is
    that of the program. A step is over when its last compute is issued, for nothing is fetched between that and
    ``optimizer.step()``. So what is issued before that copies what step k began with, even if the updates of k are done
    by then. An update that is issued later may have been asked for by the step itself, and then works in place.

    Where updates are delayed, step k sees those of all steps before k - 1: to its parameters it is the step before.
    """

    def __init__(self, step: Step, program: Program, order: Order, plan: Plan, passes: Passes, turns: Turns) -> None:
        self._step = step
        self._program = program
        self._order = order
        self._placements = {p.block: p for p in plan.placements}
        self._two_copies = frozenset(plan.updated(Update.AHEAD))
        self._there = frozenset((*plan.updated(Update.DEVICE), *plan.updated(Update.STORAGE)))
        self._ends = passes.ends
        self._late = 0 if plan.streaming.delay_after is None else 1
        self._turns = turns
        self._blocks = {b.name: b for b in step.trace.model.blocks}
        self._fetches: dict[int, list[int]] = defaultdict(list)
        self._changes: dict[str, dict[int, tuple[int, int]]] = defaultdict(dict)
        self._reads: dict[str, list[int]] = defaultdict(list)
        self._source: dict[int, int] = {}
        for index, action in enumerate(program.actions):
            if action.verb is Verb.FETCH:
                self._note_fetch(index)
            elif action.verb is Verb.READ and action.chunk < 0:
                self._reads[action.block].append(index)
            if self._changes_home(action):
                # All of a step run on one lane: the first and the last stand for those between.
                first, _ = self._changes[action.block].get(action.step, (index, index))
                self._changes[action.block][action.step] = first, index

    def _changes_home(self, action: Action) -> bool:
        """Whether it changes what a fetch copies: of a block on disk the write of its parameters does, of one that is
        updated on the device, or beside the storage, what brings them home."""
        if self._on_disk(action.block):
            return action.verb is Verb.WRITE and action.chunk < 0
        if action.block in self._there:
            return action.verb is Verb.STORE and action.part is Kind.PARAMETER
        return action.verb is Verb.UPDATE

    def _on_disk(self, block: str) -> bool:
        return block in self._placements and self._placements[block].parameters is Tier.DISK

    @property
    def sources(self) -> Mapping[int, int]:
        """Of every fetch of a block on disk, the read that it copies from."""
        return self._source

    def check(self) -> None:
        """Raises ``PlanInvalid`` at the first use of a slot that does not hold what is read from it."""
        # Ops in order, each with a parameter that it reads which does not stay on the device.
        reads = [(n, p) for n, op in enumerate(self._step.ops) for p in op.parameters if not self._stays(p)]
        for index, action in enumerate(self._program.actions):
            if action.verb is not Verb.COMPUTE:
                continue
            used = {use.block for use in action.uses}
            start, stop = action.ops
            for number, parameter in reads[bisect_left(reads, (start,)) : bisect_left(reads, (stop,))]:
                block = self._step.block_of[parameter]
                if block not in used:
                    name = self._step.name(parameter)
                    text = (
                        f"op {number} ({self._step.ops[number].name}) reads parameter {name}, and the action does not "
                        f"use block {block}, which is not resident"
                    )
                    raise fault(self._program, index, name, text)
            for use in action.uses:
                self._check_use(index, use)

    def _stays(self, parameter: int) -> bool:
        return self._placements[self._step.block_of[parameter]].resident

    def _note_fetch(self, index: int) -> None:
        """Notes a fetch into a slot that holds the block. From disk: the read that it copies from, which no other
        fetch copies from, since its buffer is given on."""
        action, slots = self._program.actions[index], self._program.slots
        if action.block not in self._blocks:
            raise fault(self._program, index, action.block, f"the model has no block {action.block}")
        if self._placements[action.block].resident:
            raise fault(
                self._program, index, action.block, f"block {action.block} is resident and has no home to fetch"
            )
        if not 0 <= action.slot < len(slots):
            raise fault(self._program, index, action.block, f"there is no slot {action.slot}")
        needed = self._blocks[action.block].nbytes
        if slots[action.slot] < needed:
            text = f"block {action.block} has {needed} bytes and slot {action.slot} holds {slots[action.slot]}"
            raise fault(self._program, index, action.block, text)
        content = sum(p.nbytes for p in self._blocks[action.block].parameters)
        if action.nbytes < content:
            text = f"it moves {action.nbytes} bytes and the parameters of block {action.block} have {content}"
            raise fault(self._program, index, action.block, text)
        self._fetches[action.slot].append(index)
        if self._on_disk(action.block):
            # The latest that is done and that no fetch has copied from.
            waiting = self._reads[action.block]
            source = next((r for r in reversed(waiting) if self._order.before(r, index)), None)
            if source is None:
                text = f"block {action.block} lives on disk and is not read from there before this fetch"
                raise fault(self._program, index, action.block, text)
            waiting.remove(source)
            self._source[index] = source

    def _check_use(self, index: int, use: Use) -> None:
        fetches = self._fetches.get(use.slot, [])
        actions, order = self._program.actions, self._order
        # All on one lane, in order: whoever comes after one of them comes after those before it.
        last = bisect_left(fetches, True, key=lambda fetch: not order.before(fetch, index)) - 1
        holds = actions[fetches[last]].block if last >= 0 else "nothing"
        if holds != use.block:
            text = f"it reads block {use.block} from slot {use.slot}, which holds {holds} by then"
            raise fault(self._program, index, use.block, text)
        following = fetches[last + 1] if last + 1 < len(fetches) else None
        if following is not None and not order.before(index, following):
            raise fault(
                self._program,
                index,
                use.block,
                f"it reads block {use.block} from slot {use.slot}, and action {following} ({actions[following].what}) "
                f"may overwrite that before the end",
            )
        self._check_fresh(index, use.block, fetches[last])

    def _check_fresh(self, index: int, block: str, fetch: int) -> None:
        """What the fetch copies must have seen the updates of its last turn (and so those of all before that), and
        none of this step, unless they write the other copy. What later steps update has landed after this use."""
        order, changes = self._order, self._changes[block]
        two, source = block in self._two_copies, self._source.get(fetch, fetch)
        now = self._program.actions[index].step - self._late
        before = self._turns.previous(block, now)
        if before in changes:
            _, last = changes[before]
            if not order.before(last, source):
                raise self._stale(index, block, source, f"without {self._words(last)}")
            if two and source < self._ends[now - 1]:
                text = f"out of the copy that step {now - 1} began with, and not that of {self._words(last)}"
                raise self._stale(index, block, source, text)
        if now in changes:
            first, last = changes[now]
            ahead = two and last < self._ends[now]
            if not ahead and not order.before(source, first):
                raise self._stale(index, block, source, f"and {self._words(first)} may change that meanwhile")

    def _words(self, change: int) -> str:
        action = self._program.actions[change]
        return f"action {change} ({action.what}, step {action.step})"

    def _stale(self, index: int, block: str, source: int, text: str) -> Exception:
        return fault(self._program, index, block, f"it reads block {block} as action {source} copied it, {text}")
