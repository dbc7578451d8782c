"""``swapadvisor``: which tensors are swapped, by a genetic search over pools of memory.

Huang, Jin and Li, "SwapAdvisor: pushing deep learning beyond the GPU memory limit via smart swapping", ASPLOS 2020. A
chromosome is an order of ops and an allocation: for each class of sizes its pool of memory, and how much each pool has.
What is swapped follows from it: where a pool is full, that of its tensors goes whose next use is the furthest away
(Belady's rule), and it comes back as early as there is room. A simulated step is the fitness; selection, crossover and
mutation go on for as long as that gains. O(generations x population x tensors).

Ours departs in four things. The order of ops is the model's own: a plan says no other. Memory at run time is one pool
of exact sizes; here pools decide how much stays of each class of sizes, and how early what goes comes back is the
runtime's to find. The fitness is the account of the link alone (``Swaps.cost``); the ``FINALISTS`` are simulated as
whole steps, and the fastest is taken. And generations are counted and drawn from one seed, so that the same problem
has the same plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from random import Random
from typing import Final, final

import numpy as np

from forebay.planners.activations.literature.layers import Choice, every_moved
from forebay.planners.activations.literature.mixing import Move, choice_of
from forebay.planners.activations.literature.moments import Idle, Moments, idle_of
from forebay.planners.activations.literature.placing import Answer, Room, placed, within
from forebay.planners.bench import Bench
from forebay.planners.parts import KEPT
from forebay.planners.problem import Problem
from forebay.plans import Plan

__all__ = ["Cost", "Pools", "Swaps", "evolved", "swapadvisor"]

SEED: Final = 2020

POPULATION: Final = 24

GENERATIONS: Final = 12
"""So many at most ..."""

LOOKS: Final = 300_000
"""... and no more than take so many looks at a tensor."""

POOLS: Final = 4
"""Pools of memory at most."""

SHARES: Final = 8
"""A pool has one to so many parts of the memory."""

MUTATION: Final = 0.1
"""How likely a gene is drawn anew."""

RIVALS: Final = 3
"""Of so many that are drawn, the best becomes a parent."""

FINALISTS: Final = 3

Cost = tuple[float, int]
"""Seconds that compute waits for the link, and bytes that move."""


def swapadvisor(problem: Problem, bench: Bench | None = None) -> Plan:
    """Raises ``DoesNotFit``, and ``ConfigError`` without a batch."""
    return placed(bench or Bench(problem), "swapadvisor", "when each tensor is used", _decide, every_moved)


def _decide(room: Room) -> Answer | None:
    if room.fits(KEPT):
        return Answer(KEPT)
    swaps = Swaps([one for one in idle_of(room.bench, room.layers) if one.movable], Moments.of(room.bench))
    held = sum(layer.items.held for layer in room.layers)
    stays = held - sum(one.nbytes for one in swaps.able)

    def in_one_pool(allowed: int) -> Choice | None:
        return None if allowed < stays else swaps.choice(swaps.belady(swaps.one_pool, allowed - stays))

    choice, allowed = within(room, in_one_pool, held)
    if choice is None:
        return None
    found = [swaps.choice(moved) for moved in evolved(swaps, allowed - stays)[:FINALISTS]]
    # What the link's account takes for as much room need not be: the one pool is known to fit.
    fitting = [level for level in map(room.level, (choice, *found)) if room.fits(level)]
    best = min(dict.fromkeys(fitting), key=room.seconds)
    count = sum(len(s.blocks) * len(s.treatments) for s in best.activations)
    return Answer(best, (f"{count} of {len(swaps.able)} tensors are swapped, the best of a genetic search over pools",))


@dataclass(frozen=True)
class Pools:
    """A chromosome: the pool of each class of sizes, and how many parts of the memory each pool has."""

    of: tuple[int, ...]
    shares: tuple[int, ...]


@final
class Swaps:
    """Tensors that can be swapped, in the order in which they are made, and what their swaps cost."""

    def __init__(self, able: Sequence[Idle], moments: Moments) -> None:
        self.able = tuple(able)
        self.turn = moments.turn
        sizes = sorted({one.nbytes for one in able})
        self.classes = len(sizes)
        self.one_pool = Pools((0,) * len(sizes), (1,) * POOLS)
        place = {nbytes: number for number, nbytes in enumerate(sizes)}
        self._class = [place[one.nbytes] for one in able]
        self._known: dict[frozenset[int], Cost] = {}

    def belady(self, pools: Pools, room: float) -> frozenset[int]:
        """The places of the tensors that are swapped if ``pools`` share ``room`` bytes. Where a pool is full, that goes
        of which the next use is the furthest away; of those that are used at once the first made."""
        parts = sum(pools.shares[pool] for pool in set(pools.of))
        left = [room * share / parts if parts else 0.0 for share in pools.shares]
        held: list[list[tuple[float, int]]] = [[] for _ in left]
        gone = []
        for place, (one, kind) in enumerate(zip(self.able, self._class, strict=True)):
            pool = pools.of[kind]
            left[pool] -= one.nbytes
            heappush(held[pool], (-one.asked, place))
            while left[pool] < 0:
                _, furthest = heappop(held[pool])
                left[pool] += self.able[furthest].nbytes
                gone.append(furthest)
        return frozenset(gone)

    def cost(self, moved: frozenset[int]) -> Cost:
        """What it costs to swap those at the places ``moved``. Copies of a direction follow each other: out from the
        last use in forward on, back from the turn on in the order in which backward asks. Compute waits at the turn
        for those that are not out, and in backward for those that are not back."""
        if moved not in self._known:
            swapped = [self.able[place] for place in moved]
            nbytes = sum(one.nbytes for one in swapped)
            behind = 0.0
            for one in sorted(swapped, key=lambda one: one.left):
                behind = max(behind, one.left) + one.kept.out_seconds
            asked = sorted(swapped, key=lambda one: one.asked)
            back = self.turn + np.cumsum([one.kept.back_seconds for one in asked])
            late = float(np.max(back - [one.asked for one in asked], initial=0.0))
            self._known[moved] = max(0.0, behind - self.turn) + late, nbytes
        return self._known[moved]

    def choice(self, moved: frozenset[int]) -> Choice:
        """What a plan says of it."""
        return choice_of(Move(self.able[place], again=False) for place in sorted(moved))


def evolved(swaps: Swaps, room: float) -> list[frozenset[int]]:
    """What the last generation swaps with ``room`` bytes for what can be, the best first, each once."""
    random = Random(SEED)
    people = [swaps.one_pool, *(_drawn(random, swaps.classes) for _ in range(POPULATION - 1))]
    moved = {pools: swaps.belady(pools, room) for pools in people}

    def cost(pools: Pools) -> Cost:
        if pools not in moved:
            moved[pools] = swaps.belady(pools, room)
        return swaps.cost(moved[pools])

    for _ in range(min(GENERATIONS, LOOKS // (POPULATION * max(1, len(swaps.able))))):
        parents = [[min(random.choices(people, k=RIVALS), key=cost) for _ in range(2)] for _ in people]
        children = [_mutated(random, _crossed(random, *pair)) for pair in parents]
        people = sorted(dict.fromkeys((*people, *children)), key=cost)[:POPULATION]
    return list(dict.fromkeys(moved[pools] for pools in sorted(people, key=cost)))


def _drawn(random: Random, classes: int) -> Pools:
    of = tuple(random.randrange(POOLS) for _ in range(classes))
    return Pools(of, tuple(random.randint(1, SHARES) for _ in range(POOLS)))


def _crossed(random: Random, one: Pools, other: Pools) -> Pools:
    """Each gene from one of both."""

    def mixed(mine: tuple[int, ...], others: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(random.choice(pair) for pair in zip(mine, others, strict=True))

    return Pools(mixed(one.of, other.of), mixed(one.shares, other.shares))


def _mutated(random: Random, pools: Pools) -> Pools:
    fresh = _drawn(random, len(pools.of))

    def some(mine: tuple[int, ...], drawn: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(d if random.random() < MUTATION else m for m, d in zip(mine, drawn, strict=True))

    return Pools(some(pools.of, fresh.of), some(pools.shares, fresh.shares))
