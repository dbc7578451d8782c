"""The lives of a step as buffers that need addresses. No torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import final

import numpy as np

from forebay.buffers import Buffer
from forebay.lowering.columns import Column, column
from forebay.lowering.liveness import Liveness
from forebay.lowering.lives import Layout
from forebay.memory import Kind
from forebay.trace import Trace
from forebay.treatments import Selection

__all__ = ["StepLives", "step_buffers", "step_lives"]


@dataclass(frozen=True)
class StepLives:
    """What a step makes, one entry for each life of a root: its kind, the first position at which it is there, the last
    one, and its bytes."""

    kinds: tuple[Kind, ...]
    starts: Column
    ends: Column
    nbytes: Column


@final
class _Rows:
    """Notes lives one by one, where ``Levels`` adds them up."""

    def __init__(self) -> None:
        self._kinds: list[Kind] = []
        self._columns: tuple[list[Column], list[Column], list[Column]] = [], [], []

    def add(self, kind: Kind, start: int, end: int, nbytes: int) -> None:
        self.add_all(kind, column([start]), column([end]), column([nbytes]))

    def add_all(self, kind: Kind, starts: Column, ends: Column, nbytes: Column) -> None:
        there = nbytes > 0
        self._kinds += [kind] * int(there.sum())
        for own, more in zip(self._columns, (starts, ends, nbytes), strict=True):
            own.append(more[there])

    def lives(self) -> StepLives:
        return StepLives(tuple(self._kinds), *(np.concatenate([column(()), *own]) for own in self._columns))


def step_lives(
    trace: Trace,
    recompute: Iterable[str] = (),
    activations: tuple[Selection, ...] = (),
    staying: Collection[str] = (),
    liveness: Liveness | None = None,
) -> StepLives:
    """What one micro-batch makes on the device, with the blocks ``recompute`` recomputed and single ops treated as
    ``activations`` say. The bytes live at each position are ``Profile.during``, and gradients of the blocks ``staying``
    from when they are complete to the end of the step. ``liveness`` is that of the trace, if the caller has it."""
    rows, liveness = _Rows(), liveness or Liveness(trace)
    index, arrangement = liveness.index, liveness.arrangement(frozenset(recompute))
    Layout(arrangement, activations).note(rows)
    for done in (one for visit in index.completed for one in visit if index.blocks[one.parameter] in staying):
        complete, nbytes = arrangement.position[done.op], trace.sources[done.parameter].nbytes
        rows.add(Kind.GRADIENT, complete + 1, arrangement.end, nbytes)
    return rows.lives()


def step_buffers(
    trace: Trace,
    recompute: Iterable[str] = (),
    activations: tuple[Selection, ...] = (),
) -> tuple[Buffer, ...]:
    """``step_lives`` as buffers that need addresses, each live up to the position after the last at which it is there.
    Ids begin with the kind."""
    lives = step_lives(trace, recompute, activations)
    rows = zip(lives.kinds, lives.starts.tolist(), lives.ends.tolist(), lives.nbytes.tolist(), strict=True)
    return tuple(Buffer(f"{kind.value}-{n}", start, end + 1, size) for n, (kind, start, end, size) in enumerate(rows))
