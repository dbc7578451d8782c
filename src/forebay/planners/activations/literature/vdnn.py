"""``vdnn-all``, ``vdnn-conv`` and ``vdnn-dyn``: feature maps go to the host in forward and come back in backward.

Rhu, Gimelshein, Clemons, Zulfiqar and Keckler, "vDNN: virtualized deep neural networks for scalable, memory-efficient
neural network design", MICRO 2016. The input of a layer leaves while the layer computes; in backward it comes back
while the layer behind it computes. ``vdnn-all`` moves the inputs of all layers, ``vdnn-conv`` those of convolutional
layers, which compute for so long that the copy hides; ``vdnn-dyn`` tries nothing moved, then ``conv``, then ``all``,
and takes the fastest that the device has room for. O(ops), for ``dyn`` three simulated steps.

Ours departs in five things. Every tensor is moved once, with the op that makes it; the layers of ``vdnn-conv`` are the
products, so that it serves transformers too: what moves is what a product reads. The paper waits at the end of each
layer for the copy of its input; here as many bytes may be under way as the largest tensor has, so that the next one
waits for it, and compute with it where the copies are slower. Tensors below 4 KiB, or a thousandth of what their block
saves, stay. And the algorithms of convolutions, which the paper chooses with the rest, are the library's to choose.
Parameters and states are placed before: what ``vdnn-dyn`` compares are the three ways within one placement, so that a
way alone, with another placement, may be faster.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from forebay.planners.activations.items import Item
from forebay.planners.activations.literature.graph import Name
from forebay.planners.activations.literature.layers import Choice, Layer, every_moved, read_by_products
from forebay.planners.activations.literature.placing import Answer, Room, placed
from forebay.planners.activations.menu import Option
from forebay.planners.bench import Bench
from forebay.planners.parts import KEPT, Level
from forebay.planners.problem import Problem
from forebay.plans import Plan

__all__ = ["vdnn_all", "vdnn_conv", "vdnn_dyn"]

ASKS = "what a layer is given and saves"


def vdnn_all(problem: Problem, bench: Bench | None = None) -> Plan:
    """Everything that is saved and can move is moved. Raises ``DoesNotFit``, and ``ConfigError`` without a batch."""
    return placed(bench or Bench(problem), "vdnn-all", ASKS, partial(_if_it_fits, every_moved), every_moved)


def vdnn_conv(problem: Problem, bench: Bench | None = None) -> Plan:
    """What products read is moved. Raises ``DoesNotFit``, and ``ConfigError`` without a batch."""
    bench = bench or Bench(problem)
    make = partial(_read_by_products, bench)
    return placed(bench, "vdnn-conv", ASKS, partial(_if_it_fits, make), make)


def vdnn_dyn(problem: Problem, bench: Bench | None = None) -> Plan:
    """The fastest of nothing moved, ``vdnn-conv`` and ``vdnn-all``. Raises ``DoesNotFit``, and ``ConfigError`` without
    a batch."""
    bench = bench or Bench(problem)

    def fastest(room: Room) -> Answer | None:
        ways = (KEPT, _level(room, _read_by_products(bench, room.layers)), _level(room, every_moved(room.layers)))
        named = zip(ways, ("nothing moves", "what products read moves", "all that can move moves"), strict=True)
        fitting = {level: words for level, words in named if room.fits(level)}
        if not fitting:
            return None
        best = min(fitting, key=room.seconds)
        return Answer(best, (f"{fitting[best]}, the fastest of the {len(fitting)} ways that fit",), widens=False)

    return placed(bench, "vdnn-dyn", ASKS, fastest, every_moved)


def _read_by_products(bench: Bench, layers: tuple[Layer, ...]) -> Choice:
    read = read_by_products(bench, layers)
    return {layer.name: _moving(layer, read) for layer in layers}


def _moving(layer: Layer, read: frozenset[tuple[str, Name]]) -> Option:
    def moves(item: Item) -> bool:
        return (layer.name, (item.op, item.occurrence)) in read

    return layer.kept(moves)


def _if_it_fits(make: Callable[[tuple[Layer, ...]], Choice], room: Room) -> Answer | None:
    level = _level(room, make(room.layers))
    return Answer(level, widens=False) if room.fits(level) else None


def _level(room: Room, choice: Choice) -> Level:
    """One tensor under way at a time: the next one waits for it."""
    largest = max((item.moved for layer in room.layers for item in layer.items.kept), default=0)
    return room.level(choice, window=largest)
