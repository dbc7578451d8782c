"""``distflashattn`` and ``loongtrain``: what attention makes is there in backward, and all else runs again.

Li, Shao, Xie, Xing, Ma, Stoica, Gonzalez and Zhang, "DISTFLASHATTN: distributed memory-efficient attention for
long-context LLMs training", COLM 2024 (arXiv 2310.03294), section 3.3. A checkpoint at the layer's input has the whole
layer run again, with the forward of attention, although its backward makes its own scores from queries, keys, values
and two small results of the forward. With the checkpoint at the result of attention, that op does not run again: as
many bytes, and 1.31 times the speed for long sequences. O(ops).

Gu et al., "LoongTrain: efficient training of long-sequence LLMs with head-context parallelism", 2024
(arXiv 2406.18485), "selective checkpoint++": a white list of modules, attention, whose results are kept
when a layer runs again, on the device or, where it has no room, on the host.

Ours departs in three things. The layer's input is held as well: a block runs again from there, where the paper runs
again from the result of the attention before. Attention has to be one op; where it is written out its backward
asks for the scores, which would have to be kept for it not to run again. And nothing is distributed over sequences:
the model is on one device. ``loongtrain`` moves the results of as few blocks as fits, from the first on.
"""

from __future__ import annotations

from collections.abc import Callable

from forebay.planners.activations.items import INPUT, Item
from forebay.planners.activations.literature.layers import Choice, Layer, fewest, layers_of
from forebay.planners.activations.literature.placing import Answer, Decide, Room, always, placed
from forebay.planners.activations.menu import AGAIN, KEEP, MOVE, Option
from forebay.planners.bench import Bench
from forebay.planners.problem import Problem
from forebay.planners.states.drafting import cannot_serve
from forebay.plans import Plan

__all__ = ["distflashattn", "loongtrain"]


def distflashattn(problem: Problem, bench: Bench | None = None) -> Plan:
    """Every block that may runs again but for its attention, of which the results stay. Raises ``DoesNotFit``,
    ``CannotServe`` for a model whose attention is not one op, and ``ConfigError`` without a batch."""
    return _around_attention(problem, bench, "distflashattn", always(_kept), _kept)


def loongtrain(problem: Problem, bench: Bench | None = None) -> Plan:
    """The same, with the results of as few blocks as need be on the host. Raises as ``distflashattn``."""

    def moved(layers: tuple[Layer, ...]) -> Choice:
        return {layer.name: _with(layer, MOVE) for layer in _able(layers)}

    return _around_attention(problem, bench, "loongtrain", _moving, moved)


def _around_attention(
    problem: Problem,
    bench: Bench | None,
    name: str,
    decide: Decide,
    leanest: Callable[[tuple[Layer, ...]], Choice],
) -> Plan:
    bench = bench or Bench(problem)
    if problem.trace is not None and not _able(layers_of(bench)):
        why = "keeps the result of attention, and no block that may run again computes attention in one op"
        other = f"{name} with scaled_dot_product_attention in the model, or policy selective, rockmate or auto"
        raise cannot_serve(name, why, other)
    return placed(bench, name, "what attention makes", decide, leanest)


def _moving(room: Room) -> Answer | None:
    base, able = _kept(room.layers), _able(room.layers)
    choice, level = fewest(able, base, lambda layer: _with(layer, MOVE), room.level, room.over)
    if level is None:
        return None
    count = sum(option.moved > 0 for option in choice.values())
    return Answer(level, (f"the results of attention of {count} of {len(able)} blocks are on the host",))


def _able(layers: tuple[Layer, ...]) -> list[Layer]:
    return [layer for layer in layers if layer.may_rerun and layer.graph.fused_attention]


def _kept(layers: tuple[Layer, ...]) -> Choice:
    return {layer.name: _with(layer, KEEP) for layer in _able(layers)}


def _with(layer: Layer, fate: int) -> Option:
    """The block runs again, with ``fate`` for what attention makes."""

    def done(item: Item) -> int:
        if (item.op, item.occurrence) in layer.graph.fused_attention:
            return fate
        return KEEP if item.op == INPUT else AGAIN

    return layer.again(done)
