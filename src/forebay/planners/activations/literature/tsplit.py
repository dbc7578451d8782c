"""``tsplit``: where memory is short, the tensor, or the part of one, whose absence costs the least time a byte.

Nie, Miao, Yang and Cui, "TSPLIT: fine-grained GPU memory management for efficient DNN training via tensor splitting",
ICDE 2022. A tensor is split into micro-tensors, of which each is swapped, made again or kept. From a profile the
planner knows the memory at every op and looks for the bottleneck, the op at which it is the highest. While that is over
what there is, it takes, of all that can be done with what lies idle then, what has the least ``dT / dM``: seconds that
are added, over bytes that are gone at the bottleneck. A swap adds what the link is late with, recomputation its ops,
and a split what it takes to cut and to join. A part of a tensor may be swapped in the time that the link has left where
the whole would make compute wait. O(n (p n + o)) for n tensors in p parts and o ops.

Ours departs in six things. Parts are slices of a tensor's bytes, which for a contiguous one are slices of its leading
dimension; the first so many are swapped, and which ones they are changes no cost. Ops are not cut: the paper has a
split op read and free its inputs part by part, which lowers what an op itself takes, and a plan cannot say that. So a
tensor is made again as a whole or not at all; a block runs once again and as a whole, so that the cheapest path to a
tensor is its own op. A part that stays is copied when the tensor leaves and when it is back. Swaps that hide each
between its own uses wait for each other where there is no room for what is under way, so that orders which trust the
link with all of its time, with half, a quarter or none of it are simulated, and the fastest is taken. And an order is
worked out once down to the last byte: what is done is the fewest that fit by the plan's own account, the last one with
as few parts as it takes if that is faster. Where all of it does not fit, because a block that runs again is there as a
whole, nothing is made again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import gcd
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from forebay.planners.activations.literature.layers import Choice, Layer, all_again, all_moved, layers_of
from forebay.planners.activations.literature.mixing import Move, choice_of, fewest_moves
from forebay.planners.activations.literature.moments import Idle, Moments, idle_of
from forebay.planners.activations.literature.placing import Answer, Room, placed
from forebay.planners.bench import Bench
from forebay.planners.parts import KEPT, Level
from forebay.planners.problem import Problem
from forebay.planners.search import TIE
from forebay.plans import Plan
from forebay.simulation import Costs
from forebay.treatments import Split

__all__ = ["PARTS", "Bottlenecks", "share", "tsplit"]

PARTS: Final = 8
"""Micro-tensors of a tensor."""

HIDDEN: Final = (1.0, 0.5, 0.25, 0.0)
"""Of the time of both passes such shares are thought to hide copies ..."""

FEW_HIDDEN: Final = (1.0, 0.0)
"""... and these, where a step is long to simulate (``Bench.is_long``)."""


def tsplit(problem: Problem, bench: Bench | None = None) -> Plan:
    """Raises ``DoesNotFit``, and ``ConfigError`` without a batch."""
    bench = bench or Bench(problem)
    return placed(bench, "tsplit", "when each tensor is used", partial(_decide, _Orders(bench)), _leanest)


@final
class _Orders:
    """All that can be done, in its order, which is the same whatever there is room for: each worked out once."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._idle = idle_of(bench, layers_of(bench))
        self._mixed: dict[float, list[Move]] = {}

    def mixed(self, hidden: float) -> list[Move]:
        """Tensors are swapped and made again. ``hidden``: of the time of both passes such a share is thought to hide
        copies; 0: nothing is swapped."""
        if hidden not in self._mixed:
            idle = self._idle if hidden else [replace(one, kept=replace(one.kept, moved=0)) for one in self._idle]
            self._mixed[hidden] = self._all_moves(idle, hidden)
        return self._mixed[hidden]

    @cached_property
    def swaps(self) -> list[Move]:
        """Nothing is made again."""
        return self._all_moves([replace(one, again=None) for one in self._idle], 1.0)

    def _all_moves(self, idle: Sequence[Idle], hidden: float) -> list[Move]:
        bench = self._bench
        # Nothing runs again: the position of an op is its number.
        need = () if bench.liveness is None else bench.liveness.profile().with_outputs
        out, back = (hidden * seconds for seconds in Moments.of(bench).passes)
        return Bottlenecks(idle, (out, back), bench.costs, np.array(need, dtype=float)).all_moves()


def _leanest(layers: tuple[Layer, ...]) -> Choice:
    """Of each block all that can move does, or it runs again, whichever needs less of the device."""
    ways = {layer.name: [all_moved(layer), *([all_again(layer)] if layer.may_rerun else [])] for layer in layers}
    return {
        name: min(both, key=lambda option: (option.held + option.workspace, option.held)) for name, both in ways.items()
    }


def _decide(orders: _Orders, room: Room) -> Answer | None:
    if room.fits(KEPT):
        return Answer(KEPT)
    found = [_taken(room, orders.mixed(share)) for share in (FEW_HIDDEN if room.bench.is_long else HIDDEN)]
    if found[0] is None and (not any(found) or not room.bench.is_long):
        found.append(_taken(room, orders.swaps))
    ways = list({way.level: way for way in found if way is not None}.values())
    if not ways:
        return None
    best = _fastest(room, ways)
    return _fastest(room, [best, *_with_fewer_parts(room, best.moves)]).answer


def _fastest(room: Room, ways: Sequence[_Way]) -> _Way:
    """The one whose simulated step is the shortest; a single one need not be simulated."""
    return min(ways, key=lambda way: room.seconds(way.level)) if len(ways) > 1 else ways[0]


@dataclass(frozen=True)
class _Way:
    """``moves``, which fit, and what a plan says of them."""

    moves: list[Move]
    level: Level

    @property
    def answer(self) -> Answer:
        """What is decided, and in words."""
        last = {(move.what.layer.name, move.what.name): move for move in self.moves}.values()
        again, split = sum(move.again for move in last), sum(move.split is not None for move in last)
        words = f"{len(last) - again} tensors are swapped, {split} of them in part, and {again} made again"
        return Answer(self.level, (words,))


def _taken(room: Room, moves: list[Move]) -> _Way | None:
    """The fewest of ``moves`` that fit; None where all of them do not."""
    found = fewest_moves(room, moves)
    return None if found is None else _Way(moves[: found[0]], found[1])


def _with_fewer_parts(room: Room, moves: list[Move]) -> Iterator[_Way]:
    """``moves`` with as few parts of what the last one swaps as fit, if a step could be shorter for it by more than a
    tie."""
    last, total = moves[-1], Moments.of(room.bench).starts[-1]
    for parts in () if last.again or last.what.kept.link_seconds <= TIE * total else range(1, PARTS):
        fewer = [*moves[:-1], Move(last.what, again=False, split=share(parts))]
        level = room.level(choice_of(fewer))
        if room.fits(level):
            yield _Way(fewer, level)
            return


def share(parts: int) -> Split | None:
    """So many of ``PARTS`` parts, in lowest terms; None: all of them."""
    common = gcd(parts, PARTS)
    return None if parts == PARTS else Split(parts // common, PARTS // common)


@final
class Bottlenecks:
    """What lies idle in a step that needs ``need`` bytes at each op, and what takes the least time a byte there. The
    link has ``free`` seconds out and back.

    Ops between two at which anything begins or ceases to lie idle are one stretch, for which the one of them that needs
    the most stands.
    """

    def __init__(self, idle: Sequence[Idle], free: tuple[float, float], costs: Costs, need: NDArray[Any]) -> None:
        self._idle = tuple(idle)
        self._free = np.array(free)
        self._nbytes = np.array([one.nbytes for one in idle], dtype=float)
        again = [one.rerun_seconds for one in idle]
        self._again = np.array([np.inf if seconds is None else seconds for seconds in again])
        self._link = np.array([(one.kept.out_seconds, one.kept.back_seconds) for one in idle]).reshape(-1, 2)
        self._gap = np.array([one.asked - one.left for one in idle])
        self._movable = np.array([one.movable for one in idle], dtype=bool)
        # A block runs again as a whole, before the first op that asks for any of it.
        first: dict[str, int] = {}
        for one in idle:
            first[one.layer.name] = min(one.away[1], first.get(one.layer.name, one.away[1]))
        away = np.array([(*one.away, first[one.layer.name]) for one in idle], dtype=int).reshape(-1, 3)
        stretches = np.unique(np.r_[0, away.ravel()[away.ravel() < len(need)]])
        self._need = np.maximum.reduceat(need, stretches)
        self._start, self._asked, self._again_end = np.searchsorted(stretches, away).T
        # Seconds of copying what stays, twice, by tensor and by how many parts move.
        stays = [[one.nbytes * (PARTS - k) // PARTS if 0 < k < PARTS else 0 for k in range(PARTS + 1)] for one in idle]
        self._copies = np.array([[2 * costs.copying(n) if n else 0.0 for n in row] for row in stays])
        # Parts that move so far; of what is made again, or moves as a whole, nothing is left to decide.
        self._parts = np.zeros(len(idle), dtype=int)
        self._open = np.ones(len(idle), dtype=bool) & (self._movable | np.isfinite(self._again))
        # Of each stretch how many tensors that are open could lower what it needs.
        self._ends = np.where(self._movable, self._asked, self._again_end)
        self._able = np.zeros(len(self._need), dtype=int)
        for place in np.flatnonzero(self._open):
            self._able[self._start[place] : self._ends[place]] += 1
        # Those that are alike but for when they lie idle, one after the other: by how long, and as they are made.
        self._alike = _numbered(self._nbytes, self._again, *self._link.T, self._movable)
        self._by_gap = np.lexsort((-self._gap, self._alike))
        self._in_order = np.argsort(self._alike, kind="stable")

    def all_moves(self) -> list[Move]:
        """All that can be done, in the order in which it is: always about the op at which the most is needed of those
        at which anything can be done. Of the same tensor a later one takes the place of an earlier one."""
        moves = []
        while (bottleneck := self._bottleneck()) is not None:
            moves.append(self._best(bottleneck))
        return moves

    def _bottleneck(self) -> int | None:
        """The stretch that needs the most of those in which something idle is left; None where there is none."""
        able = self._able > 0
        return int(np.argmax(np.where(able, self._need, -np.inf))) if able.any() else None

    def _best(self, bottleneck: int) -> Move:
        """What has the least seconds a byte among all that lowers what is needed at ``bottleneck``; of what is equal
        that which has the most time to spare between its uses."""
        here = self._foremost(self._open & (self._start <= bottleneck) & (bottleneck < self._asked), bottleneck)
        now, swapped = self._parts[here], np.arange(1, PARTS + 1)
        seconds = self._seconds(here, np.broadcast_to(swapped, (len(here), PARTS)))
        seconds = np.where(self._movable[here, None] & (swapped > now[:, None]), seconds, np.inf)
        again = np.where(bottleneck < self._again_end[here], self._again[here], np.inf)
        added = np.c_[seconds, again] - self._seconds(here, now[:, None])
        gone = self._nbytes[here, None] * np.c_[swapped - now[:, None], PARTS - now] / PARTS
        rates = np.divide(added, gone, out=np.full(added.shape, np.inf), where=gone > 0)
        spare = self._gap[here, None] - swapped / PARTS * self._link[here].sum(axis=1)[:, None]
        spare = np.c_[spare, np.full(len(here), -np.inf)]
        least = np.flatnonzero(rates.ravel() <= rates.min())
        row, column = np.unravel_index(int(least[np.argmax(spare.ravel()[least])]), rates.shape)
        place = int(here[row])
        return self._swap(place, int(swapped[column])) if column < PARTS else self._make_again(place)

    def _foremost(self, here: NDArray[Any], bottleneck: int) -> NDArray[Any]:
        """Of those ``here`` the places of all that may be the best: of those that are alike, and of which nothing
        moves yet, the one that lies idle for longest, whose swap hides as well as that of any other, and the first that
        can be made again in time, since all of them take as long."""
        whole = here & (self._parts == 0)
        idle_for_longest = self._first_of_alike(self._by_gap, whole)
        first = self._first_of_alike(self._in_order, whole & (bottleneck < self._again_end))
        return np.unique(np.r_[idle_for_longest, first, np.flatnonzero(here & ~whole)])

    def _first_of_alike(self, order: NDArray[Any], among: NDArray[Any]) -> NDArray[Any]:
        """The first in ``order`` of each that are alike, of those that are ``among`` them."""
        found = order[among[order]]
        first: NDArray[Any] = found[np.diff(self._alike[found], prepend=-1) > 0]
        return first

    def _seconds(self, places: NDArray[Any], parts: NDArray[Any]) -> NDArray[Any]:
        """Seconds that a step takes longer with so many ``parts`` of each of the tensors at ``places`` swapped, given
        what others have left of the link: what does not fit between its uses, what a direction becomes behind, and
        copies."""
        shares = parts / PARTS
        own = self._link[places] * (self._parts[places] / PARTS)[:, None]
        late = np.maximum(0.0, shares * self._link[places].sum(axis=1)[:, None] - self._gap[places][:, None])
        for way in (0, 1):
            left = np.maximum(0.0, self._free[way] + own[:, way])[:, None]
            late = late + np.maximum(0.0, shares * self._link[places, way][:, None] - left)
        total: NDArray[Any] = late + self._copies[places[:, None], parts]
        return total

    def _swap(self, place: int, parts: int) -> Move:
        more = (parts - self._parts[place]) / PARTS
        self._need[self._start[place] : self._asked[place]] -= more * self._nbytes[place]
        self._free -= more * self._link[place]
        self._parts[place] = parts
        if parts == PARTS:
            self._close(place)
        return Move(self._idle[place], again=False, split=share(parts))

    def _make_again(self, place: int) -> Move:
        back = self._parts[place] / PARTS
        self._need[self._start[place] : self._asked[place]] += back * self._nbytes[place]
        self._need[self._start[place] : self._again_end[place]] -= self._nbytes[place]
        self._free += back * self._link[place]
        self._parts[place] = 0
        self._close(place)
        return Move(self._idle[place], again=True)

    def _close(self, place: int) -> None:
        """Nothing is left to decide about it."""
        self._open[place] = False
        self._able[self._start[place] : self._ends[place]] -= 1


def _numbered(*columns: NDArray[Any]) -> NDArray[Any]:
    """A number for each row of ``columns``, the same for equal ones."""
    _, inverse = np.unique(np.column_stack(columns), axis=0, return_inverse=True)
    numbers: NDArray[Any] = inverse.ravel()
    return numbers
