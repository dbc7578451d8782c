"""Tensors of a loop's own that it gives to gradients: they may change as soon as the call is over."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from torch import nn

import forebay
from forebay.device.cpu import CpuDevice
from forebay.device.delays import RandomDelays
from forebay.errors import ParameterReleased
from forebay.timeline import Lane

AMPLE = 64 * 2**20
WIDTH = 160
"""Of a weight of 100 KiB: a copy of up to 64 KiB is made at once, and is never late."""

Give = Callable[[Sequence[nn.Parameter], torch.Tensor, int], None]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)))


def added(weights: Sequence[nn.Parameter], own: torch.Tensor, step: int) -> None:
    """Noise, drawn into one tensor for all of them."""
    for place, weight in enumerate(weights):
        weight.grad.add_(own.fill_(1e-3 * (3 * step + place)))


def put_in_place(weights: Sequence[nn.Parameter], own: torch.Tensor, step: int) -> None:
    weights[1].grad = own.copy_(weights[1].grad).mul_(2)


GIVEN: dict[str, Give] = {"added": added, "in place of one": put_in_place}


@pytest.fixture(params=[False, True], ids=["waiting", "overlapping"])
def prepared(request: pytest.FixtureRequest) -> Iterator[tuple[nn.Sequential, torch.optim.Optimizer]]:
    """Gradients come to the host late, and no step waits for its updates."""
    device = CpuDevice(AMPLE, delays=RandomDelays(seed=0, max_seconds=0.02, lanes=[Lane.D2H]))
    plan = forebay.report(streamed()[0]).plan
    plan = replace(plan, streaming=replace(plan.streaming, overlap_update=request.param))
    model = network()
    yield forebay.prepare(model, sgd(model), plan=plan, device_memory=AMPLE, device=device)
    forebay.close(model)
    device.close()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2, fused=True)


def streamed() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = network()
    return forebay.prepare(model, sgd(model), device_memory=AMPLE, policy="stream", device="cpu")


def losses(model: nn.Module, optimizer: torch.optim.Optimizer, give: Give | None, hook: Give | None) -> list[float]:
    """Of steps in which the tensor that is given is overwritten at once."""
    own, weights, found = torch.empty(WIDTH, WIDTH), list(model.parameters()), []
    step = 0
    for place, weight in enumerate(weights) if hook else ():
        weight.register_post_accumulate_grad_hook(lambda p, place=place: hook([p], own, step + place))  # type: ignore[misc]
    for step in range(4):
        loss = model(torch.ones(4, WIDTH)).square().mean()
        loss.backward()
        if give is not None:
            give(weights, own, step)
        optimizer.step()
        own.fill_(7.0)
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("given", GIVEN)
def test_it_may_change_at_once(prepared: tuple[nn.Sequential, torch.optim.Optimizer], given: str) -> None:
    reference = network()
    assert losses(*prepared, GIVEN[given], None) == losses(reference, sgd(reference), GIVEN[given], None)


def test_what_a_hook_adds_may_too(prepared: tuple[nn.Sequential, torch.optim.Optimizer]) -> None:
    reference = network()
    assert losses(*prepared, None, added) == losses(reference, sgd(reference), None, added)


@pytest.mark.parametrize("steps", [0, 4], ids=["in what is looked at", "where nobody looks"])
def test_a_fused_optimizer_that_is_not_forebays_writes_nothing(steps: int) -> None:
    """torch's kernels write as many elements as a parameter has: of one that is away there is one."""
    model, optimizer = streamed()
    losses(model, optimizer, None, None) if steps else None
    model(torch.ones(4, WIDTH)).square().mean().backward()
    before = {name: value.clone() for name, value in forebay.parameters(model).items()}
    with pytest.raises(ParameterReleased):
        sgd(model).step()
    assert all(torch.equal(value, before[name]) for name, value in forebay.parameters(model).items())
    forebay.close(model)
