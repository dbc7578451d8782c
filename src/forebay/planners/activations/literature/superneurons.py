"""``superneurons``: what products make stays or goes to the host, and what is cheap runs again.

Wang, Ye, Zhao, Wu, Li, Song, Xu and Kraska, "SuperNeurons: dynamic GPU memory management for training deep neural
networks", PPoPP 2018. Three parts: liveness (section 3.1: a tensor goes with its last reader), a unified tensor pool
that offloads the results of compute-heavy layers, their checkpoints (section 3.2: convolutions and fully connected
layers, which take most of the time and hide the copies), with a cache on the device so that nothing moves while there
is room, and cost-aware recomputation of the rest (section 3.4: pooling, activations, norms, which take half of the
memory and little time). O(ops).

Ours departs in three things. Liveness is what PyTorch does. Cheap layers run again in as few blocks as fits, from the
first on, and only then do checkpoints move, again of as few blocks as fits; the paper's runtime decides while it runs.
And a block runs again once and keeps what it made until its backward is over (the paper's speed-centric strategy); the
memory-centric one, which makes a chain of layers again for each of them, a plan cannot say.
"""

from __future__ import annotations

from functools import partial

from forebay.planners.activations.items import INPUT, Item
from forebay.planners.activations.literature.layers import Choice, Layer, all_moved, fewest, moves, reruns
from forebay.planners.activations.literature.placing import Answer, Room, placed
from forebay.planners.activations.menu import AGAIN, KEEP, MOVE, Option
from forebay.planners.bench import Bench
from forebay.planners.problem import Problem
from forebay.plans import Plan

__all__ = ["superneurons"]


def superneurons(problem: Problem, bench: Bench | None = None) -> Plan:
    """Raises ``DoesNotFit``, and ``ConfigError`` without a batch."""
    return placed(bench or Bench(problem), "superneurons", "what a layer makes and how long it takes", _decide, _moved)


def _decide(room: Room) -> Answer | None:
    able = [layer for layer in room.layers if layer.may_rerun]
    cheap, level = fewest(able, {}, partial(_checkpointed, fate=KEEP), room.level, room.over)
    if level is None:
        moved, level = fewest(room.layers, cheap, _off, room.level, room.over)
        if level is None:
            return None
        count, again = (sum(map(test, moved.values())) for test in (moves, reruns))
        return Answer(level, (f"cheap ops run again in {again} blocks, and the products of {count} are on the host",))
    count = sum(map(reruns, cheap.values()))
    return Answer(level, (f"cheap ops run again in {count} of {len(able)} blocks, and nothing moves",))


def _moved(layers: tuple[Layer, ...]) -> Choice:
    return {layer.name: _off(layer) for layer in layers}


def _off(layer: Layer) -> Option:
    return _checkpointed(layer, fate=MOVE)


def _checkpointed(layer: Layer, fate: int) -> Option:
    """The block runs again, with ``fate`` for what its products make and for what comes in; as it is, or all moved,
    where nothing of it is cheap."""
    products = layer.graph.products
    if not any(item.reruns and (item.op, item.occurrence) not in products for item in layer.items.again or ()):
        return all_moved(layer) if fate == MOVE else layer.kept()

    def done(item: Item) -> int:
        checkpoint = item.op == INPUT or (item.op, item.occurrence) in products
        return fate if checkpoint else AGAIN

    return layer.again(done)
