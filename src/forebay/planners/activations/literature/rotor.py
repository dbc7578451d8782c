"""``rotor``: which blocks of a chain of unequal blocks run again, by dynamic programming.

Beaumont, Eyraud-Dubois, Herrmann, Joly and Shilova, "Optimal checkpointing for heterogeneous chains: how to train deep
neural networks with limited memory", 2019 (arXiv 1911.13214), theorem 1: ``C(s, t, m)``, the least time of forward and
backward of blocks s to t with m bytes free, is that of keeping all of block s, or of making blocks s to s' - 1 again
from the input of s. O(L^3 slots) with memory in slots; 500 of them give up less than 1 %.

Ours departs in three things. A segment that runs again is one block, because that is what a plan can say; so every
input of a block is held until its backward, and the recursion becomes one pass over the chain (``chaining``). Bytes are
summed as they are, and slots decide only which states are kept where there are more of these than slots. And what a
block needs at its fullest is the bench's to say: the programme is solved again for less room where its own account was
short.
"""

from __future__ import annotations

from functools import partial

from forebay.planners.activations.literature.chained import chained
from forebay.planners.activations.literature.layers import Layer, all_again, every_again
from forebay.planners.activations.literature.placing import placed
from forebay.planners.activations.menu import Option
from forebay.planners.bench import Bench
from forebay.planners.problem import Problem
from forebay.plans import Plan

__all__ = ["rotor", "whole_blocks"]


def rotor(problem: Problem, bench: Bench | None = None) -> Plan:
    """Raises ``DoesNotFit``, and ``ConfigError`` without a batch."""
    decide = partial(chained, options_of=whole_blocks)
    return placed(bench or Bench(problem), "rotor", "what a block saves and how long it takes", decide, every_again)


def whole_blocks(layer: Layer) -> tuple[Option, ...]:
    """All of it is kept, or it runs again from its input."""
    return (layer.kept(), all_again(layer)) if layer.may_rerun else (layer.kept(),)
