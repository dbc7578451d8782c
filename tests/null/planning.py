"""Problems with a trace and a machine, for the tests of planners. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from forebay.machine import Curve, Disk, Link, Machine
from forebay.planners import Problem
from forebay.plans import Budget, DiskBudget
from forebay.trace import Block, Footprint, Trace
from tests.null.synthetic import ADAM, block
from tests.null.tracing import Layer, chain_trace

__all__ = ["ENOUGH", "asked", "chain", "machine"]

ENOUGH = 1 << 50


def link(rate: float) -> Link:
    """A link of ``rate`` bytes/s whatever the size."""
    return Link(Curve(((4096, rate),)))


def machine(
    *,
    compute: float = 1e9,
    h2d: float = 1e8,
    d2h: float = 1e8,
    update: float = 1e9,
    disk: float | None = None,
    kind: str = "cuda",
) -> Machine:
    """A machine with room for anything: FLOP/s and bytes/s."""
    return Machine(
        name="paper",
        source="catalogue",
        device_kind=kind,
        device_capacity=ENOUGH,
        host_capacity=ENOUGH,
        pinned_capacity=ENOUGH,
        compute={"float32": compute},
        device_bandwidth=1e10,
        host_bandwidth=1e10,
        update_rate=update,
        h2d=link(h2d),
        d2h=link(d2h),
        disk=None if disk is None else Disk(ENOUGH, link(disk), link(disk)),
    )


def chain(blocks: int = 3, *, width: int = 64, saved: int = 3, activation: int = 8192, batch: int = 1) -> Trace:
    """``blocks`` layers with ``saved`` square matrices of ``width``; each matrix keeps ``activation`` bytes a batch."""
    layers: Sequence[Block] = [
        block(f"layers.{i}", *[((width, width), "float32", True)] * saved) for i in range(blocks)
    ]
    size = activation * batch
    return chain_trace(layers, [Layer(b.name, saved=(size,) * saved, out=size) for b in layers], input_nbytes=size)


def asked(
    trace: Trace,
    on: Machine,
    *,
    device: int,
    host: int = ENOUGH,
    pinned: int | None = None,
    disk: int = 0,
    states: tuple[str, ...] = ADAM,
) -> Problem:
    """What a planner is asked about ``trace``; sizes in bytes, ``disk`` 0 for none."""
    return Problem(
        model=trace.model,
        footprint=Footprint(0, 0, measured=False),
        budget=Budget(device, host, pinned, DiskBudget("folder", disk) if disk else None),
        host_limit=host,
        disk_limit=disk,
        state_names=states,
        overlap_update=True,
        trace=trace,
        machine=on,
    )
