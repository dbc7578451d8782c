"""Whether bytes on their way to disk, or from there, are left alone in the ring on the host until they are there. No
torch."""

from __future__ import annotations

from forebay.checking.order import Order
from forebay.checking.step import Step
from forebay.checking.treated import Treated
from forebay.checking.words import fault
from forebay.layout import PAGE
from forebay.program import Program, Verb
from forebay.treatments import Fate

__all__ = ["check_ring"]


def check_ring(step: Step, treated: Treated, program: Program, order: Order, window: int) -> None:
    """Raises ``PlanInvalid`` where an action writes to bytes of the ring (``window`` of them) that another may still
    write or read, or that the ring does not have."""
    # Who has had which bytes last: first byte, end, the tensor, the last action that uses them there.
    taken: list[tuple[int, int, int, int]] = []
    last = _last_uses(program, treated)
    for index, action in enumerate(program.actions):
        if index not in last:
            continue
        name = step.name(action.tensor) if action.tensor in treated.ways else f"tensor {action.tensor}"
        if action.tensor not in treated.ways or treated.ways[action.tensor].fate is not Fate.DISK:
            raise fault(program, index, name, f"the plan does not move {name} to disk")
        start, end = action.ring, action.ring + -(-treated.ways[action.tensor].moved // PAGE) * PAGE
        if not 0 <= start < end <= window:
            text = f"it puts {name} at bytes {start} to {end} of the ring, which has {window}; raise disk_window"
            raise fault(program, index, name, text)
        left: list[tuple[int, int, int, int]] = []
        for first, until, tensor, use in taken:
            if until <= start or end <= first:
                left.append((first, until, tensor, use))
                continue
            if not order.before(use, index):
                text = (
                    f"it puts {name} at bytes {start} to {end} of the ring, where action {use} "
                    f"({program.actions[use].what}) may still need {step.name(tensor)}"
                )
                raise fault(program, index, step.name(tensor), text)
            left += [(a, b, tensor, use) for a, b in ((first, start), (end, until)) if a < b]
        taken = [*left, (start, end, action.tensor, last[index])]


def _last_uses(program: Program, treated: Treated) -> dict[int, int]:
    """Of every action that fills bytes of the ring the last that uses what it puts there: the write to disk, or the
    copy to the device; itself, if what it reads is read again or by nobody."""
    last: dict[int, int] = {}
    filled: dict[tuple[Verb, int], int] = {}
    for index, action in enumerate(program.actions):
        if action.tensor < 0:
            continue
        way = treated.ways.get(action.tensor)
        to_disk = action.ring >= 0 or (way is not None and way.fate is Fate.DISK)
        if action.verb is Verb.READ or (action.verb is Verb.OFFLOAD and to_disk):
            filled[action.verb, action.tensor] = last[index] = index
        user = {Verb.WRITE: Verb.OFFLOAD, Verb.RELOAD: Verb.READ}.get(action.verb)
        if user is not None:
            by = filled.pop((user, action.tensor), None)
            if by is not None:
                last[by] = index
    return last
