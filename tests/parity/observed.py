"""What a run did, lane by lane, and what a program says that it does: to be held against each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import forebay
from forebay.device.cpu import CpuDevice
from forebay.plans import Plan
from forebay.program import Program
from forebay.timeline import Event, Lane, Timeline
from tests.parity.compare import adamw
from tests.parity.models import Case

__all__ = ["AMPLE", "LANES", "Observed", "by_lane", "lowered", "observed", "whats"]

AMPLE = "64MiB"
LANES = (Lane.H2D, Lane.D2H, Lane.UPDATE, Lane.DISK_READ, Lane.DISK_WRITE)


@dataclass(frozen=True)
class Observed:
    """The account of a run, and the events of its last step."""

    timeline: Timeline
    last: tuple[Event, ...]


def observed(
    case: Case,
    plan: Plan,
    micro_batches: int = 1,
    disk: str | None = None,
    *,
    steps: int = 4,
    batch: Mapping[str, Any] | None = None,
    between: bool = True,
    device: str | CpuDevice = "cpu",
) -> Observed:
    """Trains on one batch (the case's first, unless given), so that a router sends it the same way in every step.

    ``between``: every step waits for its updates; else the last one does.
    """
    model, given = case.model(torch.float32), case.inputs(0, torch.float32) if batch is None else batch
    optimizer = adamw([p for p in model.parameters() if p.requires_grad])
    model, optimizer = forebay.prepare(model, optimizer, device_memory=AMPLE, plan=plan, device=device, disk=disk)
    before = 0
    for step in range(steps):
        before = len(forebay.report(model).timeline.events)
        for _ in range(micro_batches):
            output = model(**given)  # held while the next forward runs, as loops do
            output["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        if between or step == steps - 1:
            forebay.synchronize(model)
    timeline = forebay.report(model).timeline
    forebay.close(model)
    return Observed(timeline, timeline.events[before:])


def by_lane(events: Sequence[Event], lanes: Iterable[Lane] = LANES) -> dict[Lane, list[str]]:
    """In words, in order."""
    return {lane: whats([e for e in events if e.lane is lane]) for lane in lanes}


def whats(events: Sequence[Event]) -> list[str]:
    """In words. A gradient that is added is two jobs of one lane, a copy and a sum, and one action of a program."""
    words = [event.what for event in events]
    sums = {i for i, word in enumerate(words) if word.startswith("accumulate ")}
    return [word for i, word in enumerate(words) if i + 1 not in sums]


def lowered(program: Program) -> dict[Lane, list[str]]:
    """What the last step of a program does on each lane."""
    last = [a for a in program.actions if a.step == program.steps - 1]
    return {lane: [a.what for a in last if a.lane is lane] for lane in LANES}
