"""One model in stages over several devices of one host, each of which swaps its stages. No torch.

There are as many stages as devices or more, and all are at home on the host: a device has room for two, one that
computes and one that comes. Two ways to train are played:

*Wrapped* (``wrapped``): stage s is on the device that ``placed`` names. All micro-batches of a step pass it while it is
there, so that it crosses the link once in forward and once in backward; what it makes for the next stage goes by way of
the host, where it also waits for backward, which runs the stage again. A stage is updated on the host as soon as its
gradients are there. That is the pipeline of Harmony (Li et al., VLDB 2022: packs of layers for a group of
micro-batches, updated just in time) and that of Mobius (Feng et al., ASPLOS 2023).

*Alike* (``alike``): all devices train the whole model on micro-batches of their own, one after the other, each of which
brings every stage twice and takes its gradients back: data-parallel training with parameters on the host.

The links of some devices end on one *root complex*, which moves ``Server.channel`` bytes/s in one direction for all of
them together. Where stages that follow each other are on devices of one root complex, their transfers meet there.

What is not played: memory, but for the two stages; the exchange of gradients where devices are alike, whose place has
what each of them takes to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import final

from forebay.errors import ConfigError
from forebay.program import Verb
from forebay.servers import Server
from forebay.simulation.costs import Costs
from forebay.simulation.schedule import Schedule
from forebay.simulation.several import Act, SeveralForecast
from forebay.simulation.stages import Stage
from forebay.trace import Phase

__all__ = ["STEPS", "alike", "wrapped"]

STEPS = 3
"""The last of which is like all that follow."""


def wrapped(
    stages: Sequence[Stage], costs: Costs, server: Server, placed: Sequence[int], micro_batches: int
) -> SeveralForecast:
    """Steps of ``micro_batches`` through ``stages``, each on the device that ``placed`` names. ``costs`` are those of
    the model on one of the devices. Raises ``ConfigError`` for other devices than there are, and for no micro-batch."""
    if micro_batches < 1 or len(placed) != len(stages) or not set(placed) <= set(range(server.devices)):
        raise ConfigError("every stage is on one of the devices, and one micro-batch or more passes it")
    return _Wrapped(stages, costs, server, micro_batches, placed).played(STEPS, micro_batches)


def alike(stages: Sequence[Stage], costs: Costs, server: Server, micro_batches: int) -> SeveralForecast:
    """Steps in which every device takes its part of ``micro_batches`` through all of ``stages``. Raises ``ConfigError``
    where they are not as many for each."""
    each, over = divmod(micro_batches, server.devices)
    if over or not each:
        raise ConfigError(f"{micro_batches} micro-batches are not as many for each of {server.devices} devices")
    return _Alike(stages, costs, server, each).played(STEPS, each)


@final
class _Slots:
    """What one device has of stages: ``held`` are those that are there or that come, with what brings each; ``used`` is
    what has last computed with each, ``latest`` with any."""

    def __init__(self) -> None:
        self.held: dict[int, list[Act]] = {}
        self.used: dict[int, Act] = {}
        self.latest: tuple[Act, ...] = ()


class _Swapping(Schedule):
    """Stages that come and go, ``passing`` micro-batches at a time."""

    def __init__(self, stages: Sequence[Stage], costs: Costs, server: Server, passing: int) -> None:
        super().__init__(costs, server)
        self.stages = stages
        self._slots = [_Slots() for _ in server.roots]
        self._passing = passing
        self._updated: dict[int, Act] = {}

    @final
    def begin(self) -> None:
        """A step begins: what devices hold is stale."""
        for own in self._slots:
            own.held.clear()

    @final
    def turn(
        self, device: int, stage: int, phase: Phase, following: int | None, bring: Callable[[int], list[Act]]
    ) -> list[Act]:
        """``stage`` computes for all micro-batches that pass it now, each after what ``bring`` brings for it, while the
        one ``following`` on this device comes in as many pieces: behind one as a whole, what a micro-batch needs would
        wait for it. Returns what computes."""
        own, one = self._slots[device], self.stages[stage]
        if stage not in own.held:
            self._fetch(device, stage, self.stages[stage].parameters, own.latest)
        comes = following if following not in own.held else None
        gone = [own.used[other] for other in own.held if other != stage and other in own.used]
        if comes is not None:
            own.held = {stage: own.held[stage]}
        seconds = one.forward if phase is Phase.FORWARD else one.backward
        computed = []
        for number in range(self._passing):
            needs = [*own.held[stage], *bring(number)]
            if comes is not None:
                whole = self.stages[comes].parameters
                piece = whole * (number + 1) // self._passing - whole * number // self._passing
                self._fetch(device, comes, piece, gone)
            computed.append(self.add(device, Verb.COMPUTE, 0, needs, seconds))
        own.used[stage] = computed[-1]
        own.latest = (computed[-1],)
        return computed

    def _fetch(self, device: int, stage: int, nbytes: int, after: Iterable[Act]) -> None:
        updated = self._updated.get(stage)
        waits = [*after, *(() if updated is None else (updated,))]
        held = self._slots[device].held.setdefault(stage, [])
        held.append(self.add(device, Verb.FETCH, nbytes, waits))

    @final
    def update(self, device: int, stage: int, landed: Iterable[Act]) -> None:
        """The host updates ``stage`` when its gradients have landed."""
        self._updated[stage] = self.add(device, Verb.UPDATE, self.stages[stage].touched, landed)


@final
class _Wrapped(_Swapping):
    """Stages on their devices, with what they hand to each other on the host in between."""

    def __init__(
        self, stages: Sequence[Stage], costs: Costs, server: Server, passing: int, placed: Sequence[int]
    ) -> None:
        super().__init__(stages, costs, server, passing)
        self._placed = placed
        # By stage and micro-batch: its output, and the gradient of it.
        self._made: dict[tuple[int, int], Act] = {}
        self._asked: dict[tuple[int, int], Act] = {}

    def step(self) -> None:
        self.begin()
        last = len(self.stages) - 1
        for stage, device in enumerate(self._placed):
            computed = self.turn(
                device, stage, Phase.FORWARD, self._next(stage, 1), partial(self._inputs, device, stage)
            )
            for number, done in enumerate(computed if stage < last else ()):
                self._made[stage, number] = self._sent(device, stage, done)
        for stage in range(last, -1, -1):
            device = self._placed[stage]
            computed = self.turn(
                device, stage, Phase.BACKWARD, self._next(stage, -1), partial(self._both, device, stage)
            )
            for number, done in enumerate(computed if stage else ()):
                self._asked[stage - 1, number] = self._sent(device, stage - 1, done)
            self.update(device, stage, [self.add(device, Verb.LAND, self.stages[stage].gradients, computed[-1:])])

    def _next(self, stage: int, direction: int) -> int | None:
        """The stage that this one's device has next."""
        end = len(self.stages) if direction > 0 else -1
        found = (s for s in range(stage + direction, end, direction) if self._placed[s] == self._placed[stage])
        return next(found, None)

    def _sent(self, device: int, stage: int, done: Act) -> Act:
        return self.add(device, Verb.OFFLOAD, self.stages[stage].handed, [done])

    def _inputs(self, device: int, stage: int, number: int) -> list[Act]:
        if not stage:
            return []
        return [self.add(device, Verb.RELOAD, self.stages[stage - 1].handed, [self._made[stage - 1, number]])]

    def _both(self, device: int, stage: int, number: int) -> list[Act]:
        """The inputs again, and the gradient of what this stage has made of them."""
        needs = self._inputs(device, stage, number)
        if stage < len(self.stages) - 1:
            needs.append(self.add(device, Verb.RELOAD, self.stages[stage].handed, [self._asked[stage, number]]))
        return needs


@final
class _Alike(_Swapping):
    """The whole model on every device, for ``each`` micro-batches one after the other."""

    def __init__(self, stages: Sequence[Stage], costs: Costs, server: Server, each: int) -> None:
        super().__init__(stages, costs, server, 1)
        self._each = each

    def step(self) -> None:
        self.begin()
        last = len(self.stages) - 1
        landed: dict[tuple[int, int], Act] = {}
        for _ in range(self._each):
            for device in range(len(self.devices)):
                for stage in range(last + 1):
                    self.turn(device, stage, Phase.FORWARD, stage + 1 if stage < last else None, lambda _: [])
                for stage in range(last, -1, -1):
                    done = self.turn(device, stage, Phase.BACKWARD, stage - 1 if stage else None, lambda _: [])
                    landed[stage, device] = self.add(device, Verb.LAND, self.stages[stage].gradients, done)
        for stage in range(last, -1, -1):
            # Each has its own gradients there: the sum of all is what is updated from.
            self.update(stage % len(self.devices), stage, [landed[stage, d] for d in range(len(self.devices))])
