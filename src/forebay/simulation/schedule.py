"""What the devices of one host do, written down action by action and played against one clock. No torch.

A schedule adds actions to devices in an order in which everything that an action waits for is there before it. Lanes do
what is asked of them in that order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import final

from forebay.errors import ConfigError
from forebay.program import Action, Program, Verb
from forebay.servers import Server
from forebay.simulation.costs import Costs
from forebay.simulation.score import Score
from forebay.simulation.several import HOST_LANES, Act, Rules, SeveralForecast, play_together
from forebay.simulation.sharing import LANES, Sharing
from forebay.timeline import Lane

__all__ = ["Device", "Schedule"]

_LANE: Mapping[Verb, Lane] = MappingProxyType(
    {
        Verb.COMPUTE: Lane.COMPUTE,
        Verb.FETCH: Lane.H2D,
        Verb.RELOAD: Lane.H2D,
        Verb.OFFLOAD: Lane.D2H,
        Verb.LAND: Lane.D2H,
        Verb.UPDATE: Lane.UPDATE,
    }
)


@final
class Device:
    """What one device does, and for how many seconds each."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self.seconds: list[float] = []


class Schedule(ABC):
    """Writes down what every device of ``server`` does in a step; ``costs`` are those of the model on one of them."""

    def __init__(self, costs: Costs, server: Server) -> None:
        self.devices = [Device() for _ in server.roots]
        self.server = server
        self._costs = costs
        self._across: dict[Act, tuple[Act, ...]] = {}
        self._number = 0

    @abstractmethod
    def step(self) -> None:
        """Writes down one step."""

    @final
    def played(self, steps: int, micro_batches: int) -> SeveralForecast:
        """What so many steps of so many micro-batches come to."""
        for self._number in range(steps):
            self.step()
        programs = [Program(tuple(d.actions), (), {}, steps, micro_batches) for d in self.devices]
        rules = Rules(HOST_LANES, self.server.channel, roots=self.server.roots)
        return play_together(programs, [self._score(d, steps) for d in self.devices], rules, self._across)

    def _score(self, device: Device, steps: int) -> Score:
        rates = [a.nbytes / s if s else 0.0 for a, s in zip(device.actions, device.seconds, strict=True)]
        queues: list[list[int]] = [[] for _ in LANES]
        last: list[dict[Lane, int]] = [{} for _ in range(steps)]
        for index, action in enumerate(device.actions):
            if action.lane in LANES:
                queues[LANES.index(action.lane)].append(index)
            if action.lane in (Lane.COMPUTE, Lane.UPDATE):
                last[action.step][action.lane] = index
        after = [action.after for action in device.actions]
        calls = [list(one.values()) for one in last]
        return Score(Sharing(self._costs.machine), queues, after, device.seconds, [*rates, 0.0], calls)

    @final
    def add(self, device: int, verb: Verb, nbytes: int, after: Iterable[Act], seconds: float | None = None) -> Act:
        """An action that waits for ``after``, on this device and on others. ``seconds`` None: those of the bytes."""
        return self._added(device, verb, _LANE[verb], nbytes, after, seconds)

    @final
    def between(self, device: int, verb: Verb, nbytes: int, after: Iterable[Act]) -> Act:
        """A copy from ``device`` to others (``OFFLOAD``) or from others to it (``RELOAD``), over links between devices.
        Raises ``ConfigError`` where there are none."""
        if self.server.peer is None:
            raise ConfigError("this server has no links between devices")
        lane = Lane.PEER_OUT if verb is Verb.OFFLOAD else Lane.PEER_IN
        return self._added(device, verb, lane, nbytes, after, nbytes / self.server.peer)

    def _added(
        self, device: int, verb: Verb, lane: Lane, nbytes: int, after: Iterable[Act], seconds: float | None
    ) -> Act:
        own, waits = self.devices[device], tuple(after)
        place = device, len(own.actions)
        here = tuple(index for other, index in waits if other == device)
        action = Action(lane, verb, verb.value, self._number, after=here, nbytes=nbytes)
        own.actions.append(action)
        own.seconds.append(self._costs.action(action) if seconds is None else seconds)
        across = tuple(one for one in waits if one[0] != device)
        if across:
            self._across[place] = across
        return place
