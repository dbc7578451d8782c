"""The ops of a block's forward as a graph: who reads what whom has made, what is arithmetic, where attention is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from forebay.simulation import Costs
from forebay.trace import Segment

__all__ = ["Name", "Node", "OpGraph"]

Name = tuple[str, int]
"""An op by its overload and its occurrence in the block's forward, as a plan names it."""

FUSED: Final = "scaled_dot_product"
"""Part of the name of every op that is all of attention."""

SOFTMAX: Final = frozenset({"aten._softmax.default", "aten._safe_softmax.default"})

BATCHED: Final = frozenset({"aten.bmm.default", "aten.baddbmm.default"})
"""Products of two activations, as attention that is written out has them before and behind its softmax."""


@dataclass(frozen=True, slots=True)
class Node:
    """One op: its name, what it computes (FLOPs) and how long (seconds), and the places of the ops of the same block
    whose bytes it reads, views followed. ``view``: it makes no bytes of its own."""

    name: Name
    flops: int
    seconds: float
    reads: tuple[int, ...]
    view: bool


@dataclass(frozen=True)
class OpGraph:
    """The ops of one segment in their order."""

    nodes: tuple[Node, ...]

    @classmethod
    def of(cls, costs: Costs, segment: Segment) -> OpGraph:
        """From a segment of the trace of ``costs``. What is written in place keeps the op that made its bytes."""
        maker: dict[int, int] = {}
        runs: Counter[str] = Counter()
        nodes = []
        for place, op in enumerate(segment.ops):
            work = costs.trace.works[op.work]
            roots = (segment.tensors[r].root if r >= 0 else r for r in op.inputs)
            reads = tuple(dict.fromkeys(maker[root] for root in roots if root in maker))
            own = [r for r in op.outputs if r >= 0 and segment.tensors[r].root == r]
            maker.update(dict.fromkeys(own, place))
            nodes.append(Node((work.op, runs[work.op]), work.flops, costs.work(op.work).seconds, reads, not own))
            runs[work.op] += 1
        return cls(tuple(nodes))

    @cached_property
    def places(self) -> dict[Name, int]:
        """The place of each op."""
        return {node.name: place for place, node in enumerate(self.nodes)}

    @cached_property
    def products(self) -> frozenset[Name]:
        """Ops that do arithmetic worth counting: products of matrices, convolutions, attention."""
        return frozenset(node.name for node in self.nodes if node.flops)

    @cached_property
    def fused_attention(self) -> frozenset[Name]:
        """Ops that are all of attention."""
        return frozenset(node.name for node in self.nodes if FUSED in node.name[0])

    @cached_property
    def attention_core(self) -> frozenset[Name]:
        """What attention computes between queries, keys and values and its result: one op, or those from the product of
        queries and keys over the softmax to the product with the values, both included."""
        found = set(self.fused_attention)
        for place, node in enumerate(self.nodes):
            if node.name[0] in SOFTMAX:
                found.update(self._around(place))
        return frozenset(found)

    def _around(self, softmax: int) -> set[Name]:
        """The ops on the ways from a product of activations to ``softmax`` and on to the next one; none where there is
        no such product on one of the two sides."""
        readers: dict[int, list[int]] = {}
        for place, node in enumerate(self.nodes):
            for read in node.reads:
                readers.setdefault(read, []).append(place)
        before = self._ways(softmax, lambda place: self.nodes[place].reads)
        behind = self._ways(softmax, lambda place: readers.get(place, ()))
        return {self.nodes[place].name for place in before | behind} if before and behind else set()

    def _ways(self, start: int, following: Callable[[int], Iterable[int]]) -> set[int]:
        """The ops on the ways from ``start`` to the first product, where that is one of activations; a way that ends
        elsewhere has none."""
        found: set[int] = set()
        known: dict[int, bool] = {}

        def leads(place: int) -> bool:
            if place not in known:
                node = self.nodes[place]
                if node.flops and place != start:
                    known[place] = node.name[0] in BATCHED
                else:
                    known[place] = any([leads(other) for other in following(place)])
                if known[place]:
                    found.add(place)
            return known[place]

        leads(start)
        return found
