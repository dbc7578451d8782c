"""Rates of the lanes inside a step, and of ops where micro-batches pass together, where device and host are the same
cores.

Alone, a copy or an update on ``cpu`` has both cores, warm caches and nobody's threads in its way; in a step it has
what compute leaves: a third of the rate, on 2 cores of an AMD EPYC (updates 17 to 24 GB/s in steps, 60 to 90 alone).
So a small model streams for some steps, and its own timeline says how fast its lanes were.

Where micro-batches pass together (``forebay.accumulate``) each forward runs in a thread of its own, as does the loop of
each of several models that train in turns, and OpenMP gives each such thread kernel threads of its own. There are more
of them than cores then, so that they sleep between two kernels where they would otherwise have waited awake, and each
kernel wakes them up: 30 % of a forward, on 2 cores of an AMD EPYC (docs/log.md, 2026-11-23).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from statistics import median

import torch

from forebay.machine import Curve, Link, Machine
from forebay.profiler.capture import capture
from forebay.profiler.overhead import Layers, attached, close, stream
from forebay.profiler.stopwatch import WallStopwatch, in_turns
from forebay.runtime.accumulate import accumulate_by_block
from forebay.timeline import Event, Lane

__all__ = ["as_in_a_step", "lane_rates", "together_seconds"]

LAYERS = Layers(width=512, heads=8, layers=4, tokens=256)
WARM, STEPS = 2, 3
ROUNDS, BOUND = 15, 5.0
"""Of passes alone and together, which take a tenth of a second and differ by a tenth of that; seconds."""


def lane_rates() -> Mapping[Lane, tuple[float, int]]:
    """Bytes/s of each lane over some streamed AdamW steps, and the mean bytes of one of its jobs."""
    model = LAYERS.model()
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    model, optimizer = stream(model, optimizer)
    measure = attached(model).session.measure
    batch = LAYERS.batch()
    try:
        for step in range(WARM + STEPS):
            if step == WARM:
                measure.forget()
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return rates_of(measure.collect())
    finally:
        close(model)


def together_seconds() -> float:
    """Seconds that an op takes longer in micro-batches that pass together. One of them alone does all that more would
    do, and moves the same bytes as a pass that is by itself."""
    model, batch = LAYERS.model(), LAYERS.batch()
    ops = sum(1 for _ in capture(model, (batch,), "sgd").trace.ops())
    model, optimizer = stream(model, torch.optim.SGD(model.parameters(), lr=0.0))
    watch = WallStopwatch()

    def timed(run: Callable[[], object]) -> float:
        seconds = watch.seconds(run)
        optimizer.step()
        optimizer.zero_grad()
        attached(model).session.synchronize()
        return seconds

    def loss_of(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(batch).sum()
        return loss

    cases = {
        "alone": partial(timed, lambda: loss_of(model, batch).backward()),
        "together": partial(timed, lambda: accumulate_by_block(attached(model), model, [batch], loss_of)),
    }
    try:
        in_turns(cases, WARM, BOUND)
        taken = in_turns(cases, ROUNDS, BOUND)
    finally:
        close(model)
    # Of each round: from one to the next the machine changes by more than the two differ.
    longer = [together - alone for alone, together in zip(taken["alone"], taken["together"], strict=True)]
    return max(0.0, median(longer)) / ops


def rates_of(events: tuple[Event, ...]) -> dict[Lane, tuple[float, int]]:
    """Bytes/s and mean bytes of the jobs of each lane that moves bytes."""
    found = {}
    for lane in (Lane.H2D, Lane.D2H, Lane.UPDATE):
        moved = [e for e in events if e.lane is lane and e.nbytes]
        seconds = sum(e.end - e.start for e in moved)
        if seconds > 0:
            nbytes = sum(e.nbytes for e in moved)
            found[lane] = (nbytes / seconds, nbytes // len(moved))
    return found


def as_in_a_step(machine: Machine, rates: Mapping[Lane, tuple[float, int]]) -> Machine:
    """``machine`` with its update rate and its links as slow as they were in a step, and never faster than alone."""

    def link(alone: Link, lane: Lane) -> Link:
        if lane not in rates:
            return alone
        rate, nbytes = rates[lane]
        share = min(1.0, rate * alone.seconds(nbytes) / nbytes)
        return replace(alone, curve=Curve(tuple((size, share * r) for size, r in alone.curve.points)))

    update = min(machine.update_rate, rates[Lane.UPDATE][0]) if Lane.UPDATE in rates else machine.update_rate
    # What cores bind loses as much as what memory binds: it is the cores that compute takes.
    share = update / machine.update_rate
    return replace(
        machine,
        h2d=link(machine.h2d, Lane.H2D),
        d2h=link(machine.d2h, Lane.D2H),
        update_rate=update,
        update_elements={kind: share * rate for kind, rate in machine.update_elements.items()},
        shared_cores=1.0,
    )
