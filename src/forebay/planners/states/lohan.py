"""``lohan``: everything streams, layers are updated under backward, and as many activations are swapped as is best.

Liao, Sun, Yang, Xie, Chen, Yuan, Wu and Wang, "LoHan: low-cost high-performance framework to fine-tune 100B model on a
consumer GPU", 2024 (arXiv 2403.06504). Two things make it up. Active gradient offloading: a layer's gradient that has
come to the host is used at once, its states are read, updated and written back while backward goes on to the layers
before it. Holistic traffic-aware activation swapping: the activations between layers are always swapped, and of those
inside a layer the first so many bytes in the order of their benefit, the computation that a byte spares; the rest is
computed again. How many bytes is decided by a model of the iteration's time, the longest of what the GPU, both ways of
the link, the SSDs and the CPU have to do, which is convex in it.

Ours departs in four things. The time is simulated, in steps from nothing swapped to everything, and the fastest taken:
the simulator knows of waiting too. The blocks that are alike swap the same, where the paper may stop inside a layer.
Model states and activations go to disk only as far as the host has no room for them. An update while backward runs goes
into a second copy (see ``l2l``), and is made only where the step is faster for it; unless the user has given up
clipping and looking at gradients (``Problem.update``): then it is the paper's, in place and at once, and the host holds
the gradients of a few layers.
"""

from __future__ import annotations

from forebay.planners.activations.swapping import streamed_swaps, swaps
from forebay.planners.auto import proven
from forebay.planners.bench import Bench
from forebay.planners.problem import Problem
from forebay.planners.speculation import ahead
from forebay.planners.states.drafting import expect_trace, finished
from forebay.planners.states.housing import housed
from forebay.plans import Plan
from forebay.units import format_bytes

__all__ = ["lohan"]


def lohan(problem: Problem, bench: Bench | None = None) -> Plan:
    """The fastest amount of activations that are swapped, of those that fit. Raises ``DoesNotFit``, and ``ConfigError``
    without a batch."""
    bench = bench or Bench(problem)
    expect_trace(bench, "lohan", "what activations take and how long they take to make")
    fitting = housed(bench, streamed_swaps(bench), swaps(bench))
    best = min(fitting, key=bench.seconds)
    more = ahead(bench, best)
    moved = best.streaming.host_activations + best.streaming.disk_activations
    said = f"swapping {format_bytes(moved)} of activations is the fastest of {len(fitting)} amounts"
    return finished(bench, "lohan", more if proven(bench, more) else best, said)
