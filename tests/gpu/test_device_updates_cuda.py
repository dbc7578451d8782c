"""Updates on a card of blocks that are at home on the host: bit for bit those of blocks that stay there."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import forebay
from forebay.device.base import Delays
from forebay.device.cuda import CudaDevice
from forebay.device.delays import RandomDelays
from forebay.memory import Kind
from forebay.timeline import Lane
from tests.parity.content import states_of
from tests.parity.device_updating import on_device
from tests.parity.models import CASES, Case
from tests.parity.test_delays import NARROW

pytestmark = pytest.mark.gpu

BUDGET = 2 * 2**30


def left(case: Case, dtype: torch.dtype, delays: Delays | None, **prepare: Any) -> dict[str, torch.Tensor]:
    """All that three steps of two micro-batches leave, with nothing read in between."""
    device = CudaDevice(0, BUDGET, delays=delays)
    model = case.model(dtype)
    model, optimizer = forebay.prepare(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        case.inputs(0, dtype),
        device_memory=BUDGET,
        device=device,
        **prepare,
    )
    for step in range(3):
        for micro in range(2):
            inputs = {k: v.to("cuda") for k, v in case.inputs(2 * step + micro, dtype).items()}
            model(**inputs)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    seen = {f"parameter {n}": p.cpu().clone() for n, p in forebay.parameters(model).items()}
    seen |= states_of(optimizer)
    peak = device.usage().peak
    forebay.close(model)
    assert device.ledger.live == 0
    device.close()
    assert peak <= BUDGET
    return seen


@pytest.mark.parametrize("disk", [False, True], ids=["host", "tiers"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["narrow", "llama-tied", "frozen"])
def test_as_if_they_stayed(name: str, dtype: torch.dtype, disk: bool, tmp_path: Path) -> None:
    case = NARROW if name == "narrow" else CASES[name]
    resident = left(case, dtype, None, policy="resident")
    for cells in (1, 3):
        plan = on_device(case, dtype, disk=disk, cells=cells, host_slots=3)
        for seed in (None, 0, 1):
            delays = None if seed is None else RandomDelays(seed, max_seconds=0.002)
            made = left(case, dtype, delays, plan=plan, disk=f"{tmp_path}:64MiB")
            assert made.keys() == resident.keys()
            assert all(torch.equal(made[n], resident[n]) for n in made)


def test_work_is_ordered_between_its_copies() -> None:
    """There, changed there, and back: late by chance, a hundred times through one buffer."""
    device = CudaDevice(0, delays=RandomDelays(0, max_seconds=0.001))
    cell = device.allocate(1 << 20, Kind.STAGING, "cell")

    def add(number: int) -> None:
        cell.add_(number)

    sources = [torch.full((1 << 20,), i, dtype=torch.uint8).pin_memory() for i in range(100)]
    targets = [torch.empty(1 << 20, dtype=torch.uint8).pin_memory() for _ in sources]
    home = None
    for source, target in zip(sources, targets, strict=True):
        there = device.copy(Lane.H2D, cell, source, after=() if home is None else (home,), what="there")
        changed = device.launch(partial(add, 7), after=(there,), nbytes=2 << 20, what="change")
        home = device.copy(Lane.D2H, target, cell, after=(changed,), what="back")
    device.synchronize()
    assert all(bool((target == i + 7).all()) for i, target in enumerate(targets))
    lanes = {event.lane for event in device.drain_events()}
    assert lanes == {Lane.H2D, Lane.D2H, Lane.DEVICE_UPDATE}
    device.free(cell)
    device.close()
