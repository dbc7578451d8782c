"""``l2l``: the executing layer on the device, and the next one on its way; everything else on the host.

Pudipeddi, Mesmakhosroshahi, Xi and Bharadwaj, "Training large neural networks with constant memory using a new
execution algorithm", 2020 (arXiv 2002.05645). The host, their eager param-server, keeps parameters, gradients and
states. The device runs one layer at a time while the next one comes (L2L-p); of what a layer makes only its input is
stashed, the rest is made again in backward; a layer's gradients leave as they are made and its update runs on the host
while backward goes on to the layers before it.

Ours departs in four things. The micro-batches of a step pass a layer together only in ``forebay.accumulate``: a step
is planned for one of them. The stash stays on the device, where the paper's constant memory has it on the host. Blocks
that are larger than a layer (an embedding, a head) have a slot of their size beside the two layers', since slots are
not cut to what comes into them. An update under backward goes into a second copy, which the step takes over if clipping
leaves the gradients alone, and is made only where that makes the step faster: the same numbers as plain PyTorch in any
case.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from forebay.planners.bench import Bench
from forebay.planners.nearest import refused
from forebay.planners.parts import Level
from forebay.planners.problem import Problem
from forebay.planners.refusals import device_too_small
from forebay.planners.shapes import streamed_through, usual_window
from forebay.planners.speculation import ahead
from forebay.planners.states.drafting import expect_trace, finished, on_host, on_host_alone
from forebay.plans import Plan

__all__ = ["LAYERS", "l2l"]

LAYERS: Final = 2
"""Layers on the device at most: one computes, one comes."""


def l2l(problem: Problem, bench: Bench | None = None) -> Plan:
    """Streams through two slots of a layer's size, or one where there is no room for two; every block that may runs
    again. Raises ``DoesNotFit``, and ``ConfigError`` without a batch."""
    bench = bench or Bench(problem)
    expect_trace(bench, "l2l", "what a layer makes and its input alone")
    level = Level(bench.recomputable)
    for slots in bench.slot_options(LAYERS):
        draft = streamed_through(bench, slots, usual_window(bench), level)
        if bench.fits_device(draft):
            break
    else:
        raise refused(bench, device_too_small(bench, draft), draft, house=on_host_alone("l2l"))
    how = draft.streaming
    draft = replace(draft, streaming=replace(how, prefetch_distance=min(LAYERS - 1, how.prefetch_distance)))
    return finished(bench, "l2l", ahead(bench, on_host(bench, draft, "l2l")))
