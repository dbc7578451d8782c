"""``selective``: the core of attention runs again, and nothing else.

Korthikanti, Casper, Lym, McAfee, Andersch, Shoeybi and Catanzaro, "Reducing activation recomputation in large
transformer models", MLSys 2023, section 5. A layer saves ``s b h (34 + 5 a s / h)`` bytes of activations in 16 bits
(s tokens, b sequences, h wide, a heads); the second term is queries times keys, softmax, its dropout and attention over
values, which cost few operations a byte. With these made again in backward ``34 s b h`` are left, and the step computes
2.7 % (GPT-3) or 1.6 % (MT-NLG) more. Every layer is treated alike; nothing is searched, so it takes O(ops).

Ours departs in three things. What runs again is said of a block's ops, and of an op whose result nobody saves a plan
can only say that it stays or that it runs again: products stay, which takes bytes that the paper does not count, and
the rest runs again, which takes seconds that the paper does not. Where attention is one op its result and what it saves
beside are made again, as Megatron-LM does, which gains little. And the share of a tensor- or sequence-parallel rank is
not taken: the model is on one device.
"""

from __future__ import annotations

from forebay.planners.activations.items import Item
from forebay.planners.activations.literature.layers import Choice, Layer, layers_of
from forebay.planners.activations.literature.placing import always, placed
from forebay.planners.activations.menu import AGAIN, Option
from forebay.planners.bench import Bench
from forebay.planners.problem import Problem
from forebay.planners.states.drafting import cannot_serve
from forebay.plans import Plan

__all__ = ["selective"]

NAME = "selective"


def selective(problem: Problem, bench: Bench | None = None) -> Plan:
    """The core of attention of every block that may runs again. Raises ``DoesNotFit``, ``CannotServe`` for a model
    without attention, and ``ConfigError`` without a batch."""
    bench = bench or Bench(problem)
    if problem.trace is not None and not _with_attention(layers_of(bench)):
        why = "makes the core of attention again, and no block that may run again has one"
        raise cannot_serve(NAME, why, "chen, rockmate or auto")
    return placed(bench, NAME, "what attention saves", always(_cores), _cores)


def _with_attention(layers: tuple[Layer, ...]) -> list[Layer]:
    return [layer for layer in layers if layer.may_rerun and layer.graph.attention_core]


def _cores(layers: tuple[Layer, ...]) -> Choice:
    return {layer.name: _without_core(layer) for layer in _with_attention(layers)}


def _without_core(layer: Layer) -> Option:
    core = layer.graph.attention_core

    def done(item: Item) -> int:
        return AGAIN if (item.op, item.occurrence) in core else layer.unnamed(item)

    return layer.again(done)
