"""The bytes that a trace has live after each op, and the footprint that follows from them: reckoned once more, as plain
as can be, to compare with what ``forebay.lowering`` makes of traces."""

from __future__ import annotations

from collections.abc import Iterator

from forebay.memory import Kind
from forebay.trace import Footprint, Phase, Trace

__all__ = ["footprint_of", "live_bytes"]


def live_bytes(trace: Trace, *, keep_gradients: bool = False) -> Iterator[tuple[Phase, int]]:
    """For each op its phase and the bytes that are live when it has run, before anything of it goes away.

    Counted are the tensors that the step makes, not its sources. A gradient counts until it is complete, or with
    ``keep_gradients`` to the end.
    """
    root_of = {}
    roots = {}
    for number, tensor in trace.tensors():
        root_of[number] = tensor.root
        if tensor.root == number:
            roots[number] = tensor
    sources = len(trace.sources)
    live: dict[int, int] = {}
    seen: set[int] = set()
    dropped: set[int] = set()
    unsaved: set[int] = set()
    total = 0
    for _, visit, op in trace.ops():
        for reference in op.outputs:
            number = visit.resolve(reference)
            if number >= sources and number in roots and number not in seen:
                seen.add(number)
                live[number] = roots[number].nbytes
                total += live[number]
        yield visit.phase, total
        dropped.update(visit.resolve(r) for r in op.dropped)
        unsaved.update(visit.resolve(r) for r in op.unsaved)
        gone = {visit.resolve(r) for r in (*op.dropped, *op.unsaved)}
        if not keep_gradients:
            gone |= {root_of[visit.resolve(g.tensor)] for g in op.gradients}
        for number in gone:
            tensor = roots[number]
            ended = tensor.kind is Kind.GRADIENT or (number in dropped and (not tensor.saved or number in unsaved))
            if ended:
                total -= live.pop(number, 0)


def footprint_of(trace: Trace) -> Footprint:
    """What planners reckon with: the peak of a step's own tensors, gradients until they are complete.

    Covers the outputs of the pass before, which a loop holds while the next forward runs, and the loss that it may
    compute outside of the model.
    """
    forward = peak = 0
    for phase, nbytes in live_bytes(trace):
        peak = max(peak, nbytes)
        if phase is Phase.FORWARD:
            forward = max(forward, nbytes)
    inputs = sum(tensor.nbytes for tensor in trace.sources if tensor.kind is Kind.INPUT)
    peak = max(peak, forward + trace.held_nbytes) + trace.unseen_nbytes
    return Footprint(peak, inputs, measured=True)
