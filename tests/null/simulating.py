"""Machines and programs made by hand, with round figures. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from forebay.machine import Curve, Disk, Link, Machine
from forebay.memory import Kind, Tier
from forebay.model import Model
from forebay.program import Action, Change, Program, Verb
from forebay.simulation import Costs
from forebay.simulation.play import play
from forebay.states import Masters
from forebay.timeline import Event, Lane, Timeline
from forebay.trace import NO_SAVES, Op, Phase, Segment, Trace, Visit, Work

__all__ = [
    "FLOPS",
    "MACHINE",
    "RATE",
    "accumulate",
    "compute",
    "fetch",
    "flat_link",
    "land",
    "offload",
    "programmed",
    "read",
    "reload",
    "run",
    "seconds_trace",
    "spans",
    "update",
    "write",
]

FLOPS = 1000.0
RATE = 100.0


def flat_link(rate: float, latency: float = 0.0) -> Link:
    """``rate`` bytes/s whatever the size."""
    return Link(Curve(((1, rate),)), latency)


MACHINE = Machine(
    name="paper",
    source="measured",
    device_kind="cuda",
    device_capacity=1 << 40,
    host_capacity=1 << 40,
    pinned_capacity=1 << 40,
    compute={"float32": FLOPS},
    device_bandwidth=RATE,
    host_bandwidth=1e12,
    update_rate=RATE,
    h2d=flat_link(RATE),
    d2h=flat_link(RATE),
    disk=Disk(1 << 40, flat_link(RATE), flat_link(RATE)),
)
"""1000 FLOP/s, 100 bytes/s on every lane, nothing shared: 100 bytes take a second."""


def seconds_trace(seconds: Sequence[float], **more: Any) -> Trace:
    """A trace of one visit whose ops take ``seconds`` on ``MACHINE``."""
    works = tuple(Work("op", f"op{i}", "float32", round(s * FLOPS), 0) for i, s in enumerate(seconds))
    segment = Segment(tuple(Op(i, (), ()) for i in range(len(works))), (), NO_SAVES)
    visit = Visit(0, "", Phase.FORWARD, (), 0, 0)
    fields = {"device": "cuda", "optimizer": "adamw", "state_names": (), "tokens": 8, "sources": (), **more}
    return Trace(model=Model(()), works=works, segments=(segment,), visits=(visit,), **fields)


def compute(op: int, *after: int, step: int = 0, peak: int = 0, changes: Sequence[tuple[Kind, int]] = ()) -> Action:
    """Op ``op`` of the trace."""
    made = tuple(Change(kind, n) for kind, n in changes)
    return Action(Lane.COMPUTE, Verb.COMPUTE, f"op {op}", step, after=after, ops=(op, op + 1), peak=peak, changes=made)


def fetch(nbytes: int, *after: int, step: int = 0) -> Action:
    return Action(Lane.H2D, Verb.FETCH, "fetch a", step, after=after, nbytes=nbytes)


def land(nbytes: int, *after: int, step: int = 0) -> Action:
    """A gradient that the device is rid of when it has landed."""
    freed = (Change(Kind.GRADIENT, -nbytes),)
    return Action(Lane.D2H, Verb.LAND, "gradient a", step, after=after, nbytes=nbytes, changes=freed)


def accumulate(nbytes: int, *after: int) -> Action:
    return replace(land(nbytes, *after), verb=Verb.ACCUMULATE)


def offload(nbytes: int, *after: int, ops: tuple[int, int]) -> Action:
    """What the first of ``ops`` has made, and compute holds until the last of them has run."""
    freed = (Change(Kind.ACTIVATION, -nbytes),)
    what = "offload a op#0"
    return Action(Lane.D2H, Verb.OFFLOAD, what, 0, after=after, nbytes=nbytes, changes=freed, ops=ops)


def reload(nbytes: int, *after: int) -> Action:
    made = (Change(Kind.ACTIVATION, nbytes),)
    return Action(Lane.H2D, Verb.RELOAD, "reload a op#0", 0, after=after, nbytes=nbytes, peak=nbytes, changes=made)


def update(nbytes: int, *after: int, step: int = 0, lane: Lane = Lane.UPDATE) -> Action:
    return Action(lane, Verb.UPDATE, "update a", step, after=after, nbytes=nbytes)


def read(nbytes: int, *after: int, step: int = 0) -> Action:
    return Action(Lane.DISK_READ, Verb.READ, "read a", step, after=after, nbytes=nbytes)


def write(nbytes: int, *after: int, step: int = 0) -> Action:
    return Action(Lane.DISK_WRITE, Verb.WRITE, "write a", step, after=after, nbytes=nbytes)


def programmed(*actions: Action, standing: Mapping[Tier, Mapping[Kind, int]] | None = None) -> Program:
    steps = 1 + max((a.step for a in actions), default=0)
    return Program(actions, (), standing or {}, steps, 1)


def run(
    *actions: Action,
    seconds: Sequence[float] = (1.0,),
    standing: Mapping[Tier, Mapping[Kind, int]] | None = None,
    settled: bool = False,
    **machine: Any,
) -> Timeline:
    """Plays ``actions`` on ``MACHINE`` with the fields ``machine`` changed; its ops take ``seconds``."""
    costs = Costs(seconds_trace(seconds), replace(MACHINE, **machine), Masters.WHOLE)
    return play(programmed(*actions, standing=standing), costs, settled=settled)


def spans(timeline: Timeline, lane: Lane) -> list[tuple[float, float]]:
    """Start and end of every event of ``lane``."""
    events: list[Event] = [e for e in timeline.events if e.lane is lane]
    return [(e.start, e.end) for e in events]
