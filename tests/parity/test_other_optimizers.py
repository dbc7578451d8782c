"""Optimizers beside the prepared one, over the same model: refused where parameters are elsewhere, in words of ours."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

import forebay
from forebay import optim
from forebay.errors import ParameterReleased

WIDTH = 16
BATCH = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)


class Own(torch.optim.Optimizer):
    """A user's own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.add_(parameter.grad, alpha=-0.1)


class Wrapped(torch.optim.Optimizer):
    """Has another step in its place."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        super().__init__(inner.param_groups, inner.defaults)

    def step(self, closure: Any = None) -> None:
        self.inner.step()


Make = Callable[[Any], torch.optim.Optimizer]
MAKERS: dict[str, Make] = {
    "fused": lambda p: torch.optim.AdamW(p, fused=True),
    "foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "momentum": lambda p: torch.optim.SGD(p, momentum=0.9),
    "forebay": optim.AdamW,
    "own": Own,
}


def prepared(policy: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    return forebay.prepare(model, optimizer, BATCH, device_memory="1MiB", policy=policy, device="cpu")


@pytest.mark.parametrize("name", MAKERS)
def test_a_step_of_another_optimizer_is_refused_while_parameters_are_elsewhere(name: str) -> None:
    model, optimizer = prepared("stream")
    other = MAKERS[name](model.parameters())
    model(BATCH).square().sum().backward()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    words = rf"this {type(other).__name__} would write parameter 0\.weight .*; step the optimizer that forebay.prepare"
    with pytest.raises(ParameterReleased, match=words):
        other.step()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    optimizer.step()
    forebay.close(model)
    model(BATCH).square().sum().backward()
    other.step()


def test_what_steps_a_prepared_optimizer_or_other_parameters_is_left_alone() -> None:
    model, optimizer = prepared("stream")
    beside = nn.Linear(WIDTH, WIDTH)
    model(beside(BATCH)).square().sum().backward()
    before = model.state_dict()["0.weight"].clone()
    Wrapped(optimizer).step()
    torch.optim.AdamW([*beside.parameters(), *model.parameters()][:2], foreach=True).step()
    assert not torch.equal(model.state_dict()["0.weight"], before)
    forebay.close(model)


def test_parameters_that_stay_on_the_device_may_have_another() -> None:
    model, _ = prepared("resident")
    model(BATCH).square().sum().backward()
    before = model.state_dict()["0.weight"].clone()
    torch.optim.SGD(model.parameters(), lr=0.1, foreach=True).step()
    assert not torch.equal(model.state_dict()["0.weight"], before)
    forebay.close(model)


def test_a_model_that_is_dropped_leaves_no_hook_behind() -> None:
    before = len(_global_optimizer_pre_hooks)
    model, optimizer = prepared("stream")
    assert len(_global_optimizer_pre_hooks) == before + 1
    del model, optimizer
    gc.collect()
    assert len(_global_optimizer_pre_hooks) == before
