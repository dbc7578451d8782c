"""``pofo``: every block of a chain is kept, runs again or is offloaded, by one dynamic programme.

Beaumont, Eyraud-Dubois and Shilova, "Efficient combination of rematerialization and offloading for training DNNs",
NeurIPS 2021. Offloading takes no computation and the link; making again takes computation and no link. A dynamic
programme over the chain, whose state has the free memory and how far the link is behind, finds the best of both, with
rotor's schedules as the inner operations. At low bandwidth it is much better than either alone.

Ours departs in three things. A segment is one block (``rotor``), so that the choices of a block are four: all is kept;
all that can move is offloaded; it runs again from its input, which is held; or which is offloaded. And memory and
backlog are not rounded to slots but for long chains, in which states that are near to each other are taken for one
(``chaining``). And the answer is held against the best that moves nothing, by their simulated steps.
"""

from __future__ import annotations

from forebay.planners.activations.items import INPUT, Item
from forebay.planners.activations.literature.chained import chained
from forebay.planners.activations.literature.layers import Choice, Layer, all_again, all_moved
from forebay.planners.activations.literature.placing import Answer, Room, placed, widest
from forebay.planners.activations.literature.rotor import whole_blocks
from forebay.planners.activations.menu import AGAIN, MOVE, Option
from forebay.planners.bench import Bench
from forebay.planners.problem import Problem
from forebay.plans import Plan

__all__ = ["pofo"]


def pofo(problem: Problem, bench: Bench | None = None) -> Plan:
    """Raises ``DoesNotFit``, and ``ConfigError`` without a batch."""
    return placed(bench or Bench(problem), "pofo", "what a block saves and how long it takes", _decide, _least)


def _decide(room: Room) -> Answer | None:
    """The best of all choices; or of those that move nothing, where the step is shorter: what waits for the link is
    more than the account above counts, now and then."""
    both = [chained(room, able) for able in (_options, whole_blocks)]
    found = [answer for answer in both if answer is not None]
    if len({answer.level for answer in found}) < 2:
        return found[0] if found else None
    return min(found, key=lambda answer: room.seconds(widest(room, answer)))


def _options(layer: Layer) -> tuple[Option, ...]:
    able = [layer.kept(), all_moved(layer)]
    if layer.may_rerun:
        able += [all_again(layer), _from_the_host(layer)]
    return tuple(dict.fromkeys(able))


def _from_the_host(layer: Layer) -> Option:
    """It runs again, and what comes in is on the host until then."""

    def done(item: Item) -> int:
        return MOVE if item.op == INPUT else AGAIN

    return layer.again(done)


def _least(layers: tuple[Layer, ...]) -> Choice:
    return {layer.name: _from_the_host(layer) if layer.may_rerun else all_moved(layer) for layer in layers}
