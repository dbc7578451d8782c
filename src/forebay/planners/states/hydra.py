"""``hydra``: several models on one device in turns, so that the transfers of one hide under the computation of another.

Nagrecha and Kumar, "Hydra: a system for large multi-model deep learning", VLDB 2022 (arXiv 2110.08633). Model selection
trains many models at once. Each is cut into shards that are spilled to host memory; a scheduler has the device work on
a shard of one model after a shard of another (shard alternator parallelism), and half of a second buffer has the next
shard while the current one computes (double buffering).

forebay prepares one model, and a plan is for one: what is here of Hydra is the forecast, ``simulation.alternating``,
for plans of several models (any, ``l2l`` say, which are the paper's shards of one layer) on the lanes of one machine.
The one that is ready first goes next, and of those ready together the one whose turn is the longest ago, where the
paper prefers the model with the longest time left. What they take of each tier is the sum.
"""

from __future__ import annotations

from forebay.planners.bench import Bench
from forebay.planners.problem import Problem
from forebay.planners.states.drafting import cannot_serve
from forebay.plans import Plan

__all__ = ["hydra"]


def hydra(problem: Problem, bench: Bench | None = None) -> Plan:
    """Raises ``CannotServe``: a problem is of one model."""
    raise cannot_serve(
        "hydra",
        "has several models take turns on a device, and this is one; what two plans come to in turns says "
        "forebay.simulation.alternating",
        "l2l or auto",
    )
