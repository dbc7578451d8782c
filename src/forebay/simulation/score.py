"""What a clock reads of a program: of every action its lane, its seconds, its bytes/s, what it waits for. No torch.

It is made once for all that is asked of one program: how long a step takes, and how long it would take if some of its
actions took more time, or none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from forebay.machine import Machine
from forebay.program import Action, Outline, Program, Sketch, Verb
from forebay.simulation.costs import Costs, is_copy_beside
from forebay.simulation.sharing import LANES, Sharing
from forebay.timeline import Lane

__all__ = ["Score"]

PLACE = {lane: place for place, lane in enumerate(LANES)}


@dataclass(frozen=True)
class Score:
    """Actions by their number. ``queues`` are those of every lane of ``LANES``, in order; ``after`` is what each waits
    for beside the one before it on its lane; ``seconds`` and ``rates`` (bytes/s) are its own with its lane, and all
    that the lane shares, to itself. One rate more is the last: 0, that of a lane which runs nothing. ``calls`` are, by
    step, the actions that the step call waits for, of each lane the last. ``copies`` are those on a lane of the disk
    that go from memory to memory.
    """

    sharing: Sharing
    queues: Sequence[Sequence[int]]
    after: Sequence[Sequence[int]]
    seconds: Sequence[float]
    rates: Sequence[float]
    calls: Sequence[Sequence[int]]
    copies: frozenset[int] = frozenset()

    @classmethod
    def of(cls, program: Program | Sketch, costs: Costs, *, settled: bool = False) -> Score:
        """The score of ``program`` at ``costs``, those of the trace that it was lowered from. ``settled``: a step call
        waits for every update and every write to disk, too.

        Raises ``ConfigError`` for a disk that is not there.
        """
        actions: Sequence[Action | Outline] = program.actions
        # Hooks and lanes where parameters come and go. What only runs again, or whose activations move, pays for no
        # watch: the byte ledger rests, once the first steps of a shape are over, in all but one step in 16.
        watched = costs.machine.device_kind == "cpu" and bool(program.slots)
        seconds = [costs.action(action, watched=watched, summed=program.checksums) for action in actions]
        rates = [action.nbytes / s if s else 0.0 for action, s in zip(actions, seconds, strict=True)]
        _hand_over(actions, seconds, costs.handover_seconds)
        queues: list[list[int]] = [[] for _ in LANES]
        for index, action in enumerate(actions):
            queues[PLACE[action.lane]].append(index)
        after = [action.after for action in actions]
        return cls(
            Sharing(costs.machine),
            queues,
            after,
            seconds,
            [*rates, 0.0],
            _calls(program, settled),
            _copies(actions, queues, costs.machine),
        )

    def times(self, counts: Sequence[float]) -> Score:
        """The same with every action done so often in a row, or so large a part of it: at the same rate."""
        return replace(self, seconds=[s * count for s, count in zip(self.seconds, counts, strict=True)])

    def longer(self, more: Sequence[float]) -> Score:
        """The same with so many seconds more for every action."""
        return replace(self, seconds=[s + extra for s, extra in zip(self.seconds, more, strict=True)])

    def in_threads(self, actions: Sequence[Action | Outline], machine: Machine) -> Score:
        """The same where those that compute do it in threads of their own beside the caller's: every op of ``actions``
        takes ``machine.together_seconds`` longer."""
        more = machine.together_seconds
        return self.longer([more * (a.ops[1] - a.ops[0]) if a.verb is Verb.COMPUTE else 0.0 for a in actions])

    def instead(self, idle: Iterable[int], before: Mapping[int, Outline], costs: Costs) -> Score:
        """The same without the actions ``idle``, which take no time and wait for nothing, and with others: each of
        ``before`` comes on its lane in front of the action that it is given by."""
        after, seconds, rates = list(self.after), list(self.seconds), list(self.rates[:-1])
        for index in idle:
            after[index], seconds[index], rates[index] = (), 0.0, 0.0
        queues, numbers = list(self.queues), dict[int, int]()
        for number, (index, action) in enumerate(before.items(), start=len(after)):
            numbers[index] = number
            after.append(action.after)
            seconds.append(costs.action(action))
            rates.append(action.nbytes / seconds[-1] if seconds[-1] else 0.0)
        for place in {PLACE[action.lane] for action in before.values()}:
            queue = queues[place]
            queues[place] = [n for index in queue for n in (numbers.get(index, index), index)[index not in numbers :]]
        return replace(self, queues=queues, after=after, seconds=seconds, rates=[*rates, 0.0])


def _hand_over(actions: Sequence[Action | Outline], seconds: list[float], each: float) -> None:
    """Adds to each compute of ``actions`` the host's part of the transfers of activations that come behind it, ``each``
    seconds: whoever computes hands them over."""
    if not each:
        return
    computed = -1
    for index, action in enumerate(actions):
        if action.verb is Verb.COMPUTE:
            computed = index
        elif action.tensor >= 0 and action.lane is not Lane.COMPUTE and computed >= 0:
            seconds[computed] += each * max(1, len(action.pieces))


def _copies(actions: Sequence[Action | Outline], queues: Sequence[Sequence[int]], machine: Machine) -> frozenset[int]:
    """What goes to a process on the host that updates beside the storage, or comes from there."""
    if machine.disk is None or machine.disk.update_rate is not None:
        return frozenset()
    own = queues[PLACE[Lane.DISK_READ]], queues[PLACE[Lane.DISK_WRITE]]
    return frozenset(index for queue in own for index in queue if is_copy_beside(actions[index]))


def _calls(program: Program | Sketch, settled: bool) -> list[list[int]]:
    waited = {Lane.COMPUTE} | ({Lane.UPDATE, Lane.DISK_WRITE} if settled else set())
    last: list[dict[Lane | Verb, int]] = [{} for _ in range(program.steps)]
    actions: Sequence[Action | Outline] = program.actions
    for index, action in enumerate(actions):
        if action.lane in waited:
            last[action.step][action.lane] = index
        elif settled and action.verb is Verb.STORE:
            last[action.step][action.verb] = index
    return [list(one.values()) for one in last]
