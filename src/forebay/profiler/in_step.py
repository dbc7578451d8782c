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

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import torch

from forebay.machine import Curve, Link, Machine
from forebay.profiler.capture import capture
from forebay.profiler.overhead import MOVED, Layers, attached, close, stream
from forebay.profiler.stopwatch import WallStopwatch, in_turns
from forebay.runtime.accumulate import accumulate_by_block
from forebay.timeline import Event, Lane

__all__ = ["Rate", "Rates", "as_in_a_step", "lane_rates", "rates_of", "together_seconds"]

LAYERS = Layers(width=512, heads=8, layers=4, tokens=256)

AWAY = 4 * LAYERS.layers * len(MOVED) * LAYERS.tokens * LAYERS.width
"""Bytes of what ``MOVED`` of them sends to the host."""

WARM, STEPS = 2, 3
ROUNDS, BOUND = 15, 5.0
"""Of passes alone and together, which take a tenth of a second and differ by a tenth of that; seconds."""


@dataclass(frozen=True)
class Rate:
    """How fast jobs of a lane were: bytes/s, and the mean bytes of one."""

    rate: float
    nbytes: int


@dataclass(frozen=True)
class Rates:
    """Those of parameters and activations to the device (``h2d``), of gradients to the host (``d2h``), of activations
    to the host, and of updates; None where nothing was seen."""

    h2d: Rate | None = None
    d2h: Rate | None = None
    offload: Rate | None = None
    update: Rate | None = None


def lane_rates() -> Rates:
    """The rates over some AdamW steps in which parameters, gradients and activations come and go."""
    model = LAYERS.model()
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    model, optimizer = stream(model, optimizer, MOVED, window=AWAY)
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


def rates_of(events: tuple[Event, ...]) -> Rates:
    """The rates of jobs that moved bytes."""
    moved: dict[tuple[Lane, bool], list[Event]] = defaultdict(list)
    for event in events:
        if event.nbytes:
            moved[event.lane, event.what.startswith("offload ")].append(event)

    def rate(lane: Lane, offload: bool = False) -> Rate | None:
        jobs = moved[lane, offload]
        seconds, nbytes = sum(e.end - e.start for e in jobs), sum(e.nbytes for e in jobs)
        return Rate(nbytes / seconds, nbytes // len(jobs)) if seconds > 0 else None

    return Rates(rate(Lane.H2D), rate(Lane.D2H), rate(Lane.D2H, offload=True), rate(Lane.UPDATE))


def as_in_a_step(machine: Machine, rates: Rates) -> Machine:
    """``machine`` with its update rate and its links as slow as they were in a step, and never faster than alone."""

    def link(alone: Link, found: Rate | None) -> Link:
        if found is None:
            return alone
        share = min(1.0, found.rate * alone.seconds(found.nbytes) / found.nbytes)
        return replace(alone, curve=Curve(tuple((size, share * r) for size, r in alone.curve.points)))

    update = machine.update_rate if rates.update is None else min(machine.update_rate, rates.update.rate)
    # What cores bind loses as much as what memory binds: it is the cores that compute takes.
    share = update / machine.update_rate
    return replace(
        machine,
        h2d=link(machine.h2d, rates.h2d),
        d2h=link(machine.d2h, rates.d2h),
        offload=None if machine.offload is None else link(machine.offload, rates.offload),
        update_rate=update,
        update_elements={kind: share * rate for kind, rate in machine.update_elements.items()},
        shared_cores=1.0,
    )
