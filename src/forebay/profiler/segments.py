"""Cuts a recorded step into visits, and stores visits that are alike once. No torch here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import final

from forebay.trace import NO_SAVES, Gradient, Op, Phase, Segment, Tensor, Visit

__all__ = ["Calls", "Recorded", "cut"]


@final
@dataclass(frozen=True, slots=True)
class Recorded:
    """An op of the whole step, its tensors by id. ``made`` are the ids that are first known with this op, ``call`` is
    the number of the call of the block's module that it belongs to."""

    work: int
    block: str
    call: int
    phase: Phase
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    made: Sequence[int] = ()
    dropped: Sequence[int] = ()
    unsaved: Sequence[int] = ()
    gradients: Sequence[tuple[int, int]] = field(default=())
    spent: Sequence[int] = ()
    released: Sequence[int] = ()
    packed: Sequence[int] = ()


@final
@dataclass(frozen=True, slots=True)
class Calls:
    """Calls of blocks' modules, by their numbers: how many ops of the step had run when the last tensor was ``saved``
    in one (left out where backward asks for none), after which op the last of those was let go (``kept``), the roots
    of its arguments (``given``), the bytes of what it puts other tensors in the place of (``replaced``)."""

    saved: Mapping[int, int] = field(default_factory=dict)
    kept: Mapping[int, int] = field(default_factory=dict)
    given: Mapping[int, Sequence[int]] = field(default_factory=dict)
    replaced: Mapping[int, int] = field(default_factory=dict)


def cut(
    ops: Sequence[Recorded], tensors: Sequence[Tensor], calls: Calls
) -> tuple[tuple[Segment, ...], tuple[Visit, ...]]:
    """The segments and visits of a step. Calls of a module that follow each other are visits of their own.


    ``tensors`` are all tensors by id, ``root`` being an id too; those that no op makes are the sources and come
    first. The tensors that the ops make have ids in the order of the ops. Two visits share a segment when their ops
    and own tensors are equal and what comes from outside has the same bytes and dtypes.
    """
    segments: dict[tuple[Segment, tuple[tuple[int, str], ...]], int] = {}
    visits: list[Visit] = []
    begin = 0
    while begin < len(ops):
        end = begin + 1
        while end < len(ops) and _place(ops[end]) == _place(ops[begin]):
            end += 1
        saves_until = _saves_until(ops, begin, end, calls)
        call = ops[begin].call if saves_until != NO_SAVES else 0
        given = calls.given.get(call, ())
        segment, ports, first_tensor = _localise(ops[begin:end], tensors, saves_until, given)
        segment = replace(segment, replaced_nbytes=calls.replaced.get(call, 0))
        outside = tuple((tensors[p].nbytes, tensors[p].dtype) for p in ports)
        number = segments.setdefault((segment, outside), len(segments))
        if first_tensor is None:
            first_tensor = _next_tensor(visits, segments, len(tensors), ops)
        kept_until = calls.kept.get(call, NO_SAVES) if call else NO_SAVES
        visits.append(Visit(number, ops[begin].block, ops[begin].phase, ports, begin, first_tensor, kept_until))
        begin = end
    return tuple(segment for segment, _ in segments), tuple(visits)


def _place(op: Recorded) -> tuple[str, int, Phase]:
    return op.block, op.call, op.phase


def _saves_until(ops: Sequence[Recorded], begin: int, end: int, calls: Calls) -> int:
    last = calls.saved.get(ops[begin].call, NO_SAVES)
    if not ops[begin].block or ops[begin].phase is Phase.BACKWARD or last < begin:
        return NO_SAVES
    return min(last, end) - begin


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


def _localise(
    ops: Sequence[Recorded], tensors: Sequence[Tensor], saves_until: int, given: Sequence[int]
) -> tuple[Segment, tuple[int, ...], int | None]:
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
        spent, released = sorted(references(op.spent)), sorted(references(op.released))
        gone = (tuple(dropped), tuple(unsaved), gradients, tuple(spent), tuple(released))
        # As they come: the order in which autograd saves is the one in which activations leave.
        made.append(Op(op.work, inputs, outputs, *gone, references(op.packed)))
    kept = []
    for number in own:
        tensor = tensors[number]
        kept.append(Tensor(tensor.nbytes, tensor.dtype, tensor.kind, reference(tensor.root), tensor.saved, tensor.name))
    arguments = tuple(dict.fromkeys(references(given)))
    return Segment(tuple(made), tuple(kept), saves_until, arguments), tuple(ports), own[0] if own else None
