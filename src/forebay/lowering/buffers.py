"""The lives of a step as buffers that need addresses. No torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import final

from forebay.buffers import Buffer
from forebay.lowering.columns import Column
from forebay.lowering.liveness import Liveness
from forebay.lowering.lives import Layout
from forebay.memory import Kind
from forebay.trace import Trace
from forebay.treatments import Selection

__all__ = ["step_buffers"]


@final
class _Rows:
    """Notes lives one by one, where ``Levels`` adds them up."""

    def __init__(self) -> None:
        self.buffers: list[Buffer] = []

    def add(self, kind: Kind, start: int, end: int, nbytes: int) -> None:
        if nbytes:
            self.buffers.append(Buffer(f"{kind.value}-{len(self.buffers)}", start, end + 1, nbytes))

    def add_all(self, kind: Kind, starts: Column, ends: Column, nbytes: Column) -> None:
        for start, end, size in zip(starts.tolist(), ends.tolist(), nbytes.tolist(), strict=True):
            self.add(kind, start, end, size)


def step_buffers(
    trace: Trace,
    recompute: Iterable[str] = (),
    activations: tuple[Selection, ...] = (),
    staying: Collection[str] = (),
    liveness: Liveness | None = None,
) -> tuple[Buffer, ...]:
    """What one micro-batch makes on the device, with the blocks ``recompute`` recomputed and single ops treated as
    ``activations`` say: one buffer for each life of a root, from the position of the op that makes it up to the one
    after the last at which it is there. The bytes live at each position are ``Profile.during``, and gradients of the
    blocks ``staying`` from when they are complete to the end of the step. Ids begin with the kind. ``liveness`` is that
    of the trace, if the caller has it."""
    rows, liveness = _Rows(), liveness or Liveness(trace)
    index, arrangement = liveness.index, liveness.arrangement(frozenset(recompute))
    Layout(arrangement, activations).note(rows)
    for done in (one for visit in index.completed for one in visit if index.blocks[one.parameter] in staying):
        rows.add(
            Kind.GRADIENT, arrangement.position[done.op] + 1, arrangement.end, trace.sources[done.parameter].nbytes
        )
    return tuple(rows.buffers)
