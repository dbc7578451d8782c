"""Whether the device has room at every instant, in whatever order the lanes come to it. No torch.

Two accounts are kept for every compute action: what the trace needs, worked out here, and what the program says of
itself (``Program.standing``, ``Action.peak``, ``Action.changes``), which the simulator plays. In both, what leaves the
device counts until the action that takes it away is done for certain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from forebay.checking.computing import Made, Moment, Passes, largest
from forebay.checking.live import Live
from forebay.checking.order import Order
from forebay.checking.step import Step
from forebay.checking.words import fault
from forebay.errors import DoesNotFit
from forebay.layout import STATE_ITEMSIZE, StateLayout, needs_master
from forebay.memory import Tier
from forebay.program import Program, Verb
from forebay.timeline import Lane
from forebay.units import format_apart, format_bytes

__all__ = ["check_account", "check_device"]


def check_device(
    step: Step,
    live: Live,
    program: Program,
    order: Order,
    passes: Passes,
    landed: Mapping[tuple[int, int], int],
    layouts: Mapping[str, StateLayout],
    standing: int,
    allowed: int,
    promised: int,
) -> None:
    """Raises ``DoesNotFit`` at the compute action that may need more than ``allowed`` bytes, naming op and tensor;
    ``PlanInvalid`` where the program says that it needs less than it does, or the plan that it takes at most
    ``promised`` bytes."""
    claims = _Claims(program, order)
    moments = sorted((*passes.moments, *_updates(step, live, program, layouts)), key=lambda m: m.action)
    needs = _needs(order, passes, landed, moments)
    for moment, under_way in needs:
        needed = standing + under_way + moment.nbytes
        claimed = claims.at(moment.action)
        if claimed < needed:
            text = f"it says that the device holds {claimed} bytes while it runs, and {needed} may be there"
            raise fault(program, moment.action, program.actions[moment.action].what, text)
    worst = max(needs, key=lambda need: need[1] + need[0].nbytes, default=None)
    if worst is not None:
        moment, under_way = worst
        needed = standing + under_way + moment.nbytes
        if needed > allowed:
            tensor = largest(step, live, program, moment) if moment.op >= 0 else None
            raise _no_room(step, program, moment, tensor, needed, under_way, standing, allowed)
        if needed > promised:
            text = f"the plan predicts a device peak of {promised} bytes and {needed} may be there; make the plan again"
            raise fault(program, moment.action, program.actions[moment.action].what, text)
    most = claims.peak
    if most > allowed:
        much, little = format_apart(most, allowed)
        raise DoesNotFit(
            f"device memory: the program says it may hold {much} at action {claims.at_peak} "
            f"({program.actions[claims.at_peak].what}) and {little} are allowed; raise device_memory, or make a plan "
            f"that needs less",
            tier=Tier.DEVICE.value,
            needed=most,
            allowed=allowed,
        )


def check_account(program: Program, standing: Mapping[Tier, int]) -> None:
    """Raises ``PlanInvalid`` where the program's standing bytes of a tier are fewer than what the plan places there."""
    for tier, needed in standing.items():
        said = sum(program.standing.get(tier, {}).values())
        if tier is not Tier.PINNED and said < needed:
            text = f"the program says that {said} bytes stand in {tier.value} memory; the plan places {needed} there"
            raise fault(program, -1, tier.value, text)


def _needs(
    order: Order, passes: Passes, landed: Mapping[tuple[int, int], int], moments: Sequence[Moment]
) -> list[tuple[Moment, int]]:
    """Every moment of compute with the bytes of gradients that may not have landed when it begins."""
    needs: list[tuple[Moment, int]] = []
    under_way: list[Made] = []
    done = 0
    for moment in moments:
        while done < len(passes.made) and passes.made[done].action < moment.action:
            under_way.append(passes.made[done])
            done += 1
        under_way = [g for g in under_way if not order.before(landed[g.parameter, g.number], moment.action)]
        needs.append((moment, sum(g.nbytes for g in under_way)))
    return needs


def _updates(step: Step, live: Live, program: Program, layouts: Mapping[str, StateLayout]) -> list[Moment]:
    """Updates on the device, with the gradients that the step has kept there: those of 16 bits are widened, one chunk
    at a time."""
    moments = []
    for index, action in enumerate(program.actions):
        if action.verb is Verb.UPDATE and action.lane is Lane.COMPUTE:
            sizes = [
                sum((p.stop - p.start) * STATE_ITEMSIZE for p in c.pieces if needs_master(p.parameter))
                for c in layouts[action.block].chunks
                if any(step.ids[p.parameter.name] in step.with_gradient for p in c.pieces)
            ]
            moments.append(Moment(index, live.kept + max(sizes, default=0), -1))
    return moments


class _Claims:
    """What the program says of the device: the most that may be there while each compute action runs."""

    def __init__(self, program: Program, order: Order) -> None:
        self._claimed: dict[int, int] = {}
        self.peak = self.at_peak = -1
        steady = sum(program.standing.get(Tier.DEVICE, {}).values())
        freeing: list[tuple[int, int]] = []
        for index, action in enumerate(program.actions):
            change = sum(c.nbytes for c in action.changes)
            if action.lane is Lane.COMPUTE:
                done = [f for f in freeing if order.before(f[0], index)]
                steady += sum(nbytes for _, nbytes in done)
                freeing = [f for f in freeing if not order.before(f[0], index)]
                self._claimed[index] = steady + max(action.peak, 0)
                if self._claimed[index] > self.peak:
                    self.peak, self.at_peak = self._claimed[index], index
                steady += change
            elif change > 0:
                raise fault(program, index, action.what, "only compute makes bytes on the device")
            elif change < 0:
                freeing.append((index, change))

    def at(self, action: int) -> int:
        return self._claimed[action]


def _no_room(
    step: Step,
    program: Program,
    moment: Moment,
    tensor: int | None,
    needed: int,
    under_way: int,
    standing: int,
    allowed: int,
) -> DoesNotFit:
    much, little = format_apart(needed, allowed)
    what = program.actions[moment.action].what
    parts = [f"{format_bytes(standing)} stand", f"{format_bytes(under_way)} of gradients may be under way"]
    if moment.op >= 0:
        block = f" of block {step.block(moment.op)}" if step.block(moment.op) else ""
        where = f"op {moment.op} ({step.ops[moment.op].name}{block}) in action {moment.action} ({what})"
        parts.append(f"{format_bytes(moment.nbytes)} are tensors of the step")
    else:
        where = f"action {moment.action} ({what})"
        parts.append(f"{format_bytes(moment.nbytes)} are gradients that stay, and those widened to 32 bits")
    biggest = f"; the largest tensor is {step.name(tensor)}" if tensor is not None else ""
    return DoesNotFit(
        f"device memory: {where} needs {much} and {little} are allowed: {', '.join(parts)}{biggest}; raise "
        f"device_memory, recompute more blocks, or use a smaller batch or a shorter sequence",
        tier=Tier.DEVICE.value,
        needed=needed,
        allowed=allowed,
    )
