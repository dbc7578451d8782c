"""What compute does to the bytes of the device, over any stretch of a micro-batch's positions. No torch.

What moves is not compute's: a moved root goes with its offload, and what comes back comes with its reload.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import final

import numpy as np

from forebay.lowering.columns import Column, column
from forebay.lowering.index import NEVER
from forebay.lowering.lives import Profile
from forebay.memory import Kind
from forebay.program import Change
from forebay.trace import Trace

__all__ = ["Account"]


@final
class Account:
    """The bytes that the ops of ``profile`` make, free and take meanwhile, step after step of ``trace``.

    A stretch is from one position to another, the latter not included.
    """

    def __init__(self, trace: Trace, profile: Profile) -> None:
        self._trace = trace
        self._forward = profile.forward
        self._end = len(profile.during)
        self._levels, self._during = _of_compute(profile)
        none = np.zeros(self._end + 1, np.int64)
        self._total: Sequence[int] = sum((column(level) for level in self._levels.values()), none).tolist()
        # The same in every step: what ops make and leave, and the most that they take.
        self._made: dict[tuple[int, int], tuple[Change, ...]] = {}
        self._most: dict[tuple[int, int], int] = {}
        self._holds_outputs = False

    def made(self, start: int, end: int) -> tuple[Change, ...]:
        """What the ops of a stretch make and leave, and what goes with them."""
        if (start, end) not in self._made:
            self._made[start, end] = tuple(Change(k, level[end] - level[start]) for k, level in self._levels.items())
        return self._made[start, end]

    def dropped(self, position: int) -> int:
        """Bytes that go behind the op before ``position``."""
        return max(0, self._during[position - 1] - self._total[position])

    def booked(self, start: int, end: int, beside: Iterable[Change]) -> tuple[int, tuple[Change, ...]]:
        """The most bytes that the ops of a stretch take beside what was there, and what they leave, with the changes
        that go with them (``beside``). Stretches are booked once each, in order."""
        changes: dict[Kind, int] = defaultdict(int)
        for change in (*self.made(start, end), *beside):
            changes[change.kind] += change.nbytes
        if (start, end) not in self._most:
            self._most[start, end] = max(0, max(self._during[start:end]) - self._total[start])
        peak = self._with_outputs(end, changes, self._most[start, end])
        return peak, tuple(Change(kind, nbytes) for kind, nbytes in changes.items() if nbytes)

    def _with_outputs(self, end: int, changes: dict[Kind, int], peak: int) -> int:
        """Books what the trace knows of outputs; returns the peak with a loss outside of the model.

        What the pass made and nobody let go is gone from the levels at its end; of that, ``held_nbytes`` stay until the
        forward of the next pass is over.
        """
        trace = self._trace
        if end == self._forward:
            left = sum(changes.values())
            if self._holds_outputs:
                changes[Kind.ACTIVATION] -= trace.held_nbytes
                self._holds_outputs = False
            peak = max(peak, left + trace.unseen_nbytes) if trace.unseen_nbytes else peak
        if end == self._end and trace.held_nbytes:
            changes[Kind.ACTIVATION] += trace.held_nbytes
            self._holds_outputs = True
        return peak


def _of_compute(profile: Profile) -> tuple[Mapping[Kind, Sequence[int]], Sequence[int]]:
    """``levels`` and ``during`` of what compute makes and frees: moved roots go with their offload, what comes back
    comes with its reload or is decoded, and codes are not its own, nor is the rest of what is treated in part."""
    if not profile.moves:
        return profile.levels, profile.during
    size = len(profile.during) + 1
    more = {kind: np.zeros(size, np.int64) for kind in (*profile.levels, Kind.ACTIVATION)}
    taken = np.zeros(size, np.int64)
    for move in profile.moves:
        activations = more[Kind.ACTIVATION]
        if move.codes is None:
            more[move.kind][move.until + 1] += move.in_transit
        else:
            _leave_out(activations, taken, move.sent, move.moved)
            activations[move.until + 1] += move.moved
        if move.rest:
            _leave_out(activations, taken, move.sent, move.rest)
            activations[move.rest_until + 1] += move.rest
        if move.asked != NEVER:
            _leave_out(activations, taken, move.asked, move.nbytes)
    levels = {k: np.cumsum(m) + column(profile.levels.get(k, (0,) * size)) for k, m in more.items()}
    beside = np.cumsum(sum(more.values(), taken))[:-1]
    return {k: level.tolist() for k, level in levels.items()}, (column(profile.during) + beside).tolist()


def _leave_out(level: Column, taken: Column, position: int, nbytes: int) -> None:
    """Others make what is there from ``position`` on."""
    level[position + 1] -= nbytes
    taken[position] -= nbytes
    taken[position + 1] += nbytes
