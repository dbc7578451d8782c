"""The menu of a block: the choices for what it makes that no other choice beats in every respect.

A multiple-choice knapsack: each op's output is kept, moved or, where the block recomputes, made again, or kept or moved
as codes where it may be, and what the choices cost adds up. The frontier of the sums is built item by item, and what is
dominated is dropped on the way: it would stay dominated whatever is added (Nemhauser and Ullmann, "Discrete dynamic
programming and capital allocation", Management Science 15(9), 1969). The axes are bytes held, seconds on the link,
seconds of compute.

Exact while the frontier has at most ``MOST`` points. A block with very many ops has more: then one point is kept in
each cell of a grid of ``GRID`` by ``GRID`` over the first two axes, the fastest in it. So every choice that was dropped
has one in its place that computes no longer and takes, of each of the two, at most one part in ``GRID`` more of what
the items so far can take. The vertices of the convex hull are always there: ``thresholds`` finds them without a search.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.planners.activations.items import INPUT, Item, Items
from forebay.treatments import Fate, Split, Treatment

__all__ = [
    "AGAIN",
    "GRID",
    "KEEP",
    "MOST",
    "MOVE",
    "Option",
    "in_parts",
    "menu",
    "option",
    "thinned",
    "thresholds",
    "undominated",
]

MOST = 400
"""Points of a frontier that are kept as they are."""

GRID = 20
"""Cells of the grid along an axis where there are more."""

AGAIN, KEEP, MOVE, CODE, CODE_AND_MOVE = 0, 1, 2, 3, 4
"""What is done with an item."""

INSTEAD = {CODE: KEEP, CODE_AND_MOVE: MOVE}
"""What is done with an item that may not be codes; one that may not move either is kept."""


@dataclass(frozen=True, slots=True)
class Option:
    """One choice for a block.

    ``recompute`` says whether the block runs again, ``treatments`` what of it is treated otherwise. ``input_moves``:
    what comes into it is on the host, which the block before it has to say.

    ``held``: bytes on the device from its forward to its backward. ``moved``: bytes to the host and as many back, in
    ``out_seconds`` and ``back_seconds``. ``seconds`` of compute are those of what runs again, of reading codes and of
    handing over what moves, ``encode_seconds`` those of making codes and of seeing what is treated, in forward.
    ``workspace``: bytes that come back or are made again for its backward, beside ``held``.
    """

    recompute: bool
    treatments: tuple[Treatment, ...]
    input_moves: bool
    held: int
    moved: int
    seconds: float
    out_seconds: float
    back_seconds: float
    workspace: int
    encode_seconds: float = 0.0

    @property
    def axes(self) -> tuple[float, float, float]:
        """What is to be little of: bytes held, seconds on the link, seconds of compute."""
        return self.held, self.out_seconds + self.back_seconds, self.encode_seconds + self.seconds


def menu(items: Items) -> tuple[Option, ...]:
    """The choices for a block that no other beats, those that hold the least first."""
    options = [_option(items, False, codes) for codes in _frontier(items.kept)]
    if items.again is not None:
        options += [_option(items, True, codes) for codes in _frontier(items.again)]
    options += thresholds(items)
    options.sort(key=lambda o: (*o.axes, len(o.treatments)))
    points = np.array([o.axes for o in options], dtype=float)
    return tuple(options[i] for i in undominated(points))


def thresholds(items: Items) -> tuple[Option, ...]:
    """The choices at the vertices of the convex hull: whatever a byte on the device and a second on the link are
    worth, one of them is the best.

    At any prices an item is kept or moved if that costs less than its seconds; which of the two is the same for all
    items, as both cost in proportion to its bytes. So the best choice treats all items above some ratio of seconds to
    bytes alike. (In proportion but for latencies and small transfers, for items that cannot move, and for those
    that may be codes: then the best choices are among the others of the menu, and these are near.)
    """
    found = [_option(items, False, [_done(item, code) for item in items.kept]) for code in _codes(items.kept)]
    again = items.again
    if again is None:
        return tuple(found)
    order = sorted(range(len(again)), key=lambda i: -again[i].worth)
    # Of items that are worth the same, as those of experts that are alike, some alone are on an edge of the hull.
    alike = [tuple(places) for _, places in groupby(order, key=lambda i: again[i].worth)]
    for code in _codes(again):
        codes = [_done(item, AGAIN) for item in again]
        if not order or again[order[0]].reruns:
            found.append(_option(items, True, codes))
        for places in alike:
            for place in places:
                codes[place] = _done(again[place], code)
            found.append(_option(items, True, codes))
    return tuple(found)


def option(items: Items, recompute: bool, codes: Sequence[int]) -> Option:
    """The option that does with the items of a family what ``codes`` say, or what comes nearest where that may not be:
    what cannot be made again or moved is kept."""
    family = (items.again or ()) if recompute else items.kept
    return _option(items, recompute, [_done(item, code) for item, code in zip(family, codes, strict=True)])


def in_parts(items: Items, one: Option, splits: Mapping[tuple[str, int], Split]) -> Option:
    """``one``, which is an option for ``items``, with ``splits`` of what it moves as it is, by op and occurrence."""
    of = {(item.op, item.occurrence): item for item in ((items.again or ()) if one.recompute else items.kept)}
    treatments, stays, out, back = list[Treatment](), 0, 0.0, 0.0
    for treatment in one.treatments:
        name = treatment.op, treatment.occurrence
        if name in splits and treatment.fate is not Fate.KEEP and not treatment.bits:
            treatment = replace(treatment, split=splits[name])
            item = of[name]
            rest = item.moved - treatment.treated_nbytes(item.moved)
            stays += rest
            out += item.out_seconds * rest / item.moved
            back += item.back_seconds * rest / item.moved
        treatments.append(treatment)
    return replace(
        one,
        treatments=tuple(treatments),
        held=one.held + stays,
        moved=one.moved - stays,
        out_seconds=one.out_seconds - out,
        back_seconds=one.back_seconds - back,
    )


def _codes(items: Sequence[Item]) -> tuple[int, ...]:
    """What may be done with those of ``items`` that do not run again."""
    return (KEEP, MOVE, CODE, CODE_AND_MOVE) if any(item.codes for item in items) else (KEEP, MOVE)


def _possible(item: Item) -> list[int]:
    codes = [AGAIN, KEEP] if item.reruns else [KEEP]
    if item.moved:
        codes.append(MOVE)
    if item.codes:
        codes += [CODE, CODE_AND_MOVE] if item.moved else [CODE]
    return codes


def _costs(item: Item) -> dict[int, tuple[float, float, float]]:
    """Bytes held, seconds on the link and seconds of compute of what may be done with an item."""
    costs = {
        AGAIN: (0.0, 0.0, item.seconds),
        KEEP: (item.held, 0.0, 0.0),
        MOVE: (0.0, item.link_seconds, item.handover_seconds),
    }
    if item.codes:
        costs[CODE] = item.codes.held, 0.0, item.codes.seconds
        costs[CODE_AND_MOVE] = 0.0, item.codes.link_seconds, item.codes.seconds + item.codes.handover_seconds
    return costs


def _frontier(items: Sequence[Item]) -> list[list[int]]:
    """What is done with each item, in the undominated choices."""
    points: NDArray[Any] = np.zeros((1, 3))
    codes: NDArray[Any] = np.zeros((1, 0), dtype=np.int8)
    for item in items:
        possible = _possible(item)
        costs = _costs(item)
        points = np.concatenate([points + np.array(costs[code]) for code in possible])
        codes = np.concatenate([np.c_[codes, np.full(len(codes), code, dtype=np.int8)] for code in possible])
        chosen = undominated(points)
        if len(chosen) > MOST:
            chosen = chosen[thinned(points[chosen])]
        points, codes = points[chosen], codes[chosen]
    return [[int(code) for code in row] for row in codes]


def undominated(points: NDArray[Any]) -> NDArray[Any]:
    """The places of the points that no other one beats or equals, in order of the first axis.

    Whoever dominates a point stands before it when they are sorted by the first axis; of equal ones the first stays. So
    one sweep does, which keeps of the points so far those that are the least in the other two axes: more of the one is
    less of the other (Kung, Luccio and Preparata, "On finding the maxima of a set of vectors", JACM 22(4), 1975).
    """
    order = np.lexsort((points[:, 1], points[:, 2], points[:, 0]))
    firsts: list[float] = []
    seconds: list[float] = []
    chosen = []
    for place, (first, second) in zip(order.tolist(), points[order, 1:].tolist(), strict=True):
        at = bisect_right(firsts, first)
        if at and seconds[at - 1] <= second:
            continue
        end = at
        while end < len(seconds) and seconds[end] >= second:
            end += 1
        start = at - 1 if at and firsts[at - 1] == first else at
        firsts[start:end], seconds[start:end] = [first], [second]
        chosen.append(place)
    return np.array(chosen, dtype=np.intp)


def thinned(points: NDArray[Any]) -> NDArray[Any]:
    """The places of one point, the fastest, in each cell of the grid."""
    spans = np.maximum(points[:, :2].max(axis=0), 1e-300)
    cells = np.ceil(points[:, :2] / spans * GRID).astype(int)
    # Sorted by cell and then by seconds, the first of a cell is what is looked for.
    order = np.lexsort((points[:, 2], cells[:, 1], cells[:, 0]))
    first = np.diff(cells[order], axis=0, prepend=-1).any(axis=1)
    return np.sort(order[first])


def _option(items: Items, recompute: bool, codes: Sequence[int]) -> Option:
    """The option that does with the items of a family what ``codes`` say."""
    family = (items.again or ()) if recompute else items.kept
    pairs = list(zip(family, codes, strict=True))
    moving = [item for item, code in pairs if code == MOVE]
    coded = [(item.codes, code) for item, code in pairs if item.codes and code in INSTEAD]
    leaving = [codes for codes, code in coded if code == CODE_AND_MOVE]
    held = sum(item.held for item, code in pairs if code == KEEP) + sum(c.held for c, code in coded if code == CODE)
    made = sum(item.saved for item, code in pairs if code != KEEP) + (items.kept_held if recompute else 0)
    seconds = sum(item.seconds for item, code in pairs if code == AGAIN) + sum(c.decode_seconds for c, _ in coded)
    seconds += sum(item.handover_seconds for item in moving) + sum(c.handover_seconds for c in leaving)
    treatments = tuple(_treatments(pairs))
    # As ``treatments.seen_by_op``, which asks the same of all blocks together.
    seen = bool(treatments and recompute) or any(treatment.bits for treatment in treatments)
    if recompute:
        seconds += items.again_seconds + (items.treat_again_seconds if treatments else 0.0)
    return Option(
        recompute=recompute,
        treatments=treatments,
        input_moves=any(item.op == INPUT for item in moving),
        held=held + (0 if recompute else items.kept_held),
        moved=sum(item.moved for item in moving) + sum(c.moved for c in leaving),
        seconds=seconds,
        out_seconds=sum(item.out_seconds for item in moving) + sum(c.out_seconds for c in leaving),
        back_seconds=sum(item.back_seconds for item in moving) + sum(c.back_seconds for c in leaving),
        workspace=made,
        encode_seconds=sum(c.encode_seconds for c, _ in coded) + (items.treat_seconds if seen else 0.0),
    )


def _done(item: Item, code: int) -> int:
    """``code``, or what is done in its place with an item that it is not for."""
    possible = _possible(item)
    if code not in possible:
        code = INSTEAD.get(code, KEEP)
    return code if code in possible else KEEP


def _treatments(pairs: Sequence[tuple[Item, int]]) -> Iterator[Treatment]:
    """What a plan has to name of a block."""
    for item, code in pairs:
        if item.op != INPUT and (code not in (AGAIN, KEEP) or (code == KEEP and item.named)):
            fate = Fate.OFFLOAD if code in (MOVE, CODE_AND_MOVE) else Fate.KEEP
            bits = item.codes.bits if item.codes and code in INSTEAD else 0
            yield Treatment(item.op, item.occurrence, fate, bits)
