"""Steps of models played to models of allocators, laid out, and put into another order. Nothing of them is computed.

scripts/bench traces
scripts/bench traces gpt2 resnet-50
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from benchmarks.case import among
from benchmarks.provenance import provenance
from benchmarks.traces.models import MODELS, Shape
from benchmarks.traces.record import Comparison, Played, Sorted, Way
from forebay.buffers import Addresses, Buffer, BufferSet
from forebay.checking.addresses import check_addresses
from forebay.checking.orders import check_order
from forebay.lowering import step_buffers, step_graph
from forebay.memory import ALIGNMENT
from forebay.planners.layout import lay_out
from forebay.planners.ordering import order_ops
from forebay.recording import recording_of
from forebay.simulation.allocators import ALLOCATORS, replay
from forebay.trace import Trace

__all__ = ["compare", "played", "played_in_words", "sorted_in_words", "sorted_step"]

STEPS: Final = 2
"""So often a step is played: in the second an allocator has what the first has left."""

SHORT: Final = 128
"""Tokens in the one sequence of the smaller step that is put into another order too: where activations are many, they
decide, and where there are few, gradients do."""


def compare(models: Sequence[str], command: str, say: Callable[[str], None]) -> Comparison:
    """The steps of ``models`` (none: all). Raises ``BenchmarkError`` for one that there is not."""
    origin = provenance(command)
    rows, orders = list[Played](), list[Sorted]()
    for name in among("model", models, tuple(MODELS)):
        shape = MODELS[name]
        small = replace(shape, batch=1, seq=min(shape.seq, SHORT))
        trace = shape.traced(name, shape.batch, shape.seq)
        for way in Way:
            rows.append(played(name, shape, way, trace))
            say(played_in_words(rows[-1]))
        for one, step in ((shape, trace), (small, small.traced(name, small.batch, small.seq))):
            orders.append(sorted_step(name, one, step))
            say(sorted_in_words(orders[-1]))
    return Comparison(**origin, played=tuple(rows), sorted=tuple(orders))


def played(name: str, shape: Shape, way: Way, trace: Trace) -> Played:
    """One step in one way."""
    blocks = [block.name for block in trace.model.blocks if block.module is not None]
    buffers = step_buffers(trace, blocks if way is Way.RECOMPUTED else ())
    began = time.process_time()
    found = _laid(buffers)
    spent = time.process_time() - began
    recording = recording_of(buffers, STEPS)
    reserved = {n: replay(n, recording, partial(make, recording)).peak_reserved for n, make in ALLOCATORS.items()}
    live = found.lower_bound
    return Played(name, str(shape), way, len(buffers), live, reserved, found.height, found.solve_seconds, spent)


def sorted_step(name: str, shape: Shape, trace: Trace) -> Sorted:
    """One step in another order."""
    graph = step_graph(trace)
    began = time.process_time()
    found = order_ops(graph)
    spent = time.process_time() - began
    check_order(found)
    height = _laid(graph.buffers(found.order)).height
    ops = len(graph.ops)
    return Sorted(name, str(shape), ops, found.program_peak, found.peak, found.lower_bound, height, spent)


def _laid(buffers: Sequence[Buffer]) -> Addresses:
    found = lay_out(BufferSet(tuple(replace(buffer, alignment=ALIGNMENT) for buffer in buffers)))
    check_addresses(found)
    return found


def played_in_words(one: Played) -> str:
    """A line about ``one``."""
    shares = ", ".join(f"{name} {one.over(nbytes):.1%}" for name, nbytes in one.reserved.items())
    return (
        f"{one.model}, {one.shape}, {one.way}: {one.buffers} buffers, {one.live} bytes live; over that: addresses "
        f"{one.over(one.height):.3%} in {one.solve_seconds:.2f} s, {shares}"
    )


def sorted_in_words(one: Sorted) -> str:
    """A line about ``one``."""
    return (
        f"{one.model}, {one.shape}: {one.ops} ops, {one.program} bytes live in program order, {one.found} in "
        f"{one.cpu_seconds:.2f} s of the processor, {one.bound} at the least; addresses {one.height}"
    )
