"""``tsplit``: where memory is short, the tensor, or the part of one, whose absence costs the least time a byte.

Nie, Miao, Yang and Cui, "TSPLIT: fine-grained GPU memory management for efficient DNN training via tensor splitting",
ICDE 2022. A tensor is split into micro-tensors, of which each is swapped, made again or kept. From a profile the
planner knows the memory at every op and looks for the bottleneck, the op at which it is the highest. While that is over
what there is, it takes, of all that can be done with what lies idle then, what has the least ``dT / dM``: seconds that
are added, over bytes that are gone at the bottleneck. A swap adds what the link is late with, recomputation its ops,
and a split what it takes to cut and to join. A part of a tensor may be swapped in the time that the link has left where
the whole would make compute wait. O(n (p n + o)) for n tensors in p parts and o ops.

Ours departs in five things. Parts are slices of a tensor's bytes, which for a contiguous one are slices of its leading
dimension; the first so many are swapped, and which ones they are changes no cost. Ops are not cut: the paper has a
split op read and free its inputs part by part, which lowers what an op itself takes, and a plan cannot say that. So a
tensor is made again as a whole or not at all; a block runs once again and as a whole, so that the cheapest path to a
tensor is its own op. A part that stays is copied when the tensor leaves and when it is back. And the order is worked
out once down to the last byte: what is done is the fewest that fit by the plan's own account, the last one with as few
parts as it takes if that is faster. Where all of it does not fit, because a block that runs again is there as a whole,
nothing is made again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import gcd
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from forebay.planners.activations.literature.layers import Choice, Layer, all_again, all_moved
from forebay.planners.activations.literature.mixing import Move, choice_of, fewest_moves
from forebay.planners.activations.literature.moments import Idle, Moments, idle_of
from forebay.planners.activations.literature.placing import Answer, Room, placed
from forebay.planners.bench import Bench
from forebay.planners.parts import Level
from forebay.planners.problem import Problem
from forebay.plans import Plan
from forebay.simulation import Costs
from forebay.treatments import Split

__all__ = ["PARTS", "Bottlenecks", "share", "tsplit"]

PARTS: Final = 8
"""Micro-tensors of a tensor."""


def tsplit(problem: Problem, bench: Bench | None = None) -> Plan:
    """Raises ``DoesNotFit``, and ``ConfigError`` without a batch."""
    return placed(bench or Bench(problem), "tsplit", "when each tensor is used", _decide, _leanest)


def _leanest(layers: tuple[Layer, ...]) -> Choice:
    """Of each block all that can move does, or it runs again, whichever needs less of the device."""
    ways = {layer.name: [all_moved(layer), *([all_again(layer)] if layer.may_rerun else [])] for layer in layers}
    return {
        name: min(both, key=lambda option: (option.held + option.workspace, option.held)) for name, both in ways.items()
    }


def _decide(room: Room) -> Answer | None:
    bench = room.bench
    if bench.liveness is None:
        return None
    # Nothing runs again: the position of an op is its number.
    need = np.array(bench.liveness.profile().with_outputs, dtype=float)
    idle, moments = idle_of(bench, room.layers), Moments.of(bench)
    moves = Bottlenecks(idle, moments, bench.costs, need).all_moves()
    found = fewest_moves(room, moves)
    if found is None:
        moves = Bottlenecks([replace(one, again=None) for one in idle], moments, bench.costs, need).all_moves()
        found = fewest_moves(room, moves)
    if found is None:
        return None
    count, level = found
    taken = moves[:count]
    taken, level = min(
        ((taken, level), *_with_fewer_parts(room, taken)),
        key=lambda one: room.seconds(one[1]),
    )
    last = {(move.what.layer.name, move.what.name): move for move in taken}.values()
    again, split = sum(move.again for move in last), sum(move.split is not None for move in last)
    words = f"{len(last) - again} tensors are swapped, {split} of them in part, and {again} made again"
    return Answer(level, (words,))


def _with_fewer_parts(room: Room, moves: list[Move]) -> Iterator[tuple[list[Move], Level]]:
    """``moves`` with as few parts of what the last one swaps as fit."""
    for parts in range(1, PARTS) if moves and not moves[-1].again else ():
        fewer = [*moves[:-1], Move(moves[-1].what, again=False, split=share(parts))]
        level = room.level(choice_of(fewer))
        if room.fits(level):
            yield fewer, level
            return


def share(parts: int) -> Split | None:
    """So many of ``PARTS`` parts, in lowest terms; None: all of them."""
    common = gcd(parts, PARTS)
    return None if parts == PARTS else Split(parts // common, PARTS // common)


@final
class Bottlenecks:
    """What lies idle in a step that needs ``need`` bytes at each op, and what takes the least time a byte there."""

    def __init__(self, idle: Sequence[Idle], moments: Moments, costs: Costs, need: NDArray[Any]) -> None:
        self._idle = tuple(idle)
        self._need = need.copy()
        self._free = np.array(moments.passes)
        self._nbytes = np.array([one.nbytes for one in idle], dtype=float)
        self._start = np.array([one.away[0] for one in idle], dtype=int)
        self._asked = np.array([one.away[1] for one in idle], dtype=int)
        # A block runs again as a whole, before the first op that asks for any of it.
        first: dict[str, int] = {}
        for one in idle:
            first[one.layer.name] = min(one.away[1], first.get(one.layer.name, one.away[1]))
        self._again_end = np.array([first[one.layer.name] for one in idle], dtype=int)
        again = [one.rerun_seconds for one in idle]
        self._again = np.array([np.inf if seconds is None else seconds for seconds in again])
        self._link = np.array([(one.kept.out_seconds, one.kept.back_seconds) for one in idle]).reshape(-1, 2)
        self._gap = np.array([one.asked - one.left for one in idle])
        self._movable = np.array([one.movable for one in idle], dtype=bool)
        # Seconds of copying what stays, twice, by tensor and by how many parts move.
        stays = [[one.nbytes * (PARTS - k) // PARTS if 0 < k < PARTS else 0 for k in range(PARTS + 1)] for one in idle]
        self._copies = np.array([[2 * costs.copying(n) if n else 0.0 for n in row] for row in stays])
        # Parts that move so far; of what is made again, or moves as a whole, nothing is left to decide.
        self._parts = np.zeros(len(idle), dtype=int)
        self._open = np.ones(len(idle), dtype=bool) & (self._movable | np.isfinite(self._again))

    def all_moves(self) -> list[Move]:
        """All that can be done, in the order in which it is: always about the op at which the most is needed of those
        at which anything can be done. Of the same tensor a later one takes the place of an earlier one."""
        moves = []
        while (bottleneck := self._bottleneck()) is not None:
            moves.append(self._best(bottleneck))
        return moves

    def _bottleneck(self) -> int | None:
        """The op that needs the most of those at which something idle is left; None where there is none."""
        change = np.zeros(len(self._need) + 1, dtype=int)
        ends = np.where(self._movable, self._asked, self._again_end)
        useful = self._open & (ends > self._start)
        np.add.at(change, self._start[useful], 1)
        np.add.at(change, ends[useful], -1)
        able = np.cumsum(change)[:-1] > 0
        return int(np.argmax(np.where(able, self._need, -np.inf))) if able.any() else None

    def _best(self, bottleneck: int) -> Move:
        """What has the least seconds a byte among all that lowers what is needed at ``bottleneck``; of what is equal
        that which has the most time to spare between its uses."""
        here = np.flatnonzero(self._open & (self._start <= bottleneck) & (bottleneck < self._asked))
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
        self._open[place] = parts < PARTS
        return Move(self._idle[place], again=False, split=share(parts))

    def _make_again(self, place: int) -> Move:
        back = self._parts[place] / PARTS
        self._need[self._start[place] : self._asked[place]] += back * self._nbytes[place]
        self._need[self._start[place] : self._again_end[place]] -= self._nbytes[place]
        self._free += back * self._link[place]
        self._parts[place], self._open[place] = 0, False
        return Move(self._idle[place], again=True)
