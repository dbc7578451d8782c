"""The bound on device memory holds, and is near what real models take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

import forebay
from forebay.lowering import device_bound
from forebay.memory import Tier
from forebay.plans import Plan
from forebay.profiler.capture import capture
from forebay.trace import Trace
from tests.parity.compare import adamw
from tests.parity.models import CASES
from tests.parity.observed import AMPLE
from tests.parity.test_lowering_order import prepared_plan, streamed

WINDOW = 4096
MODELS = ("gpt2", "llama", "llama-tied", "albert", "t5", "mixtral", "vit", "convnet", "frozen")


def inputs(name: str) -> dict[str, Any]:
    """A batch. Language models without a cache: what a recomputation remembers of it is no activation of the step."""
    batch = CASES[name].inputs(0, torch.float32)
    return {**batch, "use_cache": False} if "input_ids" in batch else batch


@cache
def traced(name: str) -> Trace:
    return capture(CASES[name].model(torch.float32), inputs(name)).trace


def measured(name: str, plan: Plan, batch: Mapping[str, Any]) -> int:
    """Peak of the device's ledger over three steps, in bytes."""
    model = CASES[name].model(torch.float32)
    optimizer = adamw([p for p in model.parameters() if p.requires_grad])
    model, optimizer = forebay.prepare(model, optimizer, device_memory=AMPLE, plan=plan, device="cpu")
    for _ in range(3):
        output = model(**batch)  # held while the next forward runs, as loops do
        output["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    forebay.synchronize(model)
    usage = forebay.report(model).timeline.usage(Tier.DEVICE)
    forebay.close(model)
    return usage.peak


@pytest.mark.thinned(4)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_bound(name: str, recompute: bool) -> None:
    batch, trace = inputs(name), traced(name)
    plan = streamed(trace, prepared_plan(CASES[name].model(torch.float32), "stream"), 3, distance=1, window=WINDOW)
    if recompute:
        layers = (b.name for b in trace.model.blocks if b.module is not None and b.name[-1].isdigit())
        plan = replace(plan, recompute=tuple(layers))
    peak, bound = measured(name, plan, batch), device_bound(trace, plan)
    # Over by what may be under way and was not.
    assert peak <= bound <= peak * 1.03 + WINDOW
