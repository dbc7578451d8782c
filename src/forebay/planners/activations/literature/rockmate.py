"""``rockmate``: a menu for every distinct block, and the best of it for each block of the chain.

Zhao, Le Hellard, Eyraud-Dubois, Gusak and Beaumont, "Rockmate: an efficient, fast, automatic and generic tool for
re-materialization in PyTorch", ICML 2023. Checkmate inside each distinct block, for a grid of budgets, gives options:
bytes saved, seconds, bytes at its fullest. Rotor's recursion over the chain picks one for each block. The paper's grid
has 20 budgets for the peak and 20 for what is saved.

Ours departs in three things. Inside a block an op is kept or runs again, which is a knapsack, so that the options are
those that no other beats (``activations.menu``), from which at most ``OPTIONS`` are taken evenly by bytes, both ends
among them. Segments of several blocks are out of reach (``rotor``). And only blocks that are one module are blocks:
what is between them is kept.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from forebay.planners.activations.literature.chained import chained
from forebay.planners.activations.literature.layers import Choice, Layer
from forebay.planners.activations.literature.placing import placed
from forebay.planners.activations.menu import Option
from forebay.planners.bench import Bench
from forebay.planners.problem import Problem
from forebay.plans import Plan

__all__ = ["OPTIONS", "rockmate"]

OPTIONS: Final = 20
"""Choices of a block at most."""


def rockmate(problem: Problem, bench: Bench | None = None) -> Plan:
    """Raises ``DoesNotFit``, and ``ConfigError`` without a batch."""
    decide = partial(chained, options_of=_options)
    return placed(bench or Bench(problem), "rockmate", "what each op makes and how long it takes", decide, _least)


def _options(layer: Layer) -> tuple[Option, ...]:
    """Those of the menu that move nothing and are exact, the least held first."""
    able = [o for o in layer.group.options if not o.moved and not any(t.bits for t in o.treatments)]
    able = sorted({*able, layer.kept()}, key=lambda option: (option.held, option.seconds))
    if len(able) <= OPTIONS:
        return tuple(able)
    return tuple(able[place * (len(able) - 1) // (OPTIONS - 1)] for place in range(OPTIONS))


def _least(layers: tuple[Layer, ...]) -> Choice:
    # What blocks hold adds up over the chain, what one of them makes again is there once.
    count = len(layers)
    return {layer.name: min(_options(layer), key=lambda o: (count * o.held + o.workspace, o.held)) for layer in layers}
