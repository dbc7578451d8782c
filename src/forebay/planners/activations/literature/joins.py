"""``joins``: which blocks run again where several chains of blocks meet, by dynamic programming.

Beaumont, Herrmann, Pallez and Shilova, "Optimal memory-aware backpropagation of deep join networks", Philosophical
Transactions of the Royal Society A 378 (2166), 2020. In a Siamese or a cross-modal network k chains meet in one op.
Within a chain the recursion is that of a chain alone (``rotor``); a state is a position in every chain, and the chains'
schedules are merged by their peaks of memory: whoever frees most behind its peak goes first. Polynomial in the length
of the chains for a fixed k.

Ours departs in two things. A segment that runs again is one block (``rotor``). And the order in which chains run is the
model's own, forward, and the reverse of it, backward: a plan says no other. So there is nothing to merge: what a chain
holds stands beside those behind it until its own backward, as within one chain, and the programme over all blocks in
their order (``chaining``) finds the best for that order. It is ``rotor``'s; what is found out here is which chains
there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from forebay.planners.activations.literature.chained import chained
from forebay.planners.activations.literature.layers import Layer, every_again
from forebay.planners.activations.literature.placing import Answer, Room, placed
from forebay.planners.activations.literature.rotor import whole_blocks
from forebay.planners.bench import Bench
from forebay.planners.parts import KEPT
from forebay.planners.problem import Problem
from forebay.plans import Plan
from forebay.trace import Phase

__all__ = ["chains_of", "joins"]


def joins(problem: Problem, bench: Bench | None = None) -> Plan:
    """Raises ``DoesNotFit``, and ``ConfigError`` without a batch."""
    return placed(bench or Bench(problem), "joins", "what a block saves and who reads it", _decide, every_again)


def _decide(room: Room) -> Answer | None:
    answer = chained(room, whole_blocks)
    if answer is None or answer.level == KEPT:
        return answer
    count = len(set(chains_of(room.bench, room.layers)))
    return replace(answer, said=(*answer.said, f"the blocks are {count} chain{'s that meet' * (count > 1)}"))


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
