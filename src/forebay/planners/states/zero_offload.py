"""``zero-offload``: parameters on the device, gradients and states on the host, which updates.

Ren, Rajbhandari, Aminabadi, Ruwase, Yang, Zhang, Li and He, "ZeRO-Offload: democratizing billion-scale model training",
USENIX ATC 2021. Of all ways to cut the data flow of a mixed-precision step between device and host theirs moves the
fewest bytes with all that is fp32 on the host (section 3): 16-bit parameters stay on the device and forward and
backward are computed there; gradients leave while backward makes them (section 4.1); the host keeps fp32 masters and
moments, updates them with all its cores, and the new parameters go back, 4 bytes a parameter and step over the link.

``zero-offload`` is the exact schedule: the update is over before the next forward begins. ``zero-offload-delayed`` is
the same with the paper's delayed parameter update (section 5.2): the first steps are exact; from then on the update of
a step runs on the host under forward and backward of the next one, which see parameters without it. That changes the
numbers, so it is asked for by its name, and plan and report say it. The numbers are those of a loop that applies each
step's gradients, with that step's learning rate and after its clipping, one step late. The paper has a few dozen steps
without delay; here they are 40 (``Streaming.delay_after`` of the plan). Landed gradients have one place each, as in the
exact schedule: so the last blocks are updated first, whose gradients of the next step are the first to land there.

Ours departs in that the host keeps the 16-bit parameters too, beside their masters (2 bytes a parameter more), and in
that updated blocks go back while the first ones compute already, each before its use, where the paper overlaps that
copy with the update. More than one device, the other half of the paper, is not planned for.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Final

from forebay.planners.bench import Bench
from forebay.planners.parts import DEDICATED, Draft, Level
from forebay.planners.problem import Problem
from forebay.planners.shapes import fewest_recomputed, usual_window, wide
from forebay.planners.states.drafting import cannot_serve, finished, levels, on_device, on_host, serial
from forebay.plans import Placement, Plan, Streaming
from forebay.units import format_bytes

__all__ = ["WARM_UP", "zero_offload", "zero_offload_delayed"]

WARM_UP: Final = 40
"""Steps without delay, in which parameters change most."""


def zero_offload(problem: Problem, bench: Bench | None = None) -> Plan:
    """Every block has a slot of its own; its gradients and states are on the host. Raises ``DoesNotFit``."""
    bench = bench or Bench(problem)
    return finished(bench, "zero-offload", _draft(bench, "zero-offload"))


def zero_offload_delayed(problem: Problem, bench: Bench | None = None) -> Plan:
    """The same with delayed updates, which change the numbers. Raises ``CannotServe`` where updates shall be made in
    backward, and ``DoesNotFit``."""
    if problem.update == "backward":
        why = "makes updates a step late, and update='backward' makes them at once"
        raise cannot_serve("zero-offload-delayed", why, "zero-offload, or this one with update='step'")
    bench = bench or Bench(problem)
    draft = _draft(bench, "zero-offload-delayed")
    late = replace(draft, streaming=replace(draft.streaming, overlap_update=True, delay_after=WARM_UP))
    said = f"behind {WARM_UP} exact steps the update of a step runs under the next one, as delayed parameter update"
    return finished(bench, "zero-offload-delayed", late, said)


def _draft(bench: Bench, policy: str) -> Draft:
    level = fewest_recomputed(bench, partial(_shape, bench), levels(bench))
    if level is None:
        parameters = format_bytes(bench.model.parameter_nbytes)
        keeps = f"keeps all parameters on the device ({parameters}) beside the activations of a step"
        raise on_device(bench, _shape(bench, levels(bench)[-1]), policy, keeps)
    draft = wide(bench, _shape(bench, level), usual_window(bench))
    return on_host(bench, draft, policy)


def _shape(bench: Bench, level: Level) -> Draft:
    """All parameters on the device, and no window for gradients."""
    homes = tuple(Placement(b.name, *DEDICATED) for b in bench.model.blocks)
    # Every block that was updated is on its way as soon as the updates are over.
    return serial(Draft(homes, Streaming(prefetch_distance=len(homes)), level.recompute))
