"""Problems with a trace and a machine, for the tests of planners. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from forebay.budgets import Budget, DiskBudget
from forebay.machine import Curve, Disk, Link, Machine
from forebay.model import Block
from forebay.planners import Bench, Problem
from forebay.planners.activations.chain import EXTRA, Chain, Shares
from forebay.planners.activations.choosing import early, rounded, spread
from forebay.planners.parts import Draft
from forebay.planners.shapes import Filling, filled, options
from forebay.trace import Footprint, Trace
from tests.null.synthetic import ADAM, block
from tests.null.tracing import Layer, chain_trace

__all__ = ["ENOUGH", "asked", "chain", "machine", "whole", "whole_drafts"]

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


@cache
def lopsided() -> Trace:
    """Blocks of one size between two that are larger, each by itself: an embedding and a head."""
    widths = (144, *[64] * 10, 112)
    blocks = [block(f"layers.{i}", *[((width, width), "float32", True)] * 2) for i, width in enumerate(widths)]
    layers = [Layer(b.name, saved=(8192, 8192), out=8192) for b in blocks]
    return chain_trace(blocks, layers, input_nbytes=8192)


def asked(
    trace: Trace,
    on: Machine,
    *,
    device: int,
    host: int = ENOUGH,
    pinned: int | None = None,
    disk: int = 0,
    states: tuple[str, ...] = ADAM,
    micro_batches: int = 1,
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
        micro_batches=micro_batches,
    )


def whole(programme: Chain, device: int, slots: int, *, gap: float = 0.0) -> Shares | None:
    """The best numbers of whole blocks (to within a share of ``gap``) with ``device`` bytes of the device and ``slots``
    bytes of them in shared slots, by branch and bound; None if nothing fits."""
    p = programme.programme(device, slots)
    kinds = np.r_[np.ones(len(p.target) - EXTRA), np.zeros(EXTRA)]
    rows = [LinearConstraint(p.upper, ub=p.most), LinearConstraint(p.equal, p.counts, p.counts)]
    bounds = Bounds(np.zeros(len(p.target)), p.highest)
    found = milp(p.target, integrality=kinds, bounds=bounds, constraints=rows, options={"mip_rel_gap": gap})
    return None if found.x is None else programme.read(np.asarray(found.x))


def whole_drafts(bench: Bench) -> Iterator[Draft]:
    """Drafts that fit, each from the best numbers of whole blocks for the most room with which it does, through any
    number of slots, and with blocks that stay in what room is left."""
    limit = bench.problem.budget.device
    for slots, order in product(options(bench), (early, spread)):
        room = limit
        while bench.chain is not None and (found := whole(bench.chain, room, sum(slots))) is not None:
            draft = rounded(bench, bench.chain, found, slots, order)
            over = bench.device(draft) - limit
            if over <= 0:
                yield draft
                yield filled(bench, draft, Filling())
                break
            room -= over
