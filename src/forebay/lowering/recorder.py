"""A device on paper: what the runtime would ask of a device becomes actions with what they wait for. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, final

from forebay.device.base import Completion
from forebay.memory import Kind
from forebay.program import Action, Change, Use, Verb
from forebay.timeline import Lane

__all__ = ["Paper", "Recorded", "Recorder"]

NOTHING = -1
"""The action that a mark stands for before any compute."""


@final
class Paper:
    """A buffer without bytes."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes


@final
class Recorded(Completion):
    """An action that is written down. It is done for whoever has waited for it, and for nobody else: so every wait that
    could be one becomes a dependency, whatever the timing."""

    __slots__ = ("_recorder", "_waited", "index")

    def __init__(self, recorder: Recorder, index: int) -> None:
        self._recorder = recorder
        self._waited = index == NOTHING
        self.index = index

    def wait(self) -> None:
        """Whatever is written down from now on comes after this action."""
        if not self._waited:
            self._waited = True
            self._recorder.wait_for(self.index)

    def done(self) -> bool:
        return self._waited


@final
class Recorder:
    """Writes down actions; stands for a device wherever decisions are shared (``slots.SlotDevice``,
    ``window.ComputeOrder``).

    ``before`` is called before anything is written down or waited for: whoever gathers compute writes it down then.
    ``in_step_with_compute`` says that whoever issues computes too (``cpu``): what is issued then comes after all
    compute issued so far, and a hold of compute holds the issuer.
    """

    def __init__(self, *, in_step_with_compute: bool) -> None:
        self.actions: list[Action] = []
        self.step = 0
        self.before: Callable[[], None] = _nothing
        self._in_step = in_step_with_compute
        self._lanes: list[Lane] = []
        self._last_compute = NOTHING
        # What the next action of each lane must wait for, because its issuer has waited for it: lane and action.
        self._pending: dict[Lane, dict[Lane, int]] = {lane: {} for lane in Lane}

    # What a slot pool and a gradient window ask of a device.

    def allocate(self, nbytes: int, kind: Kind, what: str) -> Paper:
        """A buffer without bytes."""
        return Paper(nbytes)

    def free(self, buffer: Any) -> None:
        """There is nothing to give back."""

    def mark(self) -> Recorded:
        """All compute so far."""
        self.before()
        return Recorded(self, self._last_compute)

    def hold_compute(self, completion: Completion) -> None:
        """The next compute waits for ``completion``."""
        self.before()
        if not isinstance(completion, Recorded) or completion.done():
            return
        if self._in_step:
            completion.wait()
        else:
            self._hold(Lane.COMPUTE, completion.index)

    def wait_for(self, index: int) -> None:
        """The issuer waits for an action: whatever is written down later, on any lane, comes after it."""
        self.before()
        other = self._lanes[index]
        for lane, waiting in self._pending.items():
            if lane is not other and waiting.get(other, NOTHING) < index:
                waiting[other] = index

    def _hold(self, lane: Lane, index: int) -> None:
        other = self._lanes[index]
        if other is not lane:
            waiting = self._pending[lane]
            waiting[other] = max(waiting.get(other, NOTHING), index)

    def latest(self, completions: Iterable[Completion]) -> tuple[Recorded, ...]:
        """Of each lane the last of ``completions``: who waits for that one has waited for all, since lanes are in
        order."""
        last: dict[Lane, Recorded] = {}
        for completion in completions:
            if isinstance(completion, Recorded) and completion.index != NOTHING:
                lane = self._lanes[completion.index]
                if lane not in last or last[lane].index < completion.index:
                    last[lane] = completion
        return tuple(last.values())

    # Writing down.

    def add(
        self,
        lane: Lane,
        verb: Verb,
        what: str,
        *,
        after: Iterable[Completion] = (),
        nbytes: int = 0,
        block: str = "",
        slot: int = -1,
        parameter: str = "",
        chunk: int = 0,
        changes: tuple[Change, ...] = (),
        peak: int = 0,
        ops: tuple[int, int] = (0, 0),
        tensor: int = -1,
        bits: int = 0,
        ring: int = -1,
    ) -> Recorded:
        """Writes down an action, after what the caller names and after what its lane must wait for."""
        self.before()
        waits, self._pending[lane] = self._pending[lane], {}
        for completion in after:
            if isinstance(completion, Recorded) and completion.index != NOTHING:
                other = self._lanes[completion.index]
                if waits.get(other, NOTHING) < completion.index:
                    waits[other] = completion.index
        if self._in_step and self._last_compute != NOTHING:
            waits[Lane.COMPUTE] = self._last_compute
        waits.pop(lane, None)  # the lane is in order
        return self._write(
            Action(
                lane=lane,
                verb=verb,
                what=what,
                step=self.step,
                block=block,
                after=tuple(sorted(waits.values())),
                nbytes=nbytes,
                slot=slot,
                parameter=parameter,
                chunk=chunk,
                changes=changes,
                peak=peak,
                ops=ops,
                tensor=tensor,
                bits=bits,
                ring=ring,
            )
        )

    def compute(
        self,
        what: str,
        block: str,
        ops: tuple[int, int],
        *,
        recomputed: bool,
        uses: tuple[Use, ...],
        peak: int,
        changes: tuple[Change, ...],
    ) -> Recorded:
        """Writes down ops, after whatever compute is held for."""
        waits, self._pending[Lane.COMPUTE] = self._pending[Lane.COMPUTE], {}
        return self._write(
            Action(
                lane=Lane.COMPUTE,
                verb=Verb.COMPUTE,
                what=what,
                step=self.step,
                block=block,
                after=tuple(sorted(waits.values())),
                ops=ops,
                recomputed=recomputed,
                uses=uses,
                peak=peak,
                changes=changes,
            )
        )

    def _write(self, action: Action) -> Recorded:
        index = len(self.actions)
        self.actions.append(action)
        self._lanes.append(action.lane)
        if action.lane is Lane.COMPUTE:
            self._last_compute = index
        return Recorded(self, index)


def _nothing() -> None:
    return
