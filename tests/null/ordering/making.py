"""Graphs of a few ops for tests, and the least peak that any order of them has."""

from __future__ import annotations

from itertools import permutations

from hypothesis import strategies as st

from forebay.op_graph import GraphOp, GraphTensor, OpGraph

__all__ = ["graphs", "least_peak", "live_while", "step"]


@st.composite
def graphs(draw: st.DrawFn, most: int = 7) -> OpGraph:
    """Up to ``most`` ops, some of which make several tensors, none, or one that stays."""
    count = draw(st.integers(1, most))
    tensors = []
    for maker in range(count):
        for _ in range(draw(st.integers(0, 2))):
            later = st.sets(st.integers(maker + 1, count - 1), max_size=3) if maker + 1 < count else st.just(set())
            readers = tuple(sorted(draw(later)))
            tensors.append(GraphTensor(draw(st.integers(0, 9)), maker, readers, draw(st.integers(0, 5)) == 0))
    after = [draw(st.sets(st.integers(0, op - 1), max_size=1)) if op else set[int]() for op in range(count)]
    return OpGraph(tuple(GraphOp(f"op{op}", tuple(after[op])) for op in range(count)), tuple(tensors))


def allowed(graph: OpGraph) -> list[tuple[int, ...]]:
    """All orders in which the ops may run."""
    every = permutations(range(len(graph.ops)))
    return [o for o in every if all(set(graph.needs[op]) <= set(o[:at]) for at, op in enumerate(o))]


def least_peak(graph: OpGraph) -> int:
    """By trying every order."""
    return min(graph.peak(order) for order in allowed(graph))


def live_while(graph: OpGraph, op: int) -> int:
    """The fewest bytes live while ``op`` runs, by trying every order."""
    found = []
    for order in allowed(graph):
        at = order.index(op)
        found.append(sum(b.size for b in graph.buffers(order) if b.lower <= at < b.upper))
    return min(found)


def step(layers: int, activation: int = 100, gradient: int = 40) -> OpGraph:
    """A step of so many layers: forward, backward, which makes a gradient beside each layer's and then the layer's own,
    and updates behind all of it."""
    ops, tensors = [], []
    forward, backward = range(layers), range(layers, 3 * layers)
    for layer in forward:
        ops.append(GraphOp(f"forward {layer}"))
        own = 3 * layers - 2 * layer - 2
        tensors.append(GraphTensor(activation, layer, tuple(dict.fromkeys((layer + 1, own, own + 1)))))
    for place in backward:
        layer = (3 * layers - 1 - place) // 2
        update = 3 * layers + layer
        if (place - layers) % 2 == 0:  # of the parameters
            ops.append(GraphOp(f"gradient {layer}"))
            tensors.append(GraphTensor(gradient, place, (update,)))
        else:
            ops.append(GraphOp(f"backward {layer}"))
            tensors.append(GraphTensor(activation // 2, place, (place + 1, place + 2) if layer else ()))
    return OpGraph((*ops, *(GraphOp(f"update {layer}") for layer in range(layers))), tuple(tensors))
