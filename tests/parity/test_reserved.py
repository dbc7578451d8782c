"""What a planned run takes from the machine, and what of that is somebody's: less than 1 % is nobody's."""

from __future__ import annotations

import mmap
from dataclasses import replace

import pytest
import torch
from torch import nn

import forebay
from forebay.arenas import arenas_of
from forebay.memory import Tier
from forebay.plans import Plan
from forebay.runtime.blocks import find_blocks
from forebay.runtime.hooks import prepared_session
from forebay.slabs import device_slabs
from tests.parity.compare import adamw
from tests.parity.offloading import movable, moving, trace_of
from tests.parity.recomputing import AMPLE, plan_of
from tests.parity.towers import tower

WIDTH, DEPTH, ROWS = 96, 4, 256

TOWER = tower(ROWS, WIDTH, DEPTH)


def trained(plan: Plan | None, steps: int = 2, **how: object) -> nn.Module:
    model = TOWER.model(torch.float32)
    given = {"device_memory": AMPLE, "device": "cpu", **how}
    model, optimizer = forebay.prepare(
        model, adamw(list(model.parameters())), TOWER.inputs(0, torch.float32), plan=plan, **given
    )
    for step in range(steps):
        model(**TOWER.inputs(step, torch.float32))["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def offloaded() -> Plan:
    """All blocks stream through two slots, and what they save goes to the host and back."""
    named = movable(trace_of(TOWER, torch.float32))
    return moving(plan_of(find_blocks(TOWER.model(torch.float32)).model, (), resident=False, slots=2), named)


@pytest.mark.parametrize("policy", ["stream", "auto"])
def test_less_than_one_percent_is_nobodys_under_a_policy(policy: str) -> None:
    model = trained(None, policy=policy)
    report = forebay.report(model)
    gaps = report.gaps()
    assert set(gaps) >= {Tier.DEVICE}
    assert all(0 <= gap < 0.01 for gap in gaps.values()), (gaps, report.timeline.arenas)
    forebay.close(model)


def test_activations_on_the_host_fill_their_arena() -> None:
    plan = offloaded()
    model = trained(plan)
    report = forebay.report(model)
    arenas = {arena.what: arena for arena in report.timeline.arenas}
    # All of it at the end of forward: what the plan has sized is what a micro-batch moves.
    assert arenas["activations"].used == arenas["activations"].nbytes == plan.streaming.host_activations > 0
    # Whole pages, and nothing else, are more than what the ledger counts.
    hosted = [arena for arena in arenas.values() if arena.tier is Tier.HOST]
    pages = sum(-(-arena.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE for arena in hosted)
    assert report.reserved()[Tier.HOST] - report.measured_peaks()[Tier.HOST] == pages - sum(a.nbytes for a in hosted)
    assert all(gap < 0.01 for gap in report.gaps().values()), report.gaps()
    forebay.close(model)


def test_an_arena_that_is_not_filled_is_named() -> None:
    plan = offloaded()
    more = plan.streaming.host_activations
    loose = replace(plan, streaming=replace(plan.streaming, host_activations=2 * more), host=plan.host + more)
    model = trained(loose)
    report = forebay.report(model)
    arena = next(arena for arena in report.timeline.arenas if arena.what == "activations")
    assert (arena.nbytes, arena.used) == (2 * more, more)
    assert report.gaps()[Tier.HOST] > 0.01
    forebay.close(model)


def test_what_stands_on_the_device_lies_where_the_plan_says() -> None:
    """One piece of memory for each kind, in which the order is the plan's."""
    plan = offloaded()
    model = trained(plan, steps=1)
    session = prepared_session(model)
    session_slots = [slot.buffer for slot in session.pool.slots]
    described = session.model
    slab = next(s for s in device_slabs(described, plan, ("exp_avg", "exp_avg_sq")) if s.what == "slots")
    begins = [buffer.untyped_storage().data_ptr() for buffer in session_slots]
    assert [begin - begins[0] for begin in begins] == [region.offset for region in slab.regions]
    assert [buffer.untyped_storage().nbytes() for buffer in session_slots] == [r.nbytes for r in slab.regions]
    sizes = arenas_of(described, plan, ("exp_avg", "exp_avg_sq"))
    assert slab.nbytes == sizes.device_slots
    forebay.close(model)
