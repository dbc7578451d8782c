"""Parameter groups of a prepared optimizer that change: options that ask for a state which was not planned, and groups
that come later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import forebay
from forebay import optim
from forebay.errors import OptimizerError
from forebay.optim.streamed import frozen_group
from forebay.plans import Plan
from tests.parity.in_backward import in_backward
from tests.parity.speculating import Run, speculating
from tests.parity.test_delays import NARROW

WIDTH = 16

Make = Callable[[nn.Module], torch.optim.Optimizer]
Change = Callable[[torch.optim.Optimizer], Any]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))


def prepared(make: Make, policy: str = "stream") -> tuple[nn.Module, torch.optim.Optimizer]:
    model, batch = network(), torch.zeros(4, WIDTH)
    return forebay.prepare(model, make(model), batch, device_memory="1MiB", policy=policy, device="cpu")


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    optimizer.zero_grad()
    loss: torch.Tensor = model(torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)).square().sum()
    loss.backward()
    optimizer.step()
    return loss.item()


def in_last_group(**options: Any) -> Change:
    return lambda optimizer: optimizer.param_groups[-1].update(options)


def one_cycle(optimizer: torch.optim.Optimizer) -> None:
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2, fused=True, **options)


def half_with_momentum(model: nn.Module, dampening: float = 0.0) -> torch.optim.Optimizer:
    groups = [{"params": model[:2].parameters(), "momentum": 0.9}, {"params": model[2:].parameters()}]  # type: ignore[index]
    return torch.optim.SGD(groups, lr=1e-2, dampening=dampening, fused=True)


LATE: dict[str, tuple[Make, Change, str]] = {
    "momentum": (sgd, in_last_group(momentum=0.9), r"momentum is 0\.9 in .*no momentum_buffer .*Turn it on before"),
    "one-cycle": (sgd, one_cycle, r"momentum is 0\.95 .*cycle_momentum=False"),
    "dampening": (lambda m: half_with_momentum(m, 0.5), in_last_group(momentum=0.9), "with dampening it cannot"),
    "amsgrad": (lambda m: torch.optim.AdamW(m.parameters()), in_last_group(amsgrad=True), "no max_exp_avg_sq"),
    "rmsprop": (lambda m: torch.optim.RMSprop(m.parameters()), in_last_group(momentum=0.9), "no momentum_buffer"),
    "centered": (lambda m: torch.optim.RMSprop(m.parameters()), in_last_group(centered=True), "no grad_avg"),
    "moments": (
        lambda m: optim.AdamW(m.parameters()),
        in_last_group(moments="bfloat16"),
        r"moments is 'bfloat16' in .* made for 'float32'.*set it back",
    ),
    "adamw-rounding": (
        lambda m: optim.AdamW(m.parameters()),
        in_last_group(stochastic_rounding=True),
        "made for False",
    ),
    "lion-rounding": (lambda m: optim.Lion(m.parameters()), in_last_group(stochastic_rounding=True), "made for False"),
    "adafactor-rounding": (
        lambda m: optim.Adafactor(m.parameters()),
        in_last_group(stochastic_rounding=True),
        r"stochastic_rounding is True in .* made for False",
    ),
    "use-muon": (
        lambda m: optim.Muon(optim.muon_groups(m)),
        in_last_group(use_muon=True),
        r"use_muon is True .*for False",
    ),
}


@pytest.mark.parametrize("policy", ["stream", "resident"])
@pytest.mark.parametrize("name", LATE)
def test_an_option_whose_state_was_not_planned_is_refused(name: str, policy: str) -> None:
    make, change, words = LATE[name]
    model, optimizer = prepared(make, policy)
    step(model, optimizer)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    options = [dict(group) for group in optimizer.param_groups]
    change(optimizer)
    with pytest.raises(OptimizerError, match=words):
        step(model, optimizer)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    for group, as_before in zip(optimizer.param_groups, options, strict=True):
        group.update(as_before)
    step(model, optimizer)
    assert not all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    forebay.close(model)


@pytest.mark.parametrize("planned", [speculating, in_backward])
def test_an_update_before_its_step_is_refused_too(planned: Callable[..., Plan]) -> None:
    run = Run(NARROW, torch.float32, planned(NARROW, torch.float32, disk=False), None, None)
    for batch in range(2):
        run.backward(batch)
        run.optimizer.step()
        run.optimizer.zero_grad()
    before = {name: p.clone() for name, p in forebay.parameters(run.model).items()}
    for group in run.optimizer.param_groups:
        group["amsgrad"] = True
    with pytest.raises(OptimizerError, match="no max_exp_avg_sq"):
        run.backward(2)
    for group in run.optimizer.param_groups:
        group["amsgrad"] = False
    run.optimizer.zero_grad()
    assert all(torch.equal(p, before[name]) for name, p in forebay.parameters(run.model).items())
    run.backward(2)
    run.optimizer.step()
    run.close()


def adam(model: nn.Module, kind: type[torch.optim.Optimizer] = torch.optim.Adam) -> torch.optim.Optimizer:
    return kind(model.parameters(), lr=1e-2, weight_decay=0.1, fused=True)  # type: ignore[call-arg]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return adam(model, torch.optim.AdamW)


def half_decoupled(model: nn.Module) -> torch.optim.Optimizer:
    groups = [{"params": model[:2].parameters(), "decoupled_weight_decay": True}, {"params": model[2:].parameters()}]  # type: ignore[index]
    return torch.optim.Adam(groups, lr=1e-2, weight_decay=0.1, fused=True)


@pytest.mark.parametrize("make", [adam, adamw, half_decoupled])
@pytest.mark.parametrize("policy", ["stream", "resident"])
def test_whether_the_decay_is_decoupled_is_asked_at_each_step(make: Make, policy: str) -> None:
    plain = network()
    its = make(plain)
    model, optimizer = prepared(make, policy)
    for late in (None, True, False, True):
        for one in (its, optimizer) if late is not None else ():
            in_last_group(decoupled_weight_decay=late)(one)
        assert step(model, optimizer) == step(plain, its)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in plain.state_dict().items())
    forebay.close(model)


@pytest.mark.parametrize(("make", "saved"), [(adam, adamw), (adamw, adam)])
def test_the_decay_behind_the_states_of_another_adam_is_torchs(make: Make, saved: Make) -> None:
    other = network()
    states = saved(other)
    step(other, states)
    plain = network()
    its = make(plain)
    model, optimizer = prepared(make)
    for one in (its, optimizer):
        one.load_state_dict(states.state_dict())
    for _ in range(3):
        assert step(model, optimizer) == step(plain, its)
    assert optimizer.param_groups[0]["decoupled_weight_decay"] == its.param_groups[0]["decoupled_weight_decay"]
    forebay.close(model)


def test_parameters_that_muon_was_not_made_for_are_no_group_of_its_own() -> None:
    model, optimizer = prepared(lambda m: optim.Muon([m[0].weight]))  # type: ignore[index]
    with pytest.raises(OptimizerError, match=r"use_muon is True .* made for False"):
        optimizer.add_param_group({"params": [model[1].weight]})  # type: ignore[index]
    optimizer.add_param_group({"params": [model[1].weight], "use_muon": False})  # type: ignore[index]
    step(model, optimizer)
    forebay.close(model)


def test_momentum_that_another_group_has_may_begin_later() -> None:
    plain = network()
    its = half_with_momentum(plain)
    model, optimizer = prepared(half_with_momentum)
    for late in (0.0, 0.0, 0.9, 0.9, 0.9):
        in_last_group(momentum=late)(its)
        in_last_group(momentum=late)(optimizer)
        assert step(model, optimizer) == step(plain, its)
    forebay.close(model)


def test_loading_an_option_whose_state_was_not_planned_is_refused() -> None:
    plain = network()
    its = sgd(plain, momentum=0.9)
    step(plain, its)
    model, optimizer = prepared(sgd)
    with pytest.raises(OptimizerError, match=r"momentum is 0\.9 .*no momentum_buffer"):
        optimizer.load_state_dict(its.state_dict())
    assert optimizer.param_groups[0]["momentum"] == 0
    step(model, optimizer)
    forebay.close(model)


def test_a_group_goes_on_as_what_is_loaded_into_it_did() -> None:
    """With momentum, which with dampening it could not begin by itself any more."""
    plain, (model, optimizer) = network(), prepared(lambda m: half_with_momentum(m, 0.5))
    with_momentum = half_with_momentum(plain, 0.5)
    in_last_group(momentum=0.9)(with_momentum)
    step(plain, with_momentum)
    model.load_state_dict(plain.state_dict())
    optimizer.load_state_dict(with_momentum.state_dict())
    for _ in range(2):
        assert step(model, optimizer) == step(plain, with_momentum)
    forebay.close(model)


def test_states_that_are_no_numbers_of_the_kind_are_refused() -> None:
    """And nothing is loaded."""
    model, optimizer = prepared(adamw)
    step(model, optimizer)
    saved = optimizer.state_dict()
    other = optimizer.state_dict()
    other["state"][0]["exp_avg"] = torch.zeros(WIDTH, WIDTH, dtype=torch.int64)
    with pytest.raises(OptimizerError, match=r"the saved exp_avg of 0.weight has shape \(16, 16\) in int64"):
        optimizer.load_state_dict(other)
    for own, before in zip(optimizer.state_dict()["state"].values(), saved["state"].values(), strict=True):
        assert all(torch.equal(own[name], before[name]) for name in before)
    forebay.close(model)


def test_what_a_step_takes_is_a_copy_of_its_group() -> None:
    """A scheduler may change what the group has while the update is still queued. A learning rate in fp32 multiplies in
    fp32, as it does in torch."""
    group = {"params": [], "lr": torch.tensor(1e-2), "betas": [0.9, torch.tensor(0.95, dtype=torch.float64)]}
    frozen: dict[str, Any] = frozen_group(group)
    group["lr"].mul_(2)  # type: ignore[attr-defined]
    group["betas"][0] = 0.5  # type: ignore[index]
    assert frozen == {"lr": np.float32(1e-2), "betas": (0.9, 0.95)}
    assert frozen["lr"] * 0.1 == np.float32(1e-2) * np.float32(0.1) != float(frozen["lr"]) * 0.1


def test_states_that_only_some_groups_have_are_loaded() -> None:
    """As a plain optimizer has them: none of those that a group does not ask for."""
    for kind, option in ((torch.optim.AdamW, "amsgrad"), (torch.optim.RMSprop, "centered")):

        def made(model: nn.Module, kind: Any = kind, option: str = option) -> torch.optim.Optimizer:
            groups = [{"params": model[:2].parameters(), option: True}, {"params": model[2:].parameters()}]  # type: ignore[index]
            return kind(groups, lr=1e-2, foreach=False)  # type: ignore[no-any-return]

        plain = network()
        its = made(plain)
        step(plain, its)
        model, optimizer = prepared(made)
        model.load_state_dict(plain.state_dict())
        optimizer.load_state_dict(its.state_dict())
        for _ in range(2):
            assert step(model, optimizer) == step(plain, its)
        forebay.close(model)


def first_layer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model[0].parameters(), lr=1e-2, fused=True)  # type: ignore[index]


def first_layer_by_name(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model[0].named_parameters(), lr=1e-2, fused=True)  # type: ignore[index]


@pytest.mark.parametrize("make", [first_layer, first_layer_by_name])
def test_a_group_is_added_as_in_torch(make: Make) -> None:
    plain = network()
    its = make(plain)
    model, optimizer = prepared(make)
    for subject, used in ((plain, its), (model, optimizer)):
        layer: Any = subject[1]  # type: ignore[index]
        given = layer.named_parameters() if make is first_layer_by_name else layer.parameters()
        used.add_param_group({"params": given, "lr": 5e-2})
    for _ in range(3):
        assert step(model, optimizer) == step(plain, its)
    assert optimizer.state_dict()["param_groups"] == its.state_dict()["param_groups"]
    forebay.close(model)


def test_a_group_that_is_refused_is_not_there() -> None:
    model, optimizer = prepared(lambda m: torch.optim.SGD(m[0].parameters(), lr=1e-2))  # type: ignore[index]
    with pytest.raises(OptimizerError, match=r"momentum is 0\.9"):
        optimizer.add_param_group({"params": model[1].parameters(), "momentum": 0.9})  # type: ignore[index]
    with pytest.raises(OptimizerError, match="not one of the prepared model's"):
        optimizer.add_param_group({"params": nn.Linear(2, 2).parameters()})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": model[1].parameters()})  # type: ignore[index]
    step(model, optimizer)
    forebay.close(model)
