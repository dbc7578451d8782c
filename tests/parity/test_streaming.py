"""Lossless means lossless: every model, streamed in every way, gives the numbers of plain PyTorch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import forebay
from forebay.arenas import arenas
from forebay.budgets import Budget, DiskBudget
from forebay.layout import PAGE, align
from forebay.memory import Tier
from forebay.plans import Plan
from forebay.runtime.blocks import find_blocks
from forebay.units import parse_disk
from tests.parity.compare import adamw, assert_same_training
from tests.parity.models import CASES

AMPLE = "64MiB"

# Every model in all its dtypes where everything streams; where everything stays, in one of them.
WAYS = [("stream", name, dtype) for name, case in CASES.items() for dtype in case.dtypes]
WAYS += [("auto", name, case.dtypes[i % len(case.dtypes)]) for i, (name, case) in enumerate(CASES.items())]


@pytest.mark.thinned(8)
@pytest.mark.parametrize(("policy", "name", "dtype"), WAYS, ids=[f"{p}-{n}-{str(d)[6:]}" for p, n, d in WAYS])
def test_same_numbers(policy: str, name: str, dtype: torch.dtype) -> None:
    model = assert_same_training(CASES[name], dtype, policy=policy, device_memory=AMPLE, device="cpu")
    forebay.close(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_numbers_with_everything_on_disk(dtype: torch.dtype, tmp_path: Path) -> None:
    disk = f"{tmp_path}:64MiB"
    plan = everything_on_disk(CASES["llama"].model(dtype), disk)
    model = assert_same_training(CASES["llama"], dtype, plan=plan, device_memory=AMPLE, disk=disk, device="cpu")
    usage = {t.tier: t for t in forebay.report(model).timeline.tiers}
    assert usage[Tier.DISK].peak == plan.disk
    assert usage[Tier.HOST].peak == plan.host
    forebay.close(model)
    assert not any(tmp_path.iterdir())


def everything_on_disk(model: nn.Module, disk: str) -> Plan:
    """A plan of small pieces: parameters and states of every block on disk, many chunks, poisoned slots."""
    model, _ = forebay.prepare(
        model, adamw(list(model.parameters())), device_memory=AMPLE, policy="stream", device="cpu"
    )
    made = forebay.report(model).plan
    forebay.close(model)
    largest = align(made.streaming.slots[0], PAGE)
    streaming = replace(made.streaming, host_slots=(largest, largest), update_chunk=2048, poison=True)
    placements = tuple(replace(p, parameters=Tier.DISK, states=Tier.DISK) for p in made.placements)
    sizes = arenas(find_blocks(model).model, placements, streaming, ("exp_avg", "exp_avg_sq"))
    budget = Budget(made.budget.device, disk=DiskBudget(*parse_disk(disk)))
    return replace(made, budget=budget, placements=placements, streaming=streaming, host=sizes.host, disk=sizes.disk)
