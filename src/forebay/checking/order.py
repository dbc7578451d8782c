"""What is certain to be done before what, whatever the lanes' speeds. No torch."""

from __future__ import annotations

from typing import final

from forebay.checking.words import fault
from forebay.program import Program, Verb
from forebay.timeline import Lane

__all__ = ["Order"]

_LANES = {
    Verb.COMPUTE: (Lane.COMPUTE,),
    Verb.ENCODE: (Lane.COMPUTE,),
    Verb.DECODE: (Lane.COMPUTE,),
    Verb.FETCH: (Lane.H2D,),
    Verb.LAND: (Lane.D2H,),
    Verb.ACCUMULATE: (Lane.D2H,),
    Verb.OFFLOAD: (Lane.D2H,),
    Verb.RELOAD: (Lane.H2D,),
    Verb.UPDATE: (Lane.UPDATE, Lane.COMPUTE, Lane.DEVICE_UPDATE, Lane.STORAGE_UPDATE),
    Verb.LOAD: (Lane.H2D, Lane.DISK_WRITE),
    Verb.STORE: (Lane.D2H, Lane.DISK_READ),
    Verb.READ: (Lane.DISK_READ,),
    Verb.WRITE: (Lane.DISK_WRITE,),
}


@final
class Order:
    """Happens-before over the actions of a program, by vector clocks (Fidge 1988, Mattern 1989) over its lanes.

    The clock of an action says, for every lane, how many of its actions are done for certain when the action starts:
    those before it on its own lane, those that it names in ``after``, and all that those had waited for.
    """

    def __init__(self, program: Program) -> None:
        lanes = self._places = {lane: place for place, lane in enumerate(Lane)}
        self._lane: list[int] = []
        self._position: list[int] = []
        self._clock: list[list[int]] = []
        latest, counts = [-1] * len(lanes), [0] * len(lanes)
        for index, action in enumerate(program.actions):
            if action.lane not in _LANES.get(action.verb, ()):
                raise fault(
                    program, index, action.what, f"a {action.verb.value} cannot run on lane {action.lane.value}"
                )
            lane = lanes[action.lane]
            clock = [0] * len(lanes) if latest[lane] < 0 else self._clock[latest[lane]].copy()
            for earlier in action.after:
                if not 0 <= earlier < index:
                    raise fault(program, index, action.what, f"it waits for action {earlier}, which is not before it")
                own, position = self._lane[earlier], self._position[earlier]
                if clock[own] <= position:  # or else that, and all that it had waited for, is known to be done
                    clock = list(map(max, clock, self._clock[earlier]))
                    clock[own] = position + 1
            clock[lane] = counts[lane]  # all before it on its lane
            self._lane.append(lane)
            self._position.append(counts[lane])
            self._clock.append(clock)
            latest[lane] = index
            counts[lane] += 1

    def reached(self, action: int, lane: Lane) -> int:
        """How many actions of ``lane`` have ended for certain when ``action`` starts: its first ones."""
        return self._clock[action][self._places[lane]]

    def position(self, action: int) -> int:
        """How many actions of its lane come before ``action``."""
        return self._position[action]

    def before(self, first: int, second: int) -> bool:
        """Whether action ``first`` has ended for certain when action ``second`` starts."""
        return self._clock[second][self._lane[first]] > self._position[first]
