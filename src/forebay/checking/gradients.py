"""Whether every gradient gets to where it is added up, once in every pass. No torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from forebay.checking.computing import Made, Passes
from forebay.checking.order import Order
from forebay.checking.rounds import Turns
from forebay.checking.step import Step
from forebay.checking.words import fault
from forebay.plans import Placement
from forebay.program import Program, Verb

__all__ = ["landings"]


def landings(
    step: Step, program: Program, order: Order, placements: Mapping[str, Placement], passes: Passes, turns: Turns
) -> dict[tuple[int, int], int]:
    """For every gradient that leaves, (parameter, pass): the action by whose end it has landed.

    Raises ``PlanInvalid`` for one that lands never or twice, before it is complete, in the wrong way (the first
    micro-batch replaces what an update has used up, the others add), or over one that the update of the step before may
    not have read yet.
    """
    ids = step.ids
    moves: dict[int, list[int]] = defaultdict(list)
    for index, action in enumerate(program.actions):
        if action.verb in (Verb.LAND, Verb.ACCUMULATE):
            parameter = ids.get(action.parameter, -1)
            if parameter not in step.with_gradient or placements[step.block_of[parameter]].resident:
                text = f"{action.parameter or 'no parameter'} has no gradient that leaves the device"
                raise fault(program, index, action.parameter, text)
            moves[parameter].append(index)
    made: dict[int, list[Made]] = defaultdict(list)
    for gradient in passes.made:
        made[gradient.parameter].append(gradient)
    landed: dict[tuple[int, int], int] = {}
    for parameter, gradients in made.items():
        starts = [g.action for g in gradients]
        own = moves.get(parameter, [])
        early = [index for index in own if index < starts[0]]
        if early:
            raise _not_complete(step, program, early[0], parameter)
        for place, gradient in enumerate(gradients):
            until = starts[place + 1] if place + 1 < len(starts) else len(program.actions)
            group = [index for index in own if gradient.action <= index < until]
            _check_group(step, program, order, gradient, group, turns)
            landed[parameter, gradient.number] = group[-1]
    return landed


def _check_group(
    step: Step, program: Program, order: Order, gradient: Made, group: Sequence[int], turns: Turns
) -> None:
    """The actions that land one gradient: together they move its bytes once."""
    actions, name = program.actions, step.name(gradient.parameter)
    number, begins = divmod(gradient.number, program.micro_batches)
    first = begins == 0 and turns.replaces(step.block_of[gradient.parameter], number)
    verb = Verb.LAND if first else Verb.ACCUMULATE
    size = step.nbytes[gradient.parameter]
    if not group:
        text = f"the gradient of {name} is complete after it in pass {gradient.number} and never lands on the host"
        raise fault(program, gradient.action, name, text)
    for index in group:
        if actions[index].verb is not verb:
            how = "replaces what was there" if first else "is added to what has landed before"
            text = f"the gradient of {name} in pass {gradient.number} {how}: expected {verb.value}"
            raise fault(program, index, name, text)
        if actions[index].step != gradient.number // program.micro_batches:
            text = f"the gradient of {name} in pass {gradient.number} is not one of step {actions[index].step}"
            raise fault(program, index, name, text)
        if not order.before(gradient.action, index):
            raise _not_complete(step, program, index, gradient.parameter)
    moved = sum(actions[index].nbytes for index in group)
    if moved != size:
        text = f"{moved} bytes of the gradient of {name} land in pass {gradient.number}, and it has {size}"
        raise fault(program, group[-1], name, text)
    freed = -sum(c.nbytes for index in group for c in actions[index].changes)
    if freed > gradient.nbytes:
        text = f"it frees {freed} bytes with the gradient of {name}, which takes {gradient.nbytes}"
        raise fault(program, group[-1], name, text)
    for index in group[:-1]:
        if actions[index].changes:
            raise fault(program, index, name, f"the gradient of {name} is freed before all of it has landed")


def _not_complete(step: Step, program: Program, index: int, parameter: int) -> Exception:
    name = step.name(parameter)
    return fault(program, index, name, f"the gradient of {name} may not be complete when it starts")
