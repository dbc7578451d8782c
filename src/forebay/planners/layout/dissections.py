"""Buffers that leave nothing free, as edges of a graph that is to be drawn without crossings. No torch.

Where every byte is in use at every time, a layout is a dissection of a rectangle of time and memory into rectangles.
Its *segments*, the longest lines along which it is one time, are nodes of a graph; a buffer is an edge from the segment
at which it comes to the one at which it goes, and as many bytes come into a segment as leave it. The graph can be drawn
without crossings, from the first moment to the last. And every such drawing is a layout: a face of it is an address, as
many bytes above the next one as the edge between them has, whichever way one comes there (Brooks, Smith, Stone and
Tutte, "The dissection of rectangles into squares", Duke Mathematical Journal 7, 1940; Tamassia and Tollis, "A unified
approach to visibility representations of planar graphs", Discrete & Computational Geometry 1, 1986).

Which of the buffers that go and come at one time are at one segment is not given: their bytes have to balance, which at
most times leaves one way, all at one. Memory that nobody has is taken for buffers too: as much as goes at a time
without another coming is one from then on, until as much comes without another going.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import gcd

import networkx as nx
import numpy as np
import rustworkx as rx

from forebay.planners.layout.table import Column, Table

__all__ = ["Edge", "Moment", "Segment", "addresses", "drawn", "edges_of", "moments_of"]

FIRST, LAST = "first", "last"
"""The nodes at which everything begins and ends."""

TOGETHER = 3
"""Free pieces, at most, that are looked at together to find who ends with what comes."""

LOOSE = 24
"""Free pieces, at most, of which some are looked for that end together."""

MANY = 14
"""Edges that end at one time, or begin, beyond which they are taken to be at one segment: there are too many ways to
share more of them."""

WAYS = 60
"""Ways to share the buffers of one time, those with the fewest segments first, that are told apart."""

CHANCE = 1.0
"""Ways to balance by chance at one time below which one with more segments is the likelier: if bytes balance although
that was not to be expected, it is because they are at several segments."""

Segment = tuple[tuple[int, ...], tuple[int, ...]]
"""The edges that end at a segment, and those that begin there."""

Way = tuple[Segment, ...]
"""All segments of one time."""


@dataclass(frozen=True, slots=True)
class Edge:
    """A buffer, or a piece of free memory: from which to which rank of time it is there, and its bytes."""

    lower: int
    upper: int
    size: int


@dataclass(frozen=True, slots=True)
class Moment:
    """A rank of time, and the ways to share the edges that end and begin there among segments, the likeliest first."""

    time: int
    ways: tuple[Way, ...]


def edges_of(table: Table, capacity: int) -> tuple[Edge, ...]:
    """The buffers of ``table``, whose number is their row, and behind them what is free of ``capacity`` bytes."""
    times = np.unique(np.concatenate([table.lower, table.upper]))
    lower, upper = np.searchsorted(times, table.lower), np.searchsorted(times, table.upper)
    edges = [Edge(*row) for row in zip(lower.tolist(), upper.tolist(), table.size.tolist(), strict=True)]
    free = capacity - table.live[times]
    free[-1] = 0  # all are gone at the last moment
    pieces: list[tuple[int, int]] = []  # since when, bytes
    for time, change in enumerate(np.diff(free, prepend=0).tolist()):
        if change > 0:
            pieces.append((time, change))
        elif change < 0:
            edges += [Edge(since, time, nbytes) for since, nbytes in _ended(pieces, -change)]
    return tuple(edges)


def _ended(pieces: list[tuple[int, int]], nbytes: int) -> list[tuple[int, int]]:
    """Takes from the free ``pieces`` so many bytes: some of them that have just as many together, the latest first, or
    parts of the largest."""
    for count in range(1, TOGETHER + 1) if len(pieces) <= LOOSE else (1,):
        for chosen in combinations(reversed(pieces), count):
            if sum(size for _, size in chosen) == nbytes:
                for piece in chosen:
                    pieces.remove(piece)
                return list(chosen)
    taken = []
    while nbytes:
        since, size = largest = max(pieces, key=lambda piece: piece[1])
        pieces.remove(largest)
        part = min(size, nbytes)
        taken.append((since, part))
        nbytes -= part
        if size > part:
            pieces.append((since, size - part))
    return taken


def moments_of(edges: Sequence[Edge]) -> tuple[Moment, ...]:
    """All times between the first and the last."""
    ends, begins = (dict[int, list[int]]() for _ in range(2))
    for number, edge in enumerate(edges):
        begins.setdefault(edge.lower, []).append(number)
        ends.setdefault(edge.upper, []).append(number)
    unit = gcd(*(edge.size for edge in edges))
    sizes = [edge.size // unit for edge in edges]
    return tuple(Moment(time, _ordered(ends[time], begins[time], sizes)) for time in sorted(ends) if time in begins)


def _ordered(ends: Sequence[int], begins: Sequence[int], sizes: Sequence[int]) -> tuple[Way, ...]:
    """The ways to share what ends and begins at one time, the likeliest first. There are so many pairs of a part of the
    one and a part of the other, and each has a sum between nothing and all."""
    ways = _ways(ends, begins, sizes)
    pairs = 2.0 ** (len(ends) + len(begins) - 2)
    return ways[::-1] if pairs < CHANCE * sum(sizes[n] for n in ends) else ways


def _ways(ends: Sequence[int], begins: Sequence[int], sizes: Sequence[int]) -> tuple[Way, ...]:
    """The ways to share what ends and begins at one time, those with the fewest segments first."""
    one: Way = ((tuple(ends), tuple(begins)),)
    if max(len(ends), len(begins)) > MANY:
        return (one,)
    found = [one]
    for segments in range(2, min(len(ends), len(begins)) + 1):
        more = 0
        for way in _shared(tuple(ends), tuple(begins), sizes, segments):
            if len(found) == WAYS:
                return tuple(found)
            found.append(way)
            more += 1
        if not more:
            break  # two of more segments are one of fewer
    return tuple(found)


def _shared(ends: tuple[int, ...], begins: tuple[int, ...], sizes: Sequence[int], segments: int) -> Iterator[Way]:
    """The ways to share them among so many segments, each of which has as many bytes that end as begin."""
    if segments == 1:
        if sum(sizes[n] for n in ends) == sum(sizes[n] for n in begins):
            yield ((ends, begins),)
        return
    by_sum: dict[int, list[tuple[int, ...]]] = {}
    for count in range(1, len(begins) - segments + 2):
        for some in combinations(begins, count):
            by_sum.setdefault(sum(sizes[n] for n in some), []).append(some)
    first, others = ends[0], ends[1:]
    for count in range(len(ends) - segments + 1):
        for beside in combinations(others, count):
            own = (first, *beside)
            for some in by_sum.get(sum(sizes[n] for n in own), ()):
                left = tuple(n for n in ends if n not in own), tuple(n for n in begins if n not in some)
                for way in _shared(*left, sizes, segments - 1):
                    yield (own, some), *way


def _placed(edges: Sequence[Edge], ways: Sequence[tuple[int, Way]]) -> tuple[list[object], list[object]]:
    """Of every edge the segment at which it begins and the one at which it ends; None where that is not decided."""
    last = max(edge.upper for edge in edges)
    tails: list[object] = [FIRST if edge.lower == 0 else None for edge in edges]
    heads: list[object] = [LAST if edge.upper == last else None for edge in edges]
    for time, way in ways:
        for number, (ended, begun) in enumerate(way):
            for n in ended:
                heads[n] = time, number
            for n in begun:
                tails[n] = time, number
    return tails, heads


def drawn(edges: Sequence[Edge], ways: Sequence[tuple[int, Way]]) -> bool:
    """Whether the graph of ``ways``, of as many times as are decided, can be drawn without crossings. An edge of which
    one end is not decided crosses nothing."""
    number: dict[object, int] = {FIRST: 0, LAST: 1}  # of a segment, in the order in which they are met
    lines = [(0, 1)]
    for tail, head in zip(*_placed(edges, ways), strict=True):
        if tail is not None and head is not None:
            lines.append((number.setdefault(tail, len(number)), number.setdefault(head, len(number))))
    graph = rx.PyGraph(multigraph=False)
    graph.extend_from_edge_list(lines)
    return bool(rx.is_planar(graph))


def addresses(edges: Sequence[Edge], ways: Sequence[tuple[int, Way]], count: int) -> Column:
    """The addresses of the first ``count`` edges in a drawing of the graph of ``ways``, which are of all times."""
    graph = nx.Graph([(FIRST, LAST)])
    tails, heads = _placed(edges, ways)
    for number, (tail, head) in enumerate(zip(tails, heads, strict=True)):
        graph.add_edge(tail, number)  # by way of a node of its own: several edges may join the same two segments
        graph.add_edge(number, head)
    drawing = nx.check_planarity(graph)[1]
    face: dict[object, int] = {}  # the one to the left of each direction of each line
    for faces, line in enumerate(drawing.edges()):
        if line not in face:
            around: set[object] = set()
            drawing.traverse_face(*line, mark_half_edges=around)
            face |= dict.fromkeys(around, faces)
    return _heights(edges, [(face[tail, n], face[n, tail]) for n, tail in enumerate(tails)], face[FIRST, LAST])[:count]


def _heights(edges: Sequence[Edge], sides: Sequence[tuple[int, int]], outside: int) -> Column:
    """Of every edge the lower of the heights of the faces on its two ``sides``, which are its bytes apart."""
    beside: dict[int, list[tuple[int, int]]] = {}
    for edge, (one, other) in zip(edges, sides, strict=True):
        beside.setdefault(one, []).append((other, edge.size))
        beside.setdefault(other, []).append((one, -edge.size))
    height, waiting = {outside: 0}, [outside]
    while waiting:
        here = waiting.pop()
        for there, step in beside.get(here, ()):
            if there not in height:
                height[there] = height[here] + step
                waiting.append(there)
    lowest = [min(height[one], height[other]) for one, other in sides]
    return np.array(lowest, np.int64) - min(lowest)
