"""Whether the device has room at every instant, in whatever order the lanes come to it. No torch.

Two accounts are kept for every compute action: what the trace needs, worked out here, and what the program says of
itself (``Program.standing``, ``Action.peak``, ``Action.changes``), which the simulator plays. In both, what leaves the
device counts until the action that takes it away is done for certain, and what comes back counts from the moment that
its action may start (``transit``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from forebay.checking.cells import widened
from forebay.checking.computing import Moment, Passes
from forebay.checking.live import Live
from forebay.checking.order import Order
from forebay.checking.step import Step
from forebay.checking.transit import Coming, Leaving
from forebay.checking.words import fault
from forebay.errors import DoesNotFit
from forebay.layout import StateLayout
from forebay.memory import Tier
from forebay.program import Action, Program, Verb
from forebay.timeline import Lane
from forebay.units import format_apart, format_bytes

__all__ = ["check_account", "check_device"]


@dataclass(frozen=True, slots=True)
class _Need:
    """What compute may need at ``moment`` beside what stands: ``nbytes`` of the step, ``in_transit`` beside them.
    ``waiting``: before the action starts."""

    moment: Moment
    nbytes: int
    in_transit: int
    waiting: bool

    @property
    def total(self) -> int:
        return self.nbytes + self.in_transit


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
    largest: Callable[[Moment], int | None],
) -> None:
    """Raises ``DoesNotFit`` at the compute action that may need more than ``allowed`` bytes, naming op and tensor;
    ``PlanInvalid`` where the program says that it needs less than it does, or the plan that it takes at most
    ``promised`` bytes. ``largest`` finds the largest tensor at a moment."""
    claims = _Claims(program, order, passes.around)
    moments = sorted((*passes.moments, *_updates(step, live, program, layouts, passes)), key=lambda m: m.action)
    needs = _needs(order, passes, landed, moments)
    for need in needs:
        action, needed = need.moment.action, standing + need.total
        claimed = needed if need.waiting else claims.at(action)
        if claimed < needed:
            text = f"it says that the device holds {claimed} bytes while it runs, and {needed} may be there"
            raise fault(program, action, program.actions[action].what, text)
    worst = max(needs, key=lambda need: need.total, default=None)
    if worst is not None:
        action, needed = worst.moment.action, standing + worst.total
        if needed > allowed:
            tensor = largest(worst.moment) if worst.moment.op >= 0 else None
            raise _no_room(step, program, worst, tensor, standing, allowed)
        if needed > promised:
            text = f"the plan predicts a device peak of {promised} bytes and {needed} may be there; make the plan again"
            raise fault(program, action, program.actions[action].what, text)
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


def _needs(order: Order, passes: Passes, landed: Mapping[tuple[int, int], int], moments: list[Moment]) -> list[_Need]:
    """Every moment, and every wait for one, with the bytes that may be on their way in either direction."""
    going = [(g.action, landed[g.parameter, g.number], g.nbytes) for g in passes.made]
    going += [(one.action, passes.offloads[one.root, one.number], one.nbytes) for one in passes.left]
    going.sort(key=lambda entry: entry[0])
    leaving, coming = Leaving(order), Coming(order, passes.reloads)
    needs: list[_Need] = []
    done = 0
    for moment in moments:
        while done < len(going) and going[done][0] < moment.action:
            leaving.add(*going[done][1:])
            done += 1
        between, during = coming.at(moment.action, moment.then)
        if between:
            needs.append(_Need(moment, moment.before, leaving.most(between), True))
        if moment.then < 0:  # compute: what is away when it starts is so for whoever comes after it
            leaving.let_go(moment.action)
            in_transit = leaving.most(during)
        else:
            in_transit = leaving.most(during, moment.action)
        needs.append(_Need(moment, moment.nbytes, in_transit, False))
    return needs


def _updates(
    step: Step, live: Live, program: Program, layouts: Mapping[str, StateLayout], passes: Passes
) -> list[Moment]:
    """Updates on the device whose step has been asked for, with the gradients that the step has kept there: those of 16
    bits are widened, one chunk at a time. Of those in backward the ``passes`` know."""
    known = {moment.action for moment in passes.moments}
    moments = []
    for index, action in enumerate(program.actions):
        if action.verb is Verb.UPDATE and action.lane is Lane.COMPUTE and index not in known:
            sizes = [
                widened(c, layouts[action.block], exactly=True)
                for c in layouts[action.block].chunks
                if any(step.ids[p.parameter.name] in step.with_gradient for p in c.pieces)
            ]
            moments.append(Moment(index, live.kept + max(sizes, default=0), -1, live.kept))
    return moments


class _Claims:
    """What the program says of the device: the most that may be there while each action runs (``at``), and at any time
    (``peak``). A reload takes its ``peak`` while it goes on, and leaves what it makes; what it says went before is gone
    when it starts, if that is after the compute before it, and else when compute goes on. An offload frees nothing
    before the ops that hold its tensor (``Action.ops``) have run, nor while what they make is encoded."""

    def __init__(self, program: Program, order: Order, around: Sequence[tuple[int, int]]) -> None:
        self._claimed: dict[int, int] = {}
        self.peak = self.at_peak = -1
        self._steady = sum(program.standing.get(Tier.DEVICE, {}).values())
        self._order = order
        self._leaving = Leaving(order)
        # A heap: op by which compute has let go of what a copy to the host frees, the copy, the bytes. And the number
        # of ops that have run in the pass.
        self._held: list[tuple[int, int, int]] = []
        self._reached = 0
        reloads = [(i, a) for i, a in enumerate(program.actions) if a.verb is Verb.RELOAD]
        self._coming = Coming(order, [(i, max(a.peak, _made(a))) for i, a in reloads])
        self._arriving = deque((i, _made(a)) for i, a in reloads)
        for index, action in enumerate(program.actions):
            change = _change(action)
            if action.lane is Lane.COMPUTE:
                self._compute(index, action)
                self._steady += change
            elif action.verb is Verb.RELOAD:
                self._reload(index, action, *around[index])
            elif change > 0:
                raise fault(program, index, action.what, "only compute and reloads make bytes on the device")
            elif change and action.lane is not Lane.D2H:
                raise fault(program, index, action.what, "only compute and copies to the host free bytes on the device")
            elif change:
                heappush(self._held, (action.ops[1], index, -change))

    def _compute(self, index: int, action: Action) -> None:
        if action.verb is not Verb.ENCODE:
            self._let_go()
        between, during = self._coming.at(index)
        if between:
            self._note(index, self._steady_with(between))
        self._steady -= self._leaving.let_go(index)
        self._arrive(index)
        self._claimed[index] = self._steady_with(during) + max(action.peak, 0)
        self._note(index, self._claimed[index])
        if action.verb is Verb.COMPUTE and not action.recomputed:
            self._reached = action.ops[1]

    def _reload(self, index: int, action: Action, latest: int, then: int) -> None:
        gone = _change(action) - _made(action)
        if latest < 0 or then < 0 or not self._order.before(latest, index):
            self._steady += gone
            return
        self._let_go()
        between, during = self._coming.at(index, then)
        if between:
            self._note(index, self._steady_with(between))
        self._arrive(index, then)
        self._steady += gone
        # What is away when it starts need not be when the compute that comes next does.
        self._claimed[index] = self._steady_with(during, index)
        self._note(index, self._claimed[index])

    def _arrive(self, *actions: int) -> None:
        """What is back for certain when each of ``actions`` starts; what that had waited for is away by then."""
        while self._arriving and all([self._order.before(self._arriving[0][0], index) for index in actions]):
            reload, nbytes = self._arriving.popleft()
            self._steady += nbytes - self._leaving.let_go(reload)

    def _let_go(self) -> None:
        while self._held and self._held[0][0] <= self._reached:
            _, index, nbytes = heappop(self._held)
            self._leaving.add(index, nbytes)

    def _steady_with(self, coming: Sequence[tuple[int, int]], at: int = -1) -> int:
        """The most at once of what stands, what may not have left yet and what may be there again: now, or when action
        ``at`` starts."""
        if not coming and at < 0:
            return self._steady
        return self._steady - self._leaving.nbytes + self._leaving.most(coming, at)

    def _note(self, index: int, nbytes: int) -> None:
        if nbytes > self.peak:
            self.peak, self.at_peak = nbytes, index

    def at(self, action: int) -> int:
        return self._claimed[action]


def _made(action: Action) -> int:
    return sum(max(change.nbytes, 0) for change in action.changes)


def _change(action: Action) -> int:
    return sum([change.nbytes for change in action.changes]) if action.changes else 0


def _no_room(step: Step, program: Program, need: _Need, tensor: int | None, standing: int, allowed: int) -> DoesNotFit:
    moment, needed = need.moment, standing + need.total
    much, little = format_apart(needed, allowed)
    what = program.actions[moment.action].what
    moves = "gradients and activations" if any(a.tensor >= 0 for a in program.actions) else "gradients"
    parts = [f"{format_bytes(standing)} stand", f"{format_bytes(need.in_transit)} of {moves} may be under way"]
    if moment.op >= 0:
        block = f" of block {step.block(moment.op)}" if step.block(moment.op) else ""
        where = f"op {moment.op} ({step.ops[moment.op].name}{block}) in action {moment.action} ({what})"
        parts.append(f"{format_bytes(need.nbytes)} are tensors of the step")
    else:
        where = f"action {moment.action} ({what})"
        parts.append(f"{format_bytes(need.nbytes)} are gradients that stay, and those widened to 32 bits")
    biggest = f"; the largest tensor is {step.name(tensor)}" if tensor is not None else ""
    return DoesNotFit(
        f"device memory: {where} needs {much} and {little} are allowed: {', '.join(parts)}{biggest}; raise "
        f"device_memory, recompute more blocks, or use a smaller batch or a shorter sequence",
        tier=Tier.DEVICE.value,
        needed=needed,
        allowed=allowed,
    )
