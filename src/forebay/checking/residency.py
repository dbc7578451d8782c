"""Whether compute finds every parameter on the device, with the values of the step. No torch."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping
from typing import final

from forebay.checking.order import Order
from forebay.checking.step import Step
from forebay.checking.words import fault
from forebay.memory import Tier
from forebay.plans import Placement
from forebay.program import Program, Use, Verb

__all__ = ["Residency"]


@final
class Residency:
    """Every fetch and every use of a slot.

    A fetch is *fresh* for step k if what it copies has seen the updates of all steps before k and none of k: an update
    in the wrong order, or at the same time, would hand compute old values or half-written ones.
    """

    def __init__(self, step: Step, program: Program, order: Order, placements: Mapping[str, Placement]) -> None:
        self._step = step
        self._program = program
        self._order = order
        self._placements = placements
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
            changes_home = Verb.WRITE if self._on_disk(action.block) else Verb.UPDATE
            if action.verb is changes_home and (action.chunk < 0 or changes_home is Verb.UPDATE):
                # All of a step run on one lane: the first and the last stand for those between.
                first, _ = self._changes[action.block].get(action.step, (index, index))
                self._changes[action.block][action.step] = first, index

    def _on_disk(self, block: str) -> bool:
        return block in self._placements and self._placements[block].parameters is Tier.DISK

    @property
    def sources(self) -> Mapping[int, int]:
        """Of every fetch of a block on disk, the read that it copies from."""
        return self._source

    def check(self) -> None:
        """Raises ``PlanInvalid`` at the first use of a slot that does not hold what is read from it."""
        for index, action in enumerate(self._program.actions):
            if action.verb is not Verb.COMPUTE:
                continue
            used = {use.block for use in action.uses}
            for number in range(*action.ops):
                for parameter in self._step.ops[number].parameters:
                    block = self._step.block_of[parameter]
                    if block not in used and not self._placements[block].resident:
                        name = self._step.name(parameter)
                        raise fault(
                            self._program,
                            index,
                            name,
                            f"op {number} ({self._step.ops[number].name}) reads parameter {name}, and the action does "
                            f"not use block {block}, which is not resident",
                        )
            for use in action.uses:
                self._check_use(index, use)

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
        """What the fetch copies must have seen the updates of the steps before, and none of this step or later."""
        actions, order = self._program.actions, self._order
        source = self._source.get(fetch, fetch)
        now = actions[index].step
        for step, (first, last) in self._changes[block].items():
            if step < now and not order.before(last, source):
                text = f"without action {last} ({actions[last].what}, step {step})"
            elif step >= now and not order.before(source, first):
                text = f"and action {first} ({actions[first].what}, step {step}) may change that meanwhile"
            else:
                continue
            raise fault(self._program, index, block, f"it reads block {block} as action {source} copied it, {text}")
