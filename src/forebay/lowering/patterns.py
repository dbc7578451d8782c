"""A segment turned round: what is the same in all visits of it, looked up once. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import final

from forebay.trace import Segment, Work

__all__ = ["Pattern"]


@final
class Pattern:
    """What is the same in all visits of a segment; tensors are references, ops are their places in it, and ports those
    of ``Visit.ports``.

    ``roots_of`` has the root of every tensor, ``made`` the roots that it makes (reference, op that makes it, bytes,
    kind, whether autograd saves it), ``made_by`` their references by the op. ``drops``, ``unsaves``, ``spent``,
    ``released`` and ``packed`` are pairs of an op and a root, as in ``trace.Op``; ``gradients`` are (op, parameter,
    tensor). ``given`` are ports, of its arguments. ``readers`` are ports with the ops that read them, by themselves or
    by way of a view that is made here of them, and ``late`` roots that are made here and complete as a gradient, with
    the last op that reads them. After an op of ``ends`` a node of autograd is over: what it had saved is let go, or its
    gradient is complete. ``written`` are roots that an op writes to which does not make them. ``names`` are places of
    ops by overload and occurrence: of those that a plan may name.
    """

    def __init__(self, segment: Segment, works: tuple[Work, ...]) -> None:
        self.length = len(segment.ops)
        self.saves_until = segment.saves_until
        self.roots_of = tuple(t.root for t in segment.tensors)
        born: dict[int, int] = {}
        for index, op in enumerate(segment.ops):
            for reference in op.outputs:
                born.setdefault(reference, index)
        self.made = tuple(
            (reference, born.get(reference, 0), t.nbytes, t.kind, t.saved)
            for reference, t in enumerate(segment.tensors)
            if t.root == reference
        )
        self.made_by: dict[int, tuple[int, ...]] = {}
        for reference, index, *_ in self.made:
            self.made_by[index] = (*self.made_by.get(index, ()), reference)
        self.drops = tuple((i, r) for i, op in enumerate(segment.ops) for r in op.dropped)
        self.unsaves = tuple((i, r) for i, op in enumerate(segment.ops) for r in op.unsaved)
        self.spent = tuple((i, r) for i, op in enumerate(segment.ops) for r in op.spent)
        self.released = tuple((i, r) for i, op in enumerate(segment.ops) for r in op.released)
        self.packed = tuple((i, r) for i, op in enumerate(segment.ops) for r in op.packed)
        self.given = tuple(-1 - reference for reference in segment.given if reference < 0)
        self.gradients = tuple((i, g.parameter, g.tensor) for i, op in enumerate(segment.ops) for g in op.gradients)
        self.readers = _readers(segment)
        complete = {segment.tensors[g].root for _, _, g in self.gradients if g >= 0}
        read = {root: i for i, op in enumerate(segment.ops) for root in _roots(segment, op.inputs)}
        self.late = tuple((root, read[root]) for root in sorted(complete & read.keys()) if root >= 0)
        self.ends = tuple(i for i, op in enumerate(segment.ops) if op.unsaved or op.gradients)
        self.written = _written(segment, works)
        self.names = self._names(segment, works)

    def _names(self, segment: Segment, works: tuple[Work, ...]) -> Mapping[tuple[str, int], int]:
        """Places of the ops that make roots which nothing here writes to later, by overload and occurrence. What a
        compiler made has no name at run time; of what an op makes that touches no byte of it, another makes the
        values."""
        good: dict[int, bool] = {}
        for reference, index, nbytes, _, _ in self.made:
            if nbytes:
                good[index] = good.get(index, True) and reference not in self.written
        runs: Counter[str] = Counter()
        names = {}
        for index, op in enumerate(segment.ops):
            work = works[op.work]
            if good.get(index, False) and not work.is_compiled and (work.flops or work.nbytes):
                names[work.op, runs[work.op]] = index
            runs[work.op] += 1
        return MappingProxyType(names)

    def since(self, index: int) -> int:
        """The first op that the node of autograd which ``index`` is part of may have: those before belong to others.
        What a node has saved is asked for when it begins."""
        return max((end + 1 for end in self.ends if end < index), default=0)


def _readers(segment: Segment) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Ports with the ops that read them, each once."""
    readers: dict[int, dict[int, None]] = {}
    for index, op in enumerate(segment.ops):
        for reference in op.inputs:
            root = reference if reference < 0 else segment.tensors[reference].root
            if root < 0:
                readers.setdefault(root, {})[index] = None
    return tuple((-1 - port, tuple(ops)) for port, ops in readers.items())


def _written(segment: Segment, works: tuple[Work, ...]) -> frozenset[int]:
    """References of the roots that an op writes to which does not make them."""
    known: set[int] = set()
    found: set[int] = set()
    for op in segment.ops:
        roots = _roots(segment, op.outputs)
        if works[op.work].flops or works[op.work].nbytes:  # no view
            found.update(root for root in roots if root < 0 or root in known)
        known.update(roots)
    return frozenset(found)


def _roots(segment: Segment, references: tuple[int, ...]) -> set[int]:
    return {reference if reference < 0 else segment.tensors[reference].root for reference in references}
