"""``autotm``: which tensors go to the slow memory and back, by integer programming.

Hildebrand, Khan, Trika, Lowe-Power and Akella, "AutoTM: automatic tensor movement in heterogeneous memory systems using
integer linear programming", ASPLOS 2020. Every tensor has a flow network over its uses: it is in the fast memory or in
the slow one, and edges between them are copies, which hold up the kernels (synchronous) or run beside them
(asynchronous). Least time of kernels and of copies that nothing hides, with the fast memory's capacity at every kernel.

Ours departs in four things. Kernels read the device's memory alone: with a link between them, that is the paper's GPU
variant. A saved tensor has one gap, from its forward to its backward, so that its network is one decision, moved or
not. Copies are asynchronous, and those of a direction follow each other: q(b) >= q(b - 1) - seconds(b) - wait(b) +
out(b) for what the link is behind after block b, and so for the way back (``chaining``); what it is behind at the
turn is exposed. Capacity is at the beginning of each block's backward. And the search stops after a number of
relaxations with what it has found.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from forebay.planners.activations.items import Item
from forebay.planners.activations.literature.branching import THRESHOLDS, Found, Programme, affordable, branch_and_bound
from forebay.planners.activations.literature.chained import links_of
from forebay.planners.activations.literature.chaining import Link
from forebay.planners.activations.literature.layers import Choice, Layer, every_moved
from forebay.planners.activations.literature.placing import Answer, Room, placed, searched
from forebay.planners.activations.menu import Option
from forebay.planners.bench import Bench
from forebay.planners.parts import KEPT
from forebay.planners.problem import Problem
from forebay.plans import Plan

__all__ = ["autotm"]


def autotm(problem: Problem, bench: Bench | None = None) -> Plan:
    """Raises ``DoesNotFit``, and ``ConfigError`` without a batch."""
    return placed(bench or Bench(problem), "autotm", "what is used when", _decide, every_moved)


def _decide(room: Room) -> Answer | None:
    if room.fits(KEPT):
        return Answer(KEPT)
    links, rate = links_of(room.bench, room.layers), room.bench.costs.machine.leaving.curve.best

    def solve(allowed: int, nodes: int) -> tuple[Choice, Found] | None:
        found = solved(room.layers, links, allowed, rate, nodes)
        return None if found is None else (_choice(room.layers, found.x), found)

    variables = sum(len(_movable(layer)) for layer in room.layers)
    best = searched(room, solve, sum(layer.items.held for layer in room.layers), affordable(variables))
    if best is None:
        return None
    choice, found = best
    moved = sum(len(option.treatments) for option in choice.values())
    return Answer(room.level(choice), (f"{moved} tensors move: {found.proof('exposed')}",))


def solved(layers: Sequence[Layer], links: Sequence[Link], allowed: float, rate: float, nodes: int) -> Found | None:
    """The least seconds that copies expose with ``allowed`` bytes for activations, found in at most ``nodes``
    relaxations; None if nothing fits, or nothing was found. ``rate``: bytes/s at which what leaves does."""
    programme = _programme(layers, links, allowed, rate)
    return branch_and_bound(programme, lambda x: _rounded(programme, layers, links, rate, x), nodes)


def _programme(layers: Sequence[Layer], links: Sequence[Link], allowed: float, rate: float) -> Programme:
    """Variables: every tensor, moved or not; after each layer, what the link is behind, forward and backward, and how
    long compute waits for it in forward, in steps without copies (``_unit``). Rows:
    bytes at the beginning of each layer's backward; bytes at the end of its forward; the two backlogs."""
    able = [_movable(layer) for layer in layers]
    starts = np.cumsum([0, *map(len, able)])
    tensors, count, unit = int(starts[-1]), len(layers), _unit(links)
    kept = np.cumsum([layer.items.held for layer in layers])
    rows: NDArray[Any] = np.zeros((4 * count, tensors + 3 * count))
    for number, items in enumerate(able):
        own = slice(starts[number], starts[number + 1])
        held = np.array([item.held for item in items], float)
        for later in range(number, count):
            rows[later, own] = -held
            rows[count + later, own] = -held
        rows[number, own] += [item.saved for item in items]
        rows[count + number, tensors + number] = rate * unit
        rows[2 * count + number, tensors + 2 * count + number] = -unit
        for direction, seconds in enumerate(("out_seconds", "back_seconds")):
            row, behind = (2 + direction) * count + number, tensors + direction * count + number
            rows[row, own] = [getattr(item, seconds) for item in items]
            rows[row, behind] = -unit
            if number:
                rows[row, behind - 1] = unit
    most = np.r_[
        allowed - kept,
        allowed - kept,
        [0.0 if not n else link.forward for n, link in enumerate(links)],
        [0.0 if not n else link.backward for n, link in enumerate(links)],
    ]
    target = np.zeros(rows.shape[1])
    target[[tensors + count - 1, *range(tensors + 2 * count - 1, tensors + 3 * count)]] = unit
    highest = np.r_[np.ones(tensors), np.full(3 * count, np.inf)]
    return Programme(target, csr_array(rows), most, highest, tensors)


def _unit(links: Sequence[Link]) -> float:
    """Seconds of a step in which nothing is copied."""
    return sum(link.forward + link.backward for link in links) or 1.0


def _movable(layer: Layer) -> list[Item]:
    return [item for item in layer.items.kept if item.moved]


def _rounded(
    programme: Programme, layers: Sequence[Layer], links: Sequence[Link], rate: float, x: NDArray[Any]
) -> NDArray[Any] | None:
    """What moves is what moved by more than some threshold; what the link is behind and how long compute waits for it
    follow from that."""
    count, unit = len(layers), _unit(links)
    for threshold in THRESHOLDS:
        candidate = x.copy()
        candidate[: programme.whole] = x[: programme.whole] >= threshold
        out = back = gone = 0.0
        start = 0
        for number, (layer, link) in enumerate(zip(layers, links, strict=True)):
            items = _movable(layer)
            taken = [i for i, on in zip(items, candidate[start : start + len(items)], strict=True) if on]
            start += len(items)
            gone += sum(item.held for item in taken)
            out = max(0.0, out - link.forward) + sum(item.out_seconds for item in taken)
            back = max(0.0, back - link.backward) + sum(item.back_seconds for item in taken)
            wait = max(0.0, out - max(0.0, programme.most[count + number] + gone) / rate)
            out -= wait
            own = programme.whole + number
            candidate[[own, own + count, own + 2 * count]] = np.array([out, back, wait]) / unit
        if programme.allows(candidate):
            return candidate
    return None


def _choice(layers: Sequence[Layer], x: NDArray[Any]) -> Choice:
    choice, start = {}, 0
    for layer in layers:
        items = _movable(layer)
        values = x[start : start + len(items)]
        start += len(items)
        names = {(item.op, item.occurrence) for item, value in zip(items, values, strict=True) if value > 0.5}
        choice[layer.name] = _moving(layer, names)
    return choice


def _moving(layer: Layer, names: set[tuple[str, int]]) -> Option:
    return layer.kept(lambda item: (item.op, item.occurrence) in names)
