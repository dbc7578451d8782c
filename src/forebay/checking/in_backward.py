"""Whether blocks that stay on the device and are updated in backward have all of their gradients by then, and are left
alone by what backward has still to run. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

from forebay.checking.cells import widened
from forebay.checking.live import Live
from forebay.checking.step import Step
from forebay.checking.words import fault
from forebay.errors import PlanInvalid
from forebay.layout import StateLayout
from forebay.plans import Plan, used_up
from forebay.program import Action, Program, Verb
from forebay.timeline import Lane

__all__ = ["InBackward"]


@final
class InBackward:
    """Their updates, one pass after the other. ``blocks`` are their names."""

    def __init__(self, step: Step, plan: Plan, program: Program, layouts: Mapping[str, StateLayout]) -> None:
        self.blocks = frozenset(used_up(plan.placements, resident=True))
        self._step = step
        self._program = program
        self._trained: dict[str, list[int]] = {name: [] for name in self.blocks}
        for parameter in step.with_gradient:
            if step.block_of[parameter] in self.blocks:
                self._trained[step.block_of[parameter]].append(parameter)
        self._last_read: dict[str, int] = {}
        for number, op in enumerate(step.ops) if self.blocks else ():
            self._last_read.update((step.block_of[p], number) for p in op.parameters)
        self._widened = {
            name: max((widened(c, layouts[name], exactly=True) for c in layouts[name].chunks), default=0)
            for name in self.blocks
        }
        # Those that were updated in this pass.
        self._done: set[str] = set()
        self._expect_own_roots()

    def _expect_own_roots(self) -> None:
        """Raises ``PlanInvalid`` for gradients that are views of memory in which another block's lie, too: nobody can
        let go of the one and keep the other."""
        blocks: dict[int, str] = {}
        for op in self._step.ops if self.blocks else ():
            for parameter, root in op.gradients:
                block = self._step.block_of[parameter]
                other = blocks.setdefault(root, block)
                if other != block and root >= self._step.sources and not self.blocks.isdisjoint((block, other)):
                    name = self._step.name(parameter)
                    raise PlanInvalid(
                        f"the plan uses up the gradients of block {other} in backward, and that of {name} lies in the "
                        f"same memory; set the update of both blocks to step",
                        action=-1,
                        subject=name,
                    )

    def begin(self) -> None:
        """A pass begins."""
        self._done.clear()

    def is_update(self, action: Action) -> bool:
        """Whether ``action`` is one of these updates."""
        return action.verb is Verb.UPDATE and action.lane is Lane.COMPUTE and action.block in self.blocks

    def update(self, index: int, live: Live, next_op: int) -> int:
        """Action ``index`` updates a block before op ``next_op`` runs. Returns the bytes of the step and of gradients
        that are on the device meanwhile. Raises ``PlanInvalid`` for an update that comes too soon."""
        name, step = self._program.actions[index].block, self._step
        last = self._last_read.get(name, -1)
        if last >= next_op:
            text = f"block {name} is updated in backward before op {last} ({step.op_name(last)}), which reads it"
            raise fault(self._program, index, name, text)
        held = live.nbytes + live.kept
        for parameter in self._trained[name]:
            if not live.use_up(parameter):
                text = f"block {name} is updated in backward, and the gradient of {step.name(parameter)} is not there"
                raise fault(self._program, index, step.name(parameter), text)
        self._done.add(name)
        return held + self._widened[name]

    def run_again(self, index: int, start: int, stop: int) -> None:
        """Ops run again in backward. Raises ``PlanInvalid`` for one that reads a block which has been updated."""
        for number in range(start, stop) if self._done else ():
            for parameter in self._step.ops[number].parameters:
                if self._step.block_of[parameter] in self._done:
                    name = self._step.block_of[parameter]
                    text = f"op {number} ({self._step.op_name(number)}) runs again and reads block {name}, which is"
                    raise fault(self._program, index, name, f"{text} updated by then")
