"""A trace as the graph of its ops. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, final

from forebay.lowering.index import NEVER, TraceIndex
from forebay.memory import Kind
from forebay.op_graph import GraphOp, GraphTensor, OpGraph
from forebay.trace import Op, Trace, Visit

__all__ = ["step_graph"]

ATTENTION: Final = "scaled_dot_product"
"""Part of the names of ops that may draw random numbers: who draws does so in one order, to draw the same ones."""

STATISTICS: Final = "batch_norm"
"""Part of the names of ops that write to buffers which they are said to read."""

BACKWARD: Final = "backward"
"""Part of the names of ops that belong to a node of autograd, which draw nothing and keep no statistics."""


def step_graph(trace: Trace) -> OpGraph:
    """The ops of one step in plain PyTorch, without views, and behind them one update for each parameter that gets a
    gradient: it reads that and overwrites the parameter. What nobody lets go of in the trace is kept until the end.
    Parameters, states and inputs are there before and after the step, and not in the graph."""
    graph = _Graph(trace)
    for number, visit, op in trace.ops():
        graph.add(number, visit, op)
    graph.add_updates()
    return graph.made()


@final
class _Graph:
    """Gathers ops in the order in which they run."""

    def __init__(self, trace: Trace) -> None:
        self._index = TraceIndex(trace)
        self._trace = trace
        self._ops: list[GraphOp] = []
        self._maker: dict[int, int] = {}
        self._readers: dict[int, list[int]] = {}
        # By root: who has written to it last, and who has read it since.
        self._writer: dict[int, int] = {}
        self._read_since: dict[int, list[int]] = {}
        self._drew: int | None = None
        self._gradients: dict[int, int] = {}  # of each parameter its root
        self._born: dict[int, list[int]] = {}
        for root, about in self._index.roots.items():
            self._born.setdefault(about.birth, []).append(root)

    def add(self, number: int, visit: Visit, op: Op) -> None:
        """One op of the trace; ``number`` is its own there."""
        work = self._trace.works[op.work]
        made = self._born.get(number, [])
        if made or work.flops or work.nbytes:
            reads = self._roots(visit, op.inputs)
            writes = [root for root in self._roots(visit, op.outputs) if root not in made]
            forward = BACKWARD not in work.op
            if forward and STATISTICS in work.op:
                writes += [root for root in reads if self._is_buffer(root)]
            draws = forward and (work.draws or ATTENTION in work.op)
            self._append(work.op, reads, writes, draws=draws)
            for root in made:
                self._maker[root] = self._writer[root] = len(self._ops) - 1
        for gradient in op.gradients:
            self._gradients[visit.resolve(gradient.parameter)] = self._index.root_of(visit.resolve(gradient.tensor))

    def add_updates(self) -> None:
        """One op for each parameter that gets a gradient, in the order of the parameters."""
        for parameter, root in sorted(self._gradients.items()):
            self._append(f"update {self._trace.sources[parameter].name}", [root], [parameter])

    def made(self) -> OpGraph:
        """The graph."""
        tensors = []
        for root, maker in self._maker.items():
            about = self._index.roots[root]
            kept = about.completes == NEVER and about.drop == NEVER
            readers = tuple(dict.fromkeys(r for r in self._readers.get(root, ()) if r > maker))
            tensors.append(GraphTensor(about.nbytes, maker, readers, kept))
        return OpGraph(tuple(self._ops), tuple(tensors))

    def _append(self, name: str, reads: list[int], writes: list[int], *, draws: bool = False) -> None:
        place, behind = len(self._ops), list[int]()
        for root in (*reads, *writes):
            behind += [self._writer[root]] if root in self._writer else []
        for root in writes:
            behind += self._read_since.get(root, [])
        if draws and self._drew is not None:
            behind.append(self._drew)
        self._drew = place if draws else self._drew
        for root in (*reads, *writes):
            self._readers.setdefault(root, []).append(place)
            self._read_since.setdefault(root, []).append(place)
        for root in writes:
            self._writer[root], self._read_since[root] = place, []
        makers = {self._maker[root] for root in (*reads, *writes) if root in self._maker}
        self._ops.append(GraphOp(name, tuple(sorted({*behind} - makers))))

    def _roots(self, visit: Visit, references: Iterable[int]) -> list[int]:
        return list(dict.fromkeys(self._index.root_of(visit.resolve(reference)) for reference in references))

    def _is_buffer(self, root: int) -> bool:
        return root < len(self._trace.sources) and self._trace.sources[root].kind is Kind.BUFFER
