"""``zero-offload``: parameters on the device, gradients and states on the host, which updates.

Ren, Rajbhandari, Aminabadi, Ruwase, Yang, Zhang, Li and He, "ZeRO-Offload: democratizing billion-scale model training",
USENIX ATC 2021. Of all ways to cut the data flow of a mixed-precision step between device and host theirs moves the
fewest bytes with all that is fp32 on the host (section 3): 16-bit parameters stay on the device and forward and
backward are computed there; gradients leave while backward makes them (section 4.1); the host keeps fp32 masters and
moments, updates them with all its cores, and the new parameters go back, 4 bytes a parameter and step over the link.

This is the exact schedule: the update is over before the next forward begins. The paper's delayed update (section 5.2)
lets it run beside the next forward and backward, which then see older parameters; it changes the numbers and is not
offered. Ours departs in that the host keeps the 16-bit parameters too, beside their masters (2 bytes a parameter more),
and in that updated blocks go back while the first ones compute already, each before its use, where the paper overlaps
that copy with the update. More than one device, the other half of the paper, is not planned for.
"""

from __future__ import annotations

from functools import partial

from forebay.memory import Tier
from forebay.planners.bench import Bench
from forebay.planners.parts import DEDICATED, Draft, Level
from forebay.planners.problem import Problem
from forebay.planners.shapes import fewest_recomputed, usual_window, wide
from forebay.planners.states.drafting import finished, levels, on_host, refusal, serial
from forebay.plans import Placement, Plan, Streaming
from forebay.units import format_bytes

__all__ = ["zero_offload"]


def zero_offload(problem: Problem, bench: Bench | None = None) -> Plan:
    """Every block has a slot of its own; its gradients and states are on the host. Raises ``DoesNotFit``."""
    bench = bench or Bench(problem)
    level = fewest_recomputed(bench, partial(_shape, bench), levels(bench))
    if level is None:
        parameters = format_bytes(bench.model.parameter_nbytes)
        why = f"policy zero-offload keeps all parameters on the device ({parameters}) beside the activations of a step"
        raise refusal(bench, _shape(bench, levels(bench)[-1]), Tier.DEVICE, why)
    draft = wide(bench, _shape(bench, level), usual_window(bench))
    return finished(bench, "zero-offload", on_host(bench, draft, "zero-offload"))


def _shape(bench: Bench, level: Level) -> Draft:
    """All parameters on the device, and no window for gradients."""
    homes = tuple(Placement(b.name, *DEDICATED) for b in bench.model.blocks)
    # Every block that was updated is on its way as soon as the updates are over.
    return serial(Draft(homes, Streaming(prefetch_distance=len(homes)), level.recompute))
