"""A loop of one backward a step (``accumulates=False``): its peak, its numbers, and what is refused under its plan."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
import torch
from torch import nn

import forebay
from forebay.errors import ConfigError, UsageError
from forebay.memory import Tier
from tests.parity.compare import adamw
from tests.parity.models import CASES

AMPLE = 64 * 2**20
CASE = CASES["llama"]
DTYPE = torch.float32


def prepared(device_memory: int, *, accumulates: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = CASE.model(DTYPE)
    how = {"device_memory": device_memory, "accumulates": accumulates, "device": "cpu"}
    return forebay.prepare(model, adamw(list(model.parameters())), CASE.inputs(0, DTYPE), **how)


@cache
def needed(*, accumulates: bool) -> int:
    """Bytes with which everything stays on the device."""
    model, _ = prepared(AMPLE, accumulates=accumulates)
    plan = forebay.report(model).plan
    forebay.close(model)
    assert all(p.resident for p in plan.placements) and not plan.recompute and plan.accumulates is accumulates
    return plan.device


@pytest.fixture
def within() -> Iterator[tuple[nn.Module, torch.optim.Optimizer]]:
    """Everything on the device, within the bytes that one backward a step takes."""
    model, optimizer = prepared(needed(accumulates=False), accumulates=False)
    yield model, optimizer
    forebay.close(model)


def train(model: nn.Module, batch: int) -> None:
    model(**CASE.inputs(batch, DTYPE))["loss"].backward()


def test_the_peak_is_the_promise(within: tuple[nn.Module, torch.optim.Optimizer]) -> None:
    """To the byte, and below that of any loop by the gradients that the most activations do not meet. Losses and
    gradients are plain PyTorch's."""
    model, optimizer = within
    reference, output = CASE.model(DTYPE), None
    for step in range(3):
        reference.load_state_dict(forebay.parameters(model))
        expected = reference(**CASE.inputs(step, DTYPE))["loss"]
        expected.backward()
        output = model(**CASE.inputs(step, DTYPE))  # that of the step before lives on meanwhile, as the plan assumes
        output["loss"].backward()
        assert torch.equal(output["loss"], expected)
        for (name, plain), own in zip(reference.named_parameters(), model.parameters(), strict=True):
            assert plain.grad is not None and own.grad is not None and torch.equal(own.grad, plain.grad), name
        optimizer.step()
        optimizer.zero_grad()
        reference.zero_grad()
    report = forebay.report(model)
    peak = report.timeline.peaks[Tier.DEVICE]
    assert peak == report.plan.device == needed(accumulates=False)
    assert 0 < needed(accumulates=True) - peak <= sum(p.nbytes for p in reference.parameters())


def test_a_second_backward_is_refused(within: tuple[nn.Module, torch.optim.Optimizer]) -> None:
    model, optimizer = within
    train(model, 0)
    with pytest.raises(UsageError, match=r"has a gradient when forward begins.*accumulates=False.*zero_grad\(\)"):
        model(**CASE.inputs(1, DTYPE))
    with torch.no_grad():
        model(**CASE.inputs(1, DTYPE))  # nothing is kept there
    optimizer.step()
    with pytest.raises(UsageError, match="or prepare the model with accumulates=True"):
        model(**CASE.inputs(1, DTYPE))
    optimizer.zero_grad(set_to_none=False)
    with pytest.raises(UsageError, match="set_to_none=True"):
        model(**CASE.inputs(1, DTYPE))
    optimizer.zero_grad()
    train(model, 1)
    optimizer.step()
    assert forebay.report(model).steps == 2


def test_micro_batches_together_are_refused(within: tuple[nn.Module, torch.optim.Optimizer]) -> None:
    model, _ = within
    batches = [CASE.inputs(number, DTYPE) for number in range(2)]
    with pytest.raises(UsageError, match=r"one backward a step \(accumulates=False\), and accumulate was given 2"):
        forebay.accumulate(model, batches, lambda model, batch: model(**batch)["loss"])
    (loss,) = forebay.accumulate(model, batches[:1], lambda model, batch: model(**batch)["loss"])
    assert loss.isfinite()


def test_they_are_refused_beforehand() -> None:
    model = CASE.model(DTYPE)
    optimizer = adamw(list(model.parameters()))
    with pytest.raises(ConfigError, match="accumulates=False is a loop of one backward a step, got 2 micro-batches"):
        forebay.prepare(
            model, optimizer, CASE.inputs(0, DTYPE), device_memory=AMPLE, micro_batches=2, accumulates=False
        )
    with pytest.raises(ConfigError, match=r"needs to know when gradients are made \(no batch was given\)"):
        forebay.prepare(model, optimizer, device_memory=AMPLE, accumulates=False)
