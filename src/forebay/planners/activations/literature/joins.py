"""``joins``: which blocks run again where several chains of blocks meet, by dynamic programming.

Beaumont, Herrmann, Pallez and Shilova, "Optimal memory-aware backpropagation of deep join networks", Philosophical
Transactions of the Royal Society A 378 (2166), 2020. In a Siamese or a cross-modal network k chains meet in one op.
Within a chain the recursion is that of a chain alone (``rotor``); a state is a position in every chain, and the chains'
schedules are merged by their peaks of memory: whoever frees most behind its peak goes first. Polynomial in the length
of the chains for a fixed k.

Ours departs in three things. The order in which chains run is the model's own, forward, and the reverse of it,
backward: a plan says no other, so that there is nothing to sort. A segment that runs again is one block (``rotor``).
And a chain is solved once for every room: its *profile* are the choices that no other beats in bytes held behind it,
bytes at its fullest and seconds. Where one profile follows another, forward, as backward comes back in reverse,

    held = held(1) + held(2),   fullest = max(fullest(1), held(1) + fullest(2)),   seconds = seconds(1) + seconds(2),

which is all that the merge is. Nothing that is beaten inside its chain is part of a best whole; so it is exact while a
profile has at most ``menu.MOST`` points, and of more one is kept in each cell of a grid. O(points^2) where chains meet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.planners.activations.literature.layers import Choice, Layer, every_again, reruns
from forebay.planners.activations.literature.placing import Answer, Room, chosen, placed, within
from forebay.planners.activations.literature.rotor import whole_blocks
from forebay.planners.activations.menu import MOST, Option, thinned, undominated
from forebay.planners.bench import Bench
from forebay.planners.parts import KEPT
from forebay.planners.problem import Problem
from forebay.plans import Plan
from forebay.trace import Phase

__all__ = ["Profile", "chains_of", "joined", "joins"]

HELD, FULLEST, SECONDS = range(3)


def joins(problem: Problem, bench: Bench | None = None) -> Plan:
    """Raises ``DoesNotFit``, and ``ConfigError`` without a batch."""
    return placed(bench or Bench(problem), "joins", "what a block saves and who reads it", _decide, every_again)


def _decide(room: Room) -> Answer | None:
    if room.fits(KEPT):
        return Answer(KEPT)
    chains = chains_of(room.bench, room.layers)
    options = [whole_blocks(layer) for layer in room.layers]
    profile = joined(options, chains)

    def solve(allowed: int) -> Choice | None:
        places = profile.fastest(allowed)
        if places is None:
            return None
        return chosen(room.layers, [able[place] for able, place in zip(options, places, strict=True)])

    choice, _ = within(room, solve, sum(layer.items.held for layer in room.layers))
    if choice is None:
        return None
    again, count = sum(map(reruns, choice.values())), len(set(chains))
    words = f"{again} of {len(choice)} blocks run again, in {count} chain{'s that meet' * (count > 1)}"
    return Answer(room.level(choice), (words,))


@dataclass(frozen=True)
class Profile:
    """What consecutive blocks may be together: for each way its bytes held, bytes at its fullest and seconds
    (``points``), and the choice of each block (``choices``)."""

    points: NDArray[Any]
    choices: NDArray[Any]

    @classmethod
    def of(cls, options: Sequence[Option]) -> Profile:
        """That of one block."""
        points = [(option.held, option.held + option.workspace, option.seconds) for option in options]
        return cls(np.array(points, dtype=float), np.arange(len(options), dtype=np.int16)[:, None])._best()

    @classmethod
    def empty(cls) -> Profile:
        """That of no block."""
        return cls(np.zeros((1, 3)), np.zeros((1, 0), dtype=np.int16))

    def then(self, other: Profile) -> Profile:
        """This one and behind it, in forward, ``other``."""
        mine, others = np.repeat(self.points, len(other.points), axis=0), np.tile(other.points, (len(self.points), 1))
        points = mine + others
        points[:, FULLEST] = np.maximum(mine[:, FULLEST], mine[:, HELD] + others[:, FULLEST])
        choices = np.c_[
            np.repeat(self.choices, len(other.points), axis=0), np.tile(other.choices, (len(self.points), 1))
        ]
        return Profile(points, choices)._best()

    def fastest(self, allowed: float) -> list[int] | None:
        """The choices of the fastest way that takes no more than ``allowed`` bytes; None if there is none."""
        fits = np.flatnonzero(self.points[:, FULLEST] <= allowed)
        if not len(fits):
            return None
        best = fits[np.argmin(self.points[fits, SECONDS])]
        return [int(choice) for choice in self.choices[best]]

    def _best(self) -> Profile:
        kept = undominated(self.points)
        if len(kept) > MOST:
            kept = kept[thinned(self.points[kept])]
        return Profile(self.points[kept], self.choices[kept])


def joined(options: Sequence[Sequence[Option]], chains: Sequence[int]) -> Profile:
    """The profile of all blocks; ``chains`` numbers the chain of each. Of a chain that others interrupt each part is
    taken for itself."""
    whole, start = Profile.empty(), 0
    for _, members in groupby(chains):
        end = start + sum(1 for _ in members)
        part = Profile.empty()
        for able in options[start:end]:
            part = part.then(Profile.of(able))
        whole, start = whole.then(part), end
    return whole


def chains_of(bench: Bench, layers: Sequence[Layer]) -> tuple[int, ...]:
    """The number of the chain that each of ``layers`` is part of.

    What a visit reads of others that those others have read already says nothing: the result of an encoder is read by
    every block of the decoder, and only with the first of them do two chains meet. Then one that reads of a single
    visit goes on with its chain, unless another has; and one that reads of none or of several begins a chain.
    """
    trace, liveness = bench.problem.trace, bench.liveness
    if trace is None or liveness is None:
        return ()
    index, before, chain = liveness.index, dict[int, set[int]](), dict[int, int]()
    continued = set[int]()
    for place, visit in enumerate(trace.visits):
        if visit.phase is not Phase.FORWARD:
            continue
        read = {index.roots[root].visit for root in index.port_roots(place) if root in index.roots} - {place}
        direct = read - set[int]().union(*(before[other] for other in read))
        before[place] = read.union(*(before[other] for other in read))
        goes_on = direct - continued if len(direct) == 1 else set[int]()
        chain[place] = next((chain[other] for other in goes_on), place)
        continued.update(goes_on)
    return tuple(chain[layer.place] for layer in layers)
