"""Whether gradients that are used up in backward are left alone in the slots that they share, until their updates have
read them. No torch."""

from __future__ import annotations

from collections import defaultdict

from forebay.checking.order import Order
from forebay.checking.words import fault
from forebay.errors import PlanInvalid
from forebay.memory import ALIGNMENT
from forebay.model import Block, Model
from forebay.plans import Plan, Update, used_up
from forebay.program import Program, Verb

__all__ = ["check_gradient_slots"]

Occupant = tuple[str, int]
"""Block, step."""


def check_gradient_slots(model: Model, plan: Plan, program: Program, order: Order) -> None:
    """Raises ``PlanInvalid`` for a gradient of a block that is updated in backward which lands in no slot, in one that
    is too small, or in one where an update may still read another block's; and for steps of several passes, whose later
    gradients would have nothing to be added to."""
    early = plan.updated(Update.BACKWARD)
    if not early:
        return
    if program.micro_batches > 1:
        raise PlanInvalid(
            f"the plan uses up the gradients of block {early[0]} in backward and the program has "
            f"{program.micro_batches} passes a step; take one, or set the update of its blocks to step",
            action=-1,
            subject=early[0],
        )
    passing = frozenset(used_up(plan.placements, resident=False))
    blocks, slots = {b.name: b for b in model.blocks}, plan.streaming.gradient_slots
    readers: dict[Occupant, list[int]] = defaultdict(list)
    for index, action in enumerate(program.actions):
        if action.verb is Verb.UPDATE and action.block in passing:
            readers[action.block, action.step].append(index)
    occupants: dict[int, Occupant] = {}
    taken: dict[Occupant, int] = {}
    for index, action in enumerate(program.actions):
        if action.verb is not Verb.LAND or action.block not in passing:
            continue
        name, occupant = action.parameter, (action.block, action.step)
        if not 0 <= action.slot < len(slots):
            raise fault(program, index, name, f"the gradient of {name} lands in slot {action.slot}, which is not there")
        needed = _nbytes(blocks[action.block])
        if slots[action.slot] < needed:
            text = f"the gradients of block {action.block} take {needed} bytes and slot {action.slot} for gradients has"
            raise fault(program, index, name, f"{text} {slots[action.slot]}; make one of gradient_slots larger")
        if taken.setdefault(occupant, action.slot) != action.slot:
            text = f"gradients of block {action.block} land in slots {taken[occupant]} and {action.slot} in one step"
            raise fault(program, index, name, text)
        before = occupants.get(action.slot)
        occupants[action.slot] = occupant
        if before is None or before == occupant:
            continue
        late = next((reader for reader in readers[before] if not order.before(reader, index)), None)
        if late is not None:
            text = f"the gradient of {name} lands in slot {action.slot}, where action {late} may still read that of"
            raise fault(program, index, name, f"{text} block {before[0]}")


def _nbytes(block: Block) -> int:
    """Bytes of the landed gradients of a block: worked out here, on purpose not by ``forebay.arenas``."""
    return sum(-(-p.nbytes // ALIGNMENT) * ALIGNMENT for p in block.parameters if p.trainable)
