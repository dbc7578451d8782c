"""A recorded step played to a policy that decides while it runs: what it would evict, and when.

Such a policy is told of every tensor when it is made, and evicts others where there is no room for it. Played to the
forward of a recorded step, with the seconds of its ops as they are priced, it says what it evicts in a room of so many
bytes: a plan can say that beforehand, since the next step is the same. Memory here is what blocks save; what is on the
device beside that is the bench's to say, and the step is played again with less room where that was too much.

In backward what is saved only goes, so that nothing is played there: what was evicted is back for its block's backward.
What is not saved is gone when forward goes on, and counts as evicted: it is on the way to what is made of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from forebay.planners.activations.literature.graph import Name, OpGraph
from forebay.planners.activations.literature.layers import Choice, Layer, every_again
from forebay.planners.activations.literature.mixing import Move, choice_of
from forebay.planners.activations.literature.moments import Idle, idle_of
from forebay.planners.activations.literature.placing import Answer, Room, placed, within
from forebay.planners.bench import Bench
from forebay.planners.parts import KEPT
from forebay.planners.problem import Problem
from forebay.plans import Plan

__all__ = ["INSTANT", "Evicting", "Neighbourhoods", "Start", "played"]

INSTANT: Final = 1e-9
"""Seconds since it was used of what is used at this moment: it costs much, but no more than can be added up."""


@final
class Neighbourhoods:
    """What it takes to make a tensor again, and what is evicted around it: blocks that are alike share what is found.

    The evicted neighbourhood of a tensor is what is gone of its ancestors, as far as nothing that is there lies
    between, which has to be made again for it, and of its descendants likewise, which need it (Kirisame et al., section
    4.1).
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, frozenset[Name]], dict[Name, float]] = {}

    def seconds(self, graph: OpGraph, there: frozenset[Name]) -> dict[Name, float]:
        """Of every op of ``graph`` its own seconds and those of its evicted neighbourhood, where what the ops ``there``
        have made is on the device and nothing else."""
        key = id(graph), there
        if key not in self._known:
            self._known[key] = _with_evicted(graph, there)
        return self._known[key]


def _with_evicted(graph: OpGraph, there: frozenset[Name]) -> dict[Name, float]:
    nodes = graph.nodes
    readers: list[list[int]] = [[] for _ in nodes]
    for place, node in enumerate(nodes):
        for read in node.reads:
            readers[read].append(place)

    def gone(start: int, following: Callable[[int], Iterable[int]]) -> set[int]:
        found, waiting = set[int](), [start]
        while waiting:
            more = [place for place in following(waiting.pop()) if nodes[place].name not in there]
            more = [place for place in more if place not in found]
            found.update(more)
            waiting += more
        return found

    seconds = {}
    for place, node in enumerate(nodes):
        around = gone(place, lambda at: nodes[at].reads) | gone(place, lambda at: readers[at]) | {place}
        seconds[node.name] = sum(nodes[at].seconds for at in around)
    return seconds


class Evicting(ABC):
    """A policy to which a step is played: what it evicts of ``idle`` in a room of ``allowed`` bytes (``moves``).

    Arrays have an element for each of ``idle``: its bytes; whether it is on the device; the seconds that making it
    again takes by now, with its evicted neighbourhood. ``now`` are the seconds since the begin of the step.
    """

    def __init__(self, idle: Sequence[Idle], allowed: int, around: Neighbourhoods) -> None:
        self.idle = idle
        self.allowed = allowed
        self.now = 0.0
        self.moves: list[Move] = []
        self.there = np.zeros(len(idle), dtype=bool)
        self.nbytes = np.array([max(1, one.nbytes) for one in idle], dtype=np.float64)  # it is divided by
        self.again_seconds = np.zeros(len(idle))
        self._left = np.array([one.left for one in idle], dtype=np.float64)
        self._comes_back = np.array([self.may_evict(one) for one in idle], dtype=bool)
        self._around = around
        self._rows: dict[str, list[int]] = {}
        for number, one in enumerate(idle):
            self._rows.setdefault(one.layer.name, []).append(number)
        self._gone: dict[str, set[Name]] = {name: set() for name in self._rows}
        for name in self._rows:
            self._price(name)

    def may_evict(self, one: Idle) -> bool:
        """Whether there is a way to bring it back: it runs again."""
        return one.rerun_seconds is not None

    @abstractmethod
    def make_room(self, number: int) -> None:
        """Evicts until there is room for ``idle[number]``, or as long as there is anything to evict."""

    def play(self) -> Sequence[Move]:
        """What is evicted, in this order."""
        for number, one in enumerate(self.idle):
            self.now = one.made
            self.make_room(number)
            self.there[number] = True
        return self.moves

    def evict(self, number: int, *, again: bool = True) -> None:
        """``idle[number]`` goes; it is made again, or comes back from the host."""
        one = self.idle[number]
        self.there[number] = False
        self.moves.append(Move(one, again=again))
        if again:
            self._gone[one.layer.name].add(one.name)
            self._price(one.layer.name)

    @property
    def held(self) -> float:
        """Bytes that are there."""
        return float(self.nbytes @ self.there)

    @property
    def evictable(self) -> NDArray[Any]:
        """Which of them may go now: they are there and not in use, and come back."""
        may: NDArray[Any] = self.there & self._comes_back & (self._left <= self.now)
        return may

    @property
    def stale(self) -> NDArray[Any]:
        """Seconds since each was used last."""
        seconds: NDArray[Any] = np.maximum(self.now - self._left, INSTANT)
        return seconds

    def costs(self, nbytes: NDArray[Any]) -> NDArray[Any]:
        """``h`` of Kirisame et al. with so many bytes for each: seconds to make it again and all that is evicted around
        it, over bytes and the seconds since it was used last."""
        found: NDArray[Any] = self.again_seconds / (nbytes * self.stale)
        return found

    def cheapest(self, costs: NDArray[Any]) -> int | None:
        """The one that may go and costs the least, of several the one that was made first; None where none may."""
        able = self.evictable
        return int(np.argmin(np.where(able, costs, np.inf))) if able.any() else None

    def _price(self, block: str) -> None:
        """What is not made yet counts as there: what is made later has not been evicted."""
        rows = self._rows[block]
        there = frozenset(self.idle[row].name for row in rows) - self._gone[block]
        seconds = self._around.seconds(self.idle[rows[0]].layer.graph, there)
        for row in rows:
            self.again_seconds[row] = seconds[self.idle[row].name]


Start = Callable[[Sequence[Idle], int, Neighbourhoods], Evicting]
"""A policy, for a step that is played to it in a room of so many bytes."""

Leanest = Callable[[tuple[Layer, ...]], Choice]
"""What a policy can do that needs the least of the device."""


def played(problem: Problem, bench: Bench | None, policy: str, start: Start, leanest: Leanest = every_again) -> Plan:
    """The plan of the ``policy`` of that name, which ``start`` begins: what it evicts in the largest room with which
    that fits. Raises ``DoesNotFit``, and ``ConfigError`` without a batch."""
    decide = partial(_decide, start=start)
    return placed(bench or Bench(problem), policy, "when each tensor is made and used", decide, leanest)


def _decide(room: Room, start: Start) -> Answer | None:
    if room.fits(KEPT):
        return Answer(KEPT)
    idle, around = idle_of(room.bench, room.layers), Neighbourhoods()
    moves: dict[int, Sequence[Move]] = {}

    def evicted(allowed: int) -> Choice:
        moves[allowed] = start(idle, allowed, around).play()
        return choice_of(moves[allowed])

    choice, allowed = within(room, evicted, sum(one.nbytes for one in idle))
    if choice is None:
        return None
    again = sum(move.again for move in moves[allowed])
    swapped = len(moves[allowed]) - again
    words = f"{again} tensors are evicted and made again, {swapped} swapped, of {len(idle)}"
    return Answer(room.level(choice), (words,))
