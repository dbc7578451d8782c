"""A device on paper: what the runtime would ask of a device becomes actions with what they wait for. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, final

from forebay.device.base import Completion
from forebay.memory import Kind
from forebay.program import Action, Change, Outline, Use, Verb
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
    compute issued so far, and a hold of compute holds the issuer. One that is ``sketching`` writes ``outlines`` in the
    place of ``actions``.
    """

    def __init__(self, *, in_step_with_compute: bool, sketching: bool = False) -> None:
        self.actions: list[Action] = []
        self.outlines: list[Outline] = []
        self.sketching = sketching
        self.step = 0
        self.before: Callable[[], None] = _nothing
        self._in_step = in_step_with_compute
        self._lanes: list[Lane] = []
        self._last_compute = NOTHING
        # What the issuer has waited for, in order, each with its lane; how many of those the latest action of each lane
        # comes after; and what compute alone is held for.
        self._waited: list[tuple[Lane, int]] = []
        self._seen = dict.fromkeys(Lane, 0)
        self._held: dict[Lane, int] = {}

    def finish(self) -> None:
        """Nothing more is written down, and nobody is asked ``before``."""
        self.before = _nothing

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
            return
        lane, index = self._lanes[completion.index], completion.index
        if lane is not Lane.COMPUTE and self._held.get(lane, NOTHING) < index:
            self._held[lane] = index

    def wait_for(self, index: int) -> None:
        """The issuer waits for an action: whatever is written down later, on any lane, comes after it."""
        self.before()
        self._waited.append((self._lanes[index], index))

    def _due(self, lane: Lane) -> dict[Lane, int]:
        """What the next action of ``lane`` must wait for, because its issuer has: the latest action of each other lane.
        To be asked once for each action."""
        waits: dict[Lane, int] = {}
        if lane is Lane.COMPUTE:
            waits, self._held = self._held, waits
        waited, seen = self._waited, self._seen[lane]
        if seen < len(waited):
            for other, index in waited[seen:]:
                if other is not lane and waits.get(other, NOTHING) < index:
                    waits[other] = index
            self._seen[lane] = len(waited)
        return waits

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
        rest: int = 0,
        ring: int = -1,
        part: Kind | None = None,
        apart: bool = False,
        chosen_from: int = 0,
        pieces: tuple[int, ...] = (),
    ) -> Recorded:
        """Writes down an action, after what the caller names and after what its lane must wait for. Only in a sketch
        ``pieces`` may be taken for one."""
        self.before()
        known, index = self._known(lane, after), len(self._lanes)
        self._lanes.append(lane)
        if lane is Lane.COMPUTE:
            self._last_compute = index
        if self.sketching:
            # In the order of its fields: by name it takes three times as long.
            others = tensor, bits, apart, block, chosen_from, rest, pieces
            self.outlines.append(Outline(lane, verb, what, self.step, known, nbytes, ops, *others))
            return Recorded(self, index)
        self.actions.append(
            Action(
                lane=lane,
                verb=verb,
                what=what,
                step=self.step,
                block=block,
                after=known,
                nbytes=nbytes,
                slot=slot,
                parameter=parameter,
                chunk=chunk,
                changes=changes,
                peak=peak,
                ops=ops,
                tensor=tensor,
                bits=bits,
                rest=rest,
                ring=ring,
                part=part,
                apart=apart,
                chosen_from=chosen_from,
            )
        )
        return Recorded(self, index)

    def add_updates(
        self, what: str, block: str, after: Sequence[Completion], chunks: Iterable[tuple[int, int]], *, apart: bool
    ) -> Recorded:
        """Writes down the updates on the host of ``chunks`` (number, bytes) of ``block``, one or more, which all come
        after the same: in a sketch as one. Returns the last one."""
        self.before()
        lane, verb, step = Lane.UPDATE, Verb.UPDATE, self.step
        known = self._known(lane, after)
        if self.sketching:
            total = sum(nbytes for _, nbytes in chunks)
            self.outlines.append(Outline(lane, verb, what, step, known, total, apart=apart, block=block))
            self._lanes.append(lane)
            return Recorded(self, len(self._lanes) - 1)
        for place, (number, nbytes) in enumerate(chunks):
            if place == 1:  # the first one also comes after what the issuer has waited for; all others are behind that
                known = self._known(lane, after)
            self.actions.append(Action(lane, verb, what, step, block, known, nbytes, chunk=number, apart=apart))
            self._lanes.append(lane)
        return Recorded(self, len(self._lanes) - 1)

    def _known(self, lane: Lane, after: Iterable[Completion]) -> tuple[int, ...]:
        """The actions that the next one of ``lane`` names, ``after`` what its caller names."""
        waits, lanes = self._due(lane), self._lanes
        for completion in after:
            if isinstance(completion, Recorded) and completion.index != NOTHING:
                other = lanes[completion.index]
                if waits.get(other, NOTHING) < completion.index:
                    waits[other] = completion.index
        if self._in_step and self._last_compute != NOTHING:
            waits[Lane.COMPUTE] = self._last_compute
        waits.pop(lane, None)  # the lane is in order
        return tuple(sorted(waits.values())) if len(waits) > 1 else tuple(waits.values())

    def compute(
        self,
        what: str,
        block: str,
        ops: tuple[int, int],
        *,
        recomputed: bool,
        treated: bool,
        uses: tuple[Use, ...],
        peak: int,
        changes: tuple[Change, ...],
    ) -> None:
        """Writes down ops, after whatever compute is held for. Who waits for them asks for a mark."""
        waits = self._due(Lane.COMPUTE)
        known = tuple(sorted(waits.values())) if waits else ()
        self._last_compute = len(self._lanes)
        self._lanes.append(Lane.COMPUTE)
        if self.sketching:
            self.outlines.append(
                Outline(
                    Lane.COMPUTE, Verb.COMPUTE, what, self.step, known, 0, ops, recomputed=recomputed, treated=treated
                )
            )
            return
        self.actions.append(
            Action(
                lane=Lane.COMPUTE,
                verb=Verb.COMPUTE,
                what=what,
                step=self.step,
                block=block,
                after=known,
                ops=ops,
                recomputed=recomputed,
                treated=treated,
                uses=uses,
                peak=peak,
                changes=changes,
            )
        )


def _nothing() -> None:
    return
