"""``checkmate``: which ops run again, by integer programming over the graph of every block.

Jain, Jain, Nrusimha, Gholami, Abbeel, Keutzer, Stoica and Gonzalez, "Checkmate: breaking the memory wall with optimal
tensor rematerialization", MLSys 2020. ``R[t, i]``: op i is computed in stage t; ``S[t, i]``: its result is kept from
stage t - 1 to t. Least ``sum of c(i) R[t, i]`` with ``R[t, j] <= R[t, i] + S[t, i]`` for an edge from i to j, ``S[t, i]
<= R[t - 1, i] + S[t - 1, i]`` and the memory of every stage within the budget (equations 1a to 1f and 8); two-phase
rounding of the relaxation where the programme takes too long (section 5.1): S at 0.5, then the best R for it.

Ours departs in four things, the first two because of what a plan can say. There are two stages for a block's ops, its
forward and its backward: an op runs in the first, and in the second if it is not kept, so that with ``again(b)`` for a
block that runs again ``R[b, i] = again(b) - S[b, i] >= 0`` is all that is left to decide; it runs again whether or not
one that is kept is the only one to read it, and so the edges are always kept. Memory is counted at the beginning of
each block's backward, with all that the block has made again; what is there beside is the bench's to say, and the
programme is solved again for less room where its own account was short. The relaxation is a poor bound: an answer and
a better bound come from a dynamic programme over slots of memory (``slots``). Where the two do not meet, the search
goes on for a number of relaxations, with the best found and how far from the optimum it can be at most. O(2^n) in ops;
a relaxation has one variable an op.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from forebay.planners.activations.items import Item
from forebay.planners.activations.literature.branching import (
    SAME,
    THRESHOLDS,
    Found,
    Programme,
    affordable,
    branch_and_bound,
)
from forebay.planners.activations.literature.layers import Choice, Layer, every_again, reruns
from forebay.planners.activations.literature.placing import Answer, Room, placed, searched
from forebay.planners.activations.literature.slots import Ways, all_ways, over_slots
from forebay.planners.activations.menu import AGAIN, KEEP, Option
from forebay.planners.bench import Bench
from forebay.planners.parts import KEPT
from forebay.planners.problem import Problem
from forebay.plans import Plan

__all__ = ["checkmate", "choice_of", "programme_of", "rerun", "rounded", "solved"]


def checkmate(problem: Problem, bench: Bench | None = None) -> Plan:
    """Raises ``DoesNotFit``, and ``ConfigError`` without a batch."""
    return placed(bench or Bench(problem), "checkmate", "the ops of every block", _decide, every_again)


def _decide(room: Room) -> Answer | None:
    if room.fits(KEPT):
        return Answer(KEPT)

    ways = all_ways(room.layers)

    def solve(allowed: int, nodes: int) -> tuple[Choice, Found] | None:
        found = solved(room.layers, allowed, nodes, ways)
        return None if found is None else (choice_of(room.layers, found.x), found)

    variables = sum(1 + len(rerun(layer)) for layer in room.layers)
    best = searched(room, solve, sum(layer.items.held for layer in room.layers), affordable(variables))
    if best is None:
        return None
    choice, found = best
    again = sum(map(reruns, choice.values()))
    return Answer(room.level(choice), (f"ops of {again} blocks run again: {found.proof('made again')}",))


def solved(layers: Sequence[Layer], allowed: float, nodes: int, ways: Sequence[Ways] | None = None) -> Found | None:
    """The least seconds that run again with ``allowed`` bytes for activations, found over slots of memory, and where
    that does not prove it in at most ``nodes`` relaxations (1: nothing is proven of what slots have found); None if
    nothing fits, or nothing was found. ``ways`` are those of ``layers`` (``slots.all_ways``) where they are known."""
    programme = programme_of(layers, allowed)
    slotted = over_slots(all_ways(layers) if ways is None else ways, allowed, bounded=nodes > 1)
    if slotted.bound == inf:
        return None
    found = None
    if slotted.x is not None:
        value = float(programme.target @ slotted.x)
        # Sums of the same seconds in another order differ in their last digits.
        if value <= slotted.bound * (1 + SAME):
            return Found(slotted.x, value, value)
        found = Found(slotted.x, value, slotted.bound)
        if nodes <= 1:
            return found
    branched = branch_and_bound(programme, lambda x: rounded(programme, layers, x), nodes)
    both = [one for one in (found, branched) if one is not None]
    if not both:
        return None
    best = min(both, key=lambda one: one.value)
    return Found(best.x, best.value, min(best.value, max(slotted.bound, *(one.bound for one in both))))


def programme_of(layers: Sequence[Layer], allowed: float) -> Programme:
    """Variables: of each layer that may run again first whether it does, then its ops that can, again or not. Rows: for
    every layer the bytes at the beginning of its backward; then, of every op, that its block runs again if it does."""
    columns = [_columns(layer) for layer in layers]
    target = np.concatenate([np.zeros(0), *(column[2] for column in columns)])
    starts = np.cumsum([0, *(len(column[0]) for column in columns)])
    kept = np.cumsum([layer.items.held for layer in layers])
    rows, places, values = list[int](), list[int](), list[float]()

    def put(row: int, place: int, value: float) -> None:
        rows.append(row)
        places.append(place)
        values.append(value)

    for number, (held, workspace, _) in enumerate(columns):
        for place, start in enumerate(range(starts[number], starts[number + 1])):
            for row in range(number, len(layers)):
                put(row, start, held[place] + (workspace[place] if row == number else 0.0))
    most = list(allowed - kept)
    for number in range(len(layers)):
        for place in range(starts[number] + 1, starts[number + 1]):
            put(len(most), place, 1.0)
            put(len(most), int(starts[number]), -1.0)
            most.append(0.0)
    upper = csr_array((values, (rows, places)), shape=(len(most), len(target)))
    return Programme(target, upper, np.array(most), np.ones(len(target)), len(target))


def _columns(layer: Layer) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """What each variable of ``layer`` adds to the bytes held, to those of workspace and to the seconds."""
    items = layer.items
    if items.again is None:
        return np.zeros(0), np.zeros(0), np.zeros(0)
    again = rerun(layer)
    all_kept = sum(item.held for item in items.again)
    held = [all_kept - items.held, *(-item.held for item in again)]
    workspace = [items.kept_held, *(item.saved for item in again)]
    seconds = [items.again_seconds, *(item.seconds for item in again)]
    return np.array(held, float), np.array(workspace, float), np.array(seconds)


def rerun(layer: Layer) -> list[Item]:
    """The ops of a block that may run again, where it does."""
    return [item for item in layer.items.again or () if item.reruns]


def rounded(programme: Programme, layers: Sequence[Layer], x: NDArray[Any]) -> NDArray[Any] | None:
    """Two-phase rounding: what is kept is what was less than some threshold made again, and of that follows what runs;
    None where no threshold fits."""
    for threshold in THRESHOLDS:
        candidate = (x >= threshold).astype(float)
        start = 0
        for layer in layers:
            count = 1 + len(rerun(layer)) if layer.may_rerun else 0
            if count and candidate[start + 1 : start + count].any():
                candidate[start] = 1.0
            elif count:
                candidate[start] = 0.0
            start += count
        if programme.allows(candidate):
            return candidate
    return None


def choice_of(layers: Sequence[Layer], x: NDArray[Any]) -> Choice:
    """What becomes of the blocks by variables as in ``programme_of``."""
    choice: dict[str, Option] = {}
    start = 0
    for layer in layers:
        if layer.may_rerun:
            again = rerun(layer)
            values = x[start : start + 1 + len(again)]
            names = {(item.op, item.occurrence) for item, value in zip(again, values[1:], strict=True) if value > 0.5}
            choice[layer.name] = _option(layer, names) if values[0] > 0.5 else layer.kept()
            start += len(values)
    return choice


def _option(layer: Layer, names: set[tuple[str, int]]) -> Option:
    return layer.worth_it(layer.again(lambda item: AGAIN if (item.op, item.occurrence) in names else KEEP))
