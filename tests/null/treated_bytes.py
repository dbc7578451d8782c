"""Bytes of what a plan's treatments move, encode and leave as it is, counted from the trace. No torch."""

from __future__ import annotations

from fractions import Fraction
from math import ceil

from forebay.trace import Phase, Trace
from forebay.treatments import Fate, Selection, Split

__all__ = ["coded_bytes", "codes_nbytes", "moved_bytes", "part_nbytes", "treated_roots"]


def moved_bytes(trace: Trace, activations: tuple[Selection, ...], fate: Fate = Fate.OFFLOAD) -> list[int]:
    """Bytes of what ``activations`` move to the host (or to where ``fate`` says) in one pass: of roots of 4096 bytes or
    more, each by its op, of their parts, or of codes."""
    return [codes_nbytes(*one) for one, where, _ in treated_roots(trace, activations) if where is fate]


def coded_bytes(trace: Trace, activations: tuple[Selection, ...]) -> list[int]:
    """The most bytes that each root that is encoded takes beside itself: codes, and 24 bytes an element to work in."""
    encoded = [one for one, *_ in treated_roots(trace, activations) if one[2]]
    return [codes_nbytes(*one) + 24 * (-(-one[0] // one[1]) + 256) for one in encoded]


def part_nbytes(nbytes: int, split: Split | None) -> int:
    """Bytes of the first parts of ``nbytes`` that ``split`` is about, up to the next cache line."""
    if split is None:
        return nbytes
    exact = Fraction(nbytes * split.treated, split.parts)
    return min(nbytes, 64 * ceil(exact / 64))


def codes_nbytes(nbytes: int, itemsize: int, bits: int) -> int:
    """Bytes of ``nbytes`` as ``bits`` bits an element: two numbers for each 256, and the codes."""
    if not bits:
        return nbytes
    elements = nbytes // itemsize
    return 2 * itemsize * -(-elements // 256) + -(-elements * bits // 8)


def treated_roots(trace: Trace, activations: tuple[Selection, ...]) -> list[tuple[tuple[int, int, int], Fate, int]]:
    """(bytes, bytes of an element, bits) and fate of what is treated of every root of 4096 bytes or more of a treated
    op, and the bytes of that root."""
    found = []
    for visit in trace.visits:
        treatments = next((s.treatments for s in activations if visit.block in s.blocks), ())
        if visit.phase is Phase.BACKWARD:
            continue
        segment = trace.segments[visit.segment]
        names = [trace.works[op.work].op for op in segment.ops]
        for treatment in treatments:
            places = [i for i, name in enumerate(names) if name == treatment.op]
            made = [segment.tensors[t] for t in segment.ops[places[treatment.occurrence]].outputs]
            for tensor in made:
                if tensor.nbytes >= 4096:
                    itemsize = 2 if tensor.dtype == "bfloat16" else 4
                    part = part_nbytes(tensor.nbytes, treatment.split)
                    found.append(((part, itemsize, treatment.bits), treatment.fate, tensor.nbytes))
    return found
