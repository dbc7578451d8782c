"""Whether blocks that are updated in turns have one turn in every round of steps. No torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import final

from forebay.checking.words import fault
from forebay.plans import Plan
from forebay.program import Program, Verb

__all__ = ["Turns"]


@final
class Turns:
    """The steps in which blocks that are not resident are updated: all, or as the plan has it one in every so many
    (``Streaming.update_every``). Raises ``PlanInvalid`` for a block whose updates are not so many steps apart."""

    def __init__(self, plan: Plan, program: Program) -> None:
        self._steps: dict[str, frozenset[int]] = {}
        every = plan.streaming.update_every
        if every == 1:
            return
        updates = _updates(plan, program)
        for placed in plan.placements:
            if not placed.resident:
                _expect_apart(program, placed.block, updates.get(placed.block, {}), every)
                self._steps[placed.block] = frozenset(updates.get(placed.block, {}))

    def has_turn(self, block: str, step: int) -> bool:
        """Whether ``block`` is updated in ``step``."""
        return block not in self._steps or step in self._steps[block]

    def previous(self, block: str, step: int) -> int:
        """The last step before ``step`` that updates ``block``; below 0 if there is none."""
        if block not in self._steps:
            return step - 1
        return max((before for before in self._steps[block] if before < step), default=-1)

    def replaces(self, block: str, step: int) -> bool:
        """Whether the first gradient of ``step`` lands in the place of what is there: the step before has used that
        up."""
        return step == 0 or self.has_turn(block, step - 1)


def _updates(plan: Plan, program: Program) -> Mapping[str, Mapping[int, int]]:
    """By block and step, the first action that updates it."""
    found: dict[str, dict[int, int]] = defaultdict(dict)
    for index, action in enumerate(program.actions):
        if action.verb is Verb.UPDATE:
            found[action.block].setdefault(action.step, index)
    return found


def _expect_apart(program: Program, block: str, updates: Mapping[int, int], every: int) -> None:
    steps: Sequence[int] = sorted(updates)
    if not steps:
        return  # nothing in it is trained, which others see to
    expected = [*range(steps[0], program.steps, every)]
    if steps[0] >= every or steps != expected:
        odd = next((step for step in steps if step not in expected), steps[0])
        text = (
            f"block {block} is updated in steps {', '.join(map(str, steps))}, and the plan has it once in every {every}"
        )
        raise fault(program, updates[odd], block, text)
