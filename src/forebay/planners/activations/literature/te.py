"""``te``: the first layers' activations go to the host, the others' stay.

NVIDIA, Transformer Engine, ``get_cpu_offload_context(enabled, num_layers, model_layers)`` (documentation of version
1.13, 2024). Of a model's layers the first ``num_layers`` offload what they save for backward while the next layer
computes, and a layer's tensors come back while the layer behind it runs backward: at most two layers' are on the device
(a double buffer). O(log layers) looks at what fits.

Ours departs in two things. The user gives ``num_layers`` there; here it is the fewest that fit. And both ways have a
window of one layer's bytes, which hold up compute only when it is full, where Transformer Engine synchronises with
compute at the end of every layer.
"""

from __future__ import annotations

from functools import partial

from forebay.planners.activations.literature.layers import all_moved, every_moved, fewest
from forebay.planners.activations.literature.placing import Answer, Room, placed
from forebay.planners.bench import Bench
from forebay.planners.problem import Problem
from forebay.plans import Plan

__all__ = ["te"]


def te(problem: Problem, bench: Bench | None = None) -> Plan:
    """Raises ``DoesNotFit``, and ``ConfigError`` without a batch."""
    return placed(bench or Bench(problem), "te", "what a layer saves", _decide, every_moved)


def _decide(room: Room) -> Answer | None:
    able = [layer for layer in room.layers if all_moved(layer).moved]
    window = max((all_moved(layer).moved for layer in able), default=0)
    level = partial(room.level, window=window)
    choice, found = fewest(able, {}, all_moved, level, room.over)
    if found is None:
        # A smaller buffer may do.
        choice, found = fewest(able, {}, all_moved, room.level, room.over)
    if found is None:
        return None
    count = sum(option.moved > 0 for option in choice.values())
    return Answer(found, (f"the first {count} of {len(able)} layers are offloaded",), widens=False)
