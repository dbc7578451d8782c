"""``zero-infinity``: everything streams, fetched ahead; what the host has no room for is on disk.

Rajbhandari, Ruwase, Rasley, Smith and He, "ZeRO-Infinity: breaking the GPU memory wall for extreme scale deep
learning", SC 2021. No parameter has a home on the device: the infinity offload engine keeps all model states in CPU
memory or on NVMe (section 5.1.1), a prefetcher follows the recorded order of the operators and has what comes next on
its way from NVMe to CPU and from CPU to GPU while the current one computes (section 6.2), and the optimizer step brings
states from NVMe, updates them on the CPU and writes them back, chunk by chunk, reads and writes overlapped
(section 5.2.2).

Ours departs in three things. What goes to disk is not a setting: states go there first and parameters then, those of
the last blocks first, and only as many as the host has no room for. Activations stay on the device or run again, where
the paper also offloads the checkpoints to the CPU. Operators are not tiled (memory-centric tiling, section 5.1.3): a
block has to fit into a slot, and is refused by name where it does not. Partitioning over devices is not planned for.
"""

from __future__ import annotations

from forebay.planners.bench import Bench
from forebay.planners.problem import Problem
from forebay.planners.states.drafting import finished, serial, streamed, with_homes
from forebay.plans import Plan

__all__ = ["zero_infinity"]


def zero_infinity(problem: Problem, bench: Bench | None = None) -> Plan:
    """Everything streams, with homes on the host and, as far as need be, on disk. Raises ``DoesNotFit``."""
    bench = bench or Bench(problem)
    return finished(bench, "zero-infinity", with_homes(bench, serial(streamed(bench))))
