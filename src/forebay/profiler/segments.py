"""Cuts a recorded step into visits, and stores visits that are alike once. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

from forebay.trace import Gradient, Op, Phase, Segment, Tensor, Visit

__all__ = ["Recorded", "cut"]


@final
@dataclass(frozen=True, slots=True)
class Recorded:
    """An op of the whole step, its tensors by id. ``made`` are the ids that are first known with this op."""

    work: int
    block: str
    phase: Phase
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    made: Sequence[int] = ()
    dropped: Sequence[int] = ()
    unsaved: Sequence[int] = ()
    gradients: Sequence[tuple[int, int]] = field(default=())


def cut(ops: Sequence[Recorded], tensors: Sequence[Tensor]) -> tuple[tuple[Segment, ...], tuple[Visit, ...]]:
    """The segments and visits of a step.

    ``tensors`` are all tensors by id, ``root`` being an id too; those that no op makes are the sources and come
    first. The tensors that the ops make have ids in the order of the ops. Two visits share a segment when their ops
    and own tensors are equal and what comes from outside has the same bytes and dtypes.
    """
    segments: dict[tuple[Segment, tuple[tuple[int, str], ...]], int] = {}
    visits: list[Visit] = []
    begin = 0
    while begin < len(ops):
        end = begin + 1
        while end < len(ops) and (ops[end].block, ops[end].phase) == (ops[begin].block, ops[begin].phase):
            end += 1
        segment, ports, first_tensor = _localise(ops[begin:end], tensors)
        outside = tuple((tensors[p].nbytes, tensors[p].dtype) for p in ports)
        number = segments.setdefault((segment, outside), len(segments))
        if first_tensor is None:
            first_tensor = _next_tensor(visits, segments, len(tensors), ops)
        visits.append(Visit(number, ops[begin].block, ops[begin].phase, ports, begin, first_tensor))
        begin = end
    return tuple(segment for segment, _ in segments), tuple(visits)


def _next_tensor(
    visits: Sequence[Visit],
    segments: dict[tuple[Segment, tuple[tuple[int, str], ...]], int],
    count: int,
    ops: Sequence[Recorded],
) -> int:
    """Where the tensors of a visit that makes none would begin."""
    if visits:
        stored = list(segments)
        return visits[-1].first_tensor + len(stored[visits[-1].segment][0].tensors)
    return min((number for op in ops for number in op.made), default=count)


def _localise(ops: Sequence[Recorded], tensors: Sequence[Tensor]) -> tuple[Segment, tuple[int, ...], int | None]:
    """The ops of one visit with references in the place of ids; the ids of its ports; the id of its first tensor."""
    own = [number for op in ops for number in op.made]
    local = {number: reference for reference, number in enumerate(own)}
    ports: dict[int, int] = {}

    def reference(number: int) -> int:
        if number in local:
            return local[number]
        return ports.setdefault(number, -1 - len(ports))

    def references(numbers: Sequence[int]) -> tuple[int, ...]:
        return tuple([reference(n) for n in numbers])

    made = []
    for op in ops:
        inputs, outputs = references(op.inputs), references(op.outputs)
        gradients = tuple(Gradient(reference(p), reference(g)) for p, g in op.gradients)
        # Sorted: in which order several go away between two ops is up to the interpreter, and means nothing.
        dropped, unsaved = sorted(references(op.dropped)), sorted(references(op.unsaved))
        made.append(Op(op.work, inputs, outputs, tuple(dropped), tuple(unsaved), gradients))
    kept = []
    for number in own:
        tensor = tensors[number]
        kept.append(Tensor(tensor.nbytes, tensor.dtype, tensor.kind, reference(tensor.root), tensor.saved, tensor.name))
    return Segment(tuple(made), tuple(kept)), tuple(ports), own[0] if own else None
