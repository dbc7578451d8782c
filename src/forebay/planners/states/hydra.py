"""``hydra``: several models on one device in turns, so that the transfers of one hide under the computation of another.

Nagrecha and Kumar, "Hydra: a system for large multi-model deep learning", VLDB 2022 (arXiv 2110.08633). Model selection
trains many models at once. Each is cut into shards that are spilled to host memory; a scheduler has the device work on
a shard of one model after a shard of another (shard alternator parallelism), and half of a second buffer has the next
shard while the current one computes (double buffering).

A plan is for one model, so that this policy refuses. ``forebay.prepare_several`` prepares several within one budget
(``planners.several`` divides it), each under any policy; with this one each has a plan of ``l2l``, whose slots of a
layer are the paper's shards and its double buffer. ``forebay.alternate`` trains them, and ``simulation.alternating``
foretells it. Ours departs in two things. The one that is ready first goes next, and of those ready together the one
whose turn is the longest ago, where the paper prefers the model with the longest time left. A model has its part of the
budget for good, where the paper has the next shard in a buffer that all models share: what they take of each tier is
the sum.
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
        "has several models take turns on a device, and this is one; forebay.prepare_several prepares several",
        "l2l or auto",
    )
