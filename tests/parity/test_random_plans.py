"""Any plan, any budget: the same numbers, and every tier within what the plan said."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from typing import Any, get_args

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from torch import nn

import forebay
from forebay.arenas import arenas, home_nbytes
from forebay.budgets import Budget, DiskBudget
from forebay.errors import DoesNotFit
from forebay.memory import Tier
from forebay.model import Block, Model
from forebay.plans import Placement, Plan, Streaming, UpdateTime, used_up
from forebay.runtime.blocks import find_blocks
from forebay.states import Masters, masters_for
from forebay.trace import Footprint
from tests.parity.compare import assert_same_training
from tests.parity.models import CASES, Case, WithLoss, images
from tests.parity.offloading import trace_of
from tests.parity.replay import footprint_of

STATES = ("exp_avg", "exp_avg_sq")
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])

RESIDENT = (Tier.DEVICE, Tier.DEVICE, Tier.DEVICE)
HOMES = [
    RESIDENT,
    *[(home, Tier.HOST, states) for home in (Tier.DEVICE, Tier.HOST, Tier.DISK) for states in (Tier.HOST, Tier.DISK)],
]


@dataclass(frozen=True)
class Subject:
    """What a plan is drawn for."""

    case: Case
    dtype: torch.dtype
    model: Model
    footprint: Footprint

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


def subject(name: str, dtype: torch.dtype) -> Subject:
    case = CASES[name]
    model = case.model(dtype)
    need = footprint_of(trace_of(case, dtype))
    assert need.measured
    return Subject(case, dtype, find_blocks(model).model, need)


@st.composite
def plans(draw: st.DrawFn, subject: Subject) -> Plan:
    """Any plan that is valid: what must be on the device fits in a slot, what passes the host fits in a host slot."""
    # A held block is in use while the others stream: it has a slot of its own, or stays.
    homes = {b.name: [h for h in HOMES if h[0] is Tier.DEVICE] if b.held else HOMES for b in subject.model.blocks}
    placements = tuple(Placement(b.name, *draw(st.sampled_from(homes[b.name]))) for b in subject.model.blocks)
    streamed = [subject.model.block(p.block) for p in placements if p.parameters is not Tier.DEVICE]
    on_disk = [subject.model.block(p.block) for p in placements if p.parameters is Tier.DISK]
    streaming = Streaming(
        slots=draw(_slots(streamed)),
        host_slots=tuple([max(map(home_nbytes, on_disk))] * draw(st.integers(1, 3))) if on_disk else (),
        prefetch_distance=draw(st.integers(0, 4)),
        gradient_window=draw(st.sampled_from([0, 1, 5_000, 40_000, 1_000_000])),
        update_chunk=draw(st.sampled_from([1024, 3000, 4_194_304])),
        overlap_update=draw(st.booleans()),
        checksums=draw(st.booleans()),
        masters=draw(st.sampled_from([Masters.WHOLE, masters_for(STATES, {subject.dtype_name})])),
        poison=True,
    )
    sizes = arenas(subject.model, placements, streaming, STATES)
    device = sizes.device + streaming.gradient_window + subject.model.buffer_nbytes + subject.footprint.peak
    return Plan("drawn", Budget(device), placements, streaming, device, sizes.host, sizes.disk)


def _slots(streamed: list[Block]) -> st.SearchStrategy[tuple[int, ...]]:
    if not streamed:
        return st.just(())
    sizes = sorted({b.nbytes for b in streamed})
    smaller = st.lists(st.sampled_from([*sizes, sizes[-1] + 64]), max_size=3)
    return smaller.map(lambda more: tuple(sorted([sizes[-1], *more], reverse=True)))


@given(data=st.data(), name=st.sampled_from(["llama", "llama-tied", "used-twice"]), dtype=DTYPES)
@settings(max_examples=16)
def test_any_plan_gives_the_numbers_of_plain_pytorch(data: st.DataObject, name: str, dtype: torch.dtype) -> None:
    """Under budgets that leave not one byte beside the plan; slots are poisoned, so that a stale read shows."""
    drawn_for = subject(name, dtype)
    plan = data.draw(plans(drawn_for))
    with tempfile.TemporaryDirectory() as folder:
        budgets: dict[str, Any] = {"device_memory": plan.device, "host_memory": max(1, plan.host)}
        if plan.disk:
            budgets["disk"] = f"{folder}:{plan.disk}B"
        model = assert_same_training(drawn_for.case, dtype, steps=2, plan=plan, device="cpu", **budgets)
        peaks = forebay.report(model).timeline.peaks
        forebay.close(model)
    assert peaks[Tier.DEVICE] <= plan.device
    assert (peaks[Tier.HOST], peaks[Tier.DISK]) == (plan.host, plan.disk)


class Wide(nn.Module):
    """Layers that are large for what they compute: 12 of 1 MiB of parameters, gradients and states in all."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(256, 256) for _ in range(12)])
        self.head = nn.Linear(256, 4)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        x = pixel_values.flatten(1)[:, :256]
        for layer in self.layers:
            x = layer(x).relu()
        return self.head(x)


WIDE = Case(lambda: WithLoss(Wide()), images)
KIB = 1024


@given(
    device=st.integers(500, 2_000) | st.integers(300, 15_000),
    host=st.integers(7_000, 13_000) | st.integers(1_000, 16_000),
    disk=st.integers(6_000, 14_000) | st.integers(1_000, 14_000) | st.none(),
    policy=st.sampled_from(["auto", "stream"]),
    update=st.sampled_from(get_args(UpdateTime)),
    dtype=DTYPES,
)
@settings(max_examples=20)
def test_any_budget_is_kept_or_refused(
    device: int, host: int, disk: int | None, policy: str, update: UpdateTime, dtype: torch.dtype
) -> None:
    """Budgets in KiB. Streamed, a layer takes 256 KiB of a slot; hosted, the model takes 12 MiB; resident, as much,
    and 3 MiB less where gradients are used up."""
    model = WIDE.model(dtype)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters())
    batch = WIDE.inputs(0, dtype)
    with tempfile.TemporaryDirectory() as folder:
        budgets: dict[str, Any] = {"device_memory": device * KIB, "host_memory": host * KIB}
        if disk is not None:
            budgets["disk"] = f"{folder}:{disk}KiB"
        try:
            how = {"policy": policy, "update": update, "device": "cpu", **budgets}
            model, optimizer = forebay.prepare(model, optimizer, batch, **how)
        except DoesNotFit as error:
            refusal = error
        else:
            refusal = None
        if refusal is not None:
            event(f"refused for {refusal.tier}")
            assert refusal.needed > refusal.allowed == budgets_in_bytes(device, host, disk)[Tier(refusal.tier)]
            assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
            return
        for step in range(2):
            for micro in range(2 if update == "step" else 1):
                model(**WIDE.inputs(2 * step + micro, dtype))["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
        report = forebay.report(model)
        forebay.close(model)
    staying = len(used_up(report.plan.placements, resident=True))
    event(f"disk {report.plan.disk > 0}, resident {sum(p.resident for p in report.plan.placements)}, used up {staying}")
    allowed = budgets_in_bytes(device, host, disk)
    for usage in report.timeline.tiers:
        assert usage.peak <= allowed[usage.tier]
    peaks = report.timeline.peaks
    assert peaks[Tier.DEVICE] <= report.plan.device
    assert (peaks[Tier.HOST], peaks[Tier.DISK]) == (report.plan.host, report.plan.disk)


def budgets_in_bytes(device: int, host: int, disk: int | None) -> dict[Tier, int]:
    return {Tier.DEVICE: device * KIB, Tier.HOST: host * KIB, Tier.DISK: (disk or 0) * KIB}


def test_a_plan_under_a_byte_less_than_it_needs_is_refused() -> None:
    drawn_for = subject("llama", torch.float32)
    placements = tuple(Placement(b.name, Tier.HOST, Tier.HOST, Tier.HOST) for b in drawn_for.model.blocks)
    streaming = Streaming(slots=(max(b.nbytes for b in drawn_for.model.blocks),))
    sizes = arenas(drawn_for.model, placements, streaming, STATES)
    device = sizes.device + drawn_for.footprint.peak
    plan = Plan("by hand", Budget(device, disk=DiskBudget(".")), placements, streaming, device, sizes.host, sizes.disk)
    model = drawn_for.case.model(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters())
    for tier, short in (("device", {"device_memory": device - 1}), ("host", {"host_memory": sizes.host - 1})):
        budgets: dict[str, Any] = {"device_memory": device, "host_memory": sizes.host, **short}
        with pytest.raises(DoesNotFit) as caught:
            forebay.prepare(model, optimizer, plan=plan, device="cpu", **budgets)
        assert (caught.value.tier, caught.value.needed) == (tier, caught.value.allowed + 1)
