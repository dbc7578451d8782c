"""Optimizers of torch without fused ops: RMSprop, Adagrad, Adadelta, Adamax. They call torch's default on a CPU, so
that every bit is torch's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import forebay
from forebay.errors import OptimizerError
from forebay.memory import Tier
from forebay.profiler.optimizers import STATES, optimizer_kept
from forebay.states import plain_name
from tests.parity.test_optimizers import disk_plan, give_gradients, network, values

AMPLE = "64MiB"
STEPS = 5

Make = Callable[..., torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2),
    "rmsprop-maximize": lambda p: torch.optim.RMSprop(p, lr=1e-2, maximize=True, weight_decay=0.1),
    "rmsprop-momentum": lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.9, alpha=0.9, eps=1e-6),
    "rmsprop-centered": lambda p: torch.optim.RMSprop(p, lr=1e-2, centered=True, weight_decay=0.1),
    "rmsprop-all": lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.9, centered=True, weight_decay=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "adagrad-begun": lambda p: torch.optim.Adagrad(
        p, lr=1e-2, lr_decay=0.1, weight_decay=0.1, initial_accumulator_value=0.3
    ),
    "adagrad-tensor": lambda p: torch.optim.Adagrad(p, lr=torch.tensor(3e-2), lr_decay=0.1),
    "adagrad-fused": lambda p: torch.optim.Adagrad(p, lr=1e-2, weight_decay=0.1, fused=True),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0, weight_decay=0.1),
    "adadelta-maximize": lambda p: torch.optim.Adadelta(p, lr=0.5, rho=0.8, maximize=True),
    "adamax": lambda p: torch.optim.Adamax(p, lr=1e-2, betas=(0.8, 0.99)),
    "adamax-tensor": lambda p: torch.optim.Adamax(p, lr=torch.tensor(1e-2)),
    "adamax-decay": lambda p: torch.optim.Adamax(p, lr=1e-2, weight_decay=0.1, maximize=True),
}


def state_of(optimizer: torch.optim.Optimizer) -> Mapping[int, Mapping[str, torch.Tensor]]:
    return optimizer.state_dict()["state"]


def step_both(step: int, *trained: tuple[nn.Module, torch.optim.Optimizer]) -> None:
    """A step of each, with the same gradients."""
    for model, optimizer in trained:
        give_gradients(model, step)
        optimizer.step()


def assert_same_states(ours: torch.optim.Optimizer, theirs: torch.optim.Optimizer) -> None:
    found, expected = state_of(ours), state_of(theirs)
    assert found.keys() == expected.keys()
    for key, state in expected.items():
        assert found[key].keys() == state.keys()
        assert all(torch.equal(found[key][name], value) for name, value in state.items())


@pytest.mark.thinned(2)
@pytest.mark.parametrize("home", ["device", "host", "disk"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_is_torchs_to_the_last_bit(name: str, home: str, tmp_path: Path) -> None:
    """Wherever it runs; on disk in chunks that cut through parameters."""
    make, reference, model = OPTIMIZERS[name], network(), network()
    plain = make(reference.parameters())
    states = optimizer_kept(make(model.parameters()), model)[1]
    ways: dict[str, dict[str, Any]] = {"device": {"policy": "auto"}, "host": {"policy": "stream"}}
    if home == "disk":
        ways["disk"] = {"plan": disk_plan(network(), tmp_path, states, make), "disk": f"{tmp_path}:64MiB"}
    model, optimizer = forebay.prepare(model, make(model.parameters()), device_memory=AMPLE, device="cpu", **ways[home])
    assert all(p.resident for p in forebay.report(model).plan.placements) is (home == "device")
    for step in range(STEPS):
        step_both(step, (model, optimizer), (reference, plain))
        assert all(torch.equal(values(model)[key], p) for key, p in reference.named_parameters())
        assert_same_states(optimizer, plain)
    forebay.close(model)


@pytest.mark.parametrize("name", ["rmsprop-all", "adagrad-begun", "adagrad-fused", "adadelta", "adamax"])
def test_in_pieces(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of large parameters, some at a time: as torch has all at once."""
    monkeypatch.setattr("forebay.optim.plain.CACHED", 1 << 12)

    def large() -> nn.Module:
        torch.manual_seed(0)
        return nn.Linear(131, 257)

    make, reference, model = OPTIMIZERS[name], large(), large()
    plain = make(reference.parameters())
    model, optimizer = forebay.prepare(model, make(model.parameters()), device_memory=AMPLE, device="cpu")
    for step in range(STEPS):
        step_both(step, (model, optimizer), (reference, plain))
    assert all(torch.equal(values(model)[key], p) for key, p in reference.named_parameters())
    forebay.close(model)


@pytest.mark.parametrize("policy", ["auto", "stream"])
@pytest.mark.parametrize("name", ["rmsprop-momentum", "adagrad", "adadelta", "adamax"])
def test_a_bf16_model_has_masters(name: str, policy: str) -> None:
    """Updated as torch updates a parameter in fp32; the parameter is its master, rounded."""
    make = OPTIMIZERS[name]
    model, reference = network(torch.bfloat16), network(torch.bfloat16).float()
    plain = make(reference.parameters())
    model, optimizer = forebay.prepare(
        model, make(model.parameters()), device_memory=AMPLE, policy=policy, device="cpu"
    )
    for step in range(STEPS):
        give_gradients(model, step)
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            theirs.grad = ours.grad.float() if ours.grad is not None else None
        optimizer.step()
        plain.step()
        for key, parameter in reference.named_parameters():
            assert torch.equal(forebay.parameters(model)[key], parameter)
            assert torch.equal(model.state_dict()[key], parameter.to(torch.bfloat16))
    forebay.close(model)


@pytest.mark.parametrize("name", ["rmsprop-all", "adagrad-begun", "adadelta", "adamax-decay"])
def test_states_go_to_torchs_optimizer_and_back(name: str) -> None:
    make, reference, model = OPTIMIZERS[name], network(), network()
    plain = make(reference.parameters())
    for step in range(2):
        give_gradients(reference, step)
        plain.step()
    model.load_state_dict(reference.state_dict())
    model, optimizer = forebay.prepare(
        model, make(model.parameters()), device_memory=AMPLE, policy="stream", device="cpu"
    )
    optimizer.load_state_dict(plain.state_dict())
    assert_same_states(optimizer, plain)
    give_gradients(model, 2)
    optimizer.step()
    again = make(reference.parameters())
    again.load_state_dict(plain.state_dict())
    give_gradients(reference, 2)
    again.step()
    assert all(torch.equal(values(model)[key], p) for key, p in reference.named_parameters())
    assert_same_states(optimizer, again)
    forebay.close(model)


def test_one_group_with_momentum() -> None:
    def made(model: nn.Module) -> torch.optim.Optimizer:
        first, *rest = model.parameters()
        groups = [{"params": [first], "momentum": 0.9}, {"params": rest, "centered": True, "lr": 3e-3}]
        return torch.optim.RMSprop(groups, lr=1e-2)

    reference, model = network(), network()
    plain = made(reference)
    model, optimizer = forebay.prepare(model, made(model), device_memory=AMPLE, policy="stream", device="cpu")
    for step in range(STEPS):
        step_both(step, (model, optimizer), (reference, plain))
    assert all(torch.equal(values(model)[key], p) for key, p in reference.named_parameters())
    forebay.close(model)


def test_adagrad_begins_as_it_was_made_whatever_a_group_says() -> None:
    def made(model: nn.Module) -> torch.optim.Optimizer:
        first, *rest = model.parameters()
        groups = [{"params": [first], "initial_accumulator_value": 0.5}, {"params": rest}]
        return torch.optim.Adagrad(groups, lr=1e-2, initial_accumulator_value=0.1)

    reference, model = network(), network()
    plain = made(reference)
    model, optimizer = forebay.prepare(model, made(model), device_memory=AMPLE, policy="stream", device="cpu")
    for step in range(2):
        step_both(step, (model, optimizer), (reference, plain))
    assert all(torch.equal(values(model)[key], p) for key, p in reference.named_parameters())
    forebay.close(model)


@pytest.mark.parametrize("name", ["rmsprop-all", "adadelta", "adamax-decay"])
def test_the_least_budget_of_a_plan_is_enough(name: str) -> None:
    """Parameters, gradients and states that stay, activations, and the three numbers of a piece in between."""
    batch = torch.linspace(-1, 1, 4 * 37).view(4, 37)
    model = network()
    model, optimizer = forebay.prepare(
        model, OPTIMIZERS[name](model.parameters()), batch, device_memory=AMPLE, device="cpu"
    )
    promised = forebay.report(model).plan.device
    forebay.close(model)
    model = network()
    model, optimizer = forebay.prepare(
        model, OPTIMIZERS[name](model.parameters()), batch, device_memory=promised, policy="resident", device="cpu"
    )
    for _ in range(3):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    (device,) = (usage for usage in forebay.report(model).timeline.tiers if usage.tier is Tier.DEVICE)
    assert 0 < device.peak <= promised
    forebay.close(model)


def test_one_that_has_stepped_is_refused() -> None:
    model = network()
    stepped = torch.optim.Adagrad(model.parameters())
    give_gradients(model, 0)
    stepped.step()
    with pytest.raises(OptimizerError, match="has taken steps already"):
        forebay.prepare(model, stepped, device_memory=AMPLE, device="cpu")


@pytest.mark.parametrize("name", ["rmsprop", "rmsprop-momentum", "adagrad", "adadelta", "adamax"])
def test_their_names_stand_for_their_states(name: str) -> None:
    model = network()
    rule = optimizer_kept(OPTIMIZERS[name](model.parameters()), model)[1]
    assert tuple(map(plain_name, STATES[name])) == rule


@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.RAdam, torch.optim.ASGD, torch.optim.Rprop])
def test_others_are_refused_by_name(kind: type[torch.optim.Optimizer]) -> None:
    model = network()
    with pytest.raises(
        OptimizerError, match=rf"{kind.__name__} is not an optimizer .* RMSprop, Adagrad, Adadelta, Adamax"
    ):
        forebay.prepare(model, kind(model.parameters()), device_memory=AMPLE, device="cpu")
