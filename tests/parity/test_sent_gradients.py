"""Training with the largest elements of gradients: the numbers are those of top-k with error feedback written out in
plain PyTorch, and a checkpoint has all of them."""

from __future__ import annotations

from math import ceil
from pathlib import Path

import pytest
import torch
from torch import nn

import forebay
from forebay.arenas import arenas
from forebay.budgets import Budget, DiskBudget
from forebay.device.cpu import CpuDevice
from forebay.errors import ConfigError, OptimizerError
from forebay.memory import Kind, Tier
from forebay.plans import Placement, Plan, Streaming, Update
from forebay.runtime.blocks import find_blocks
from tests.parity.content import content

WIDTH, DENSITY, STEPS = 40, 0.2, 4
STATES = ("exp_avg", "exp_avg_sq")


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)]).to(dtype)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def backward(model: nn.Module, step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Of one batch, clipped."""
    inputs = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step)).to(dtype)
    loss = model(inputs).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    return loss.detach()


def plan_for(folder: Path, density: float | None, dtype: torch.dtype = torch.float32) -> Plan:
    """Everything streams, states are on disk: updated there with so much of each gradient, or (None) on the host."""
    model = find_blocks(network(dtype)).model
    where = Update.STEP if density is None else Update.STORAGE
    placements = tuple(Placement(block.name, Tier.HOST, Tier.HOST, Tier.DISK, where) for block in model.blocks)
    largest = max(block.nbytes for block in model.blocks)
    how = Streaming(slots=(largest, largest), update_chunk=4096, gradient_density=density)
    sizes = arenas(model, placements, how, STATES)
    budget = Budget(8 << 20, disk=DiskBudget(str(folder), 8 << 20))
    changes = () if density in (None, 1.0) else ("gradients go in part",)
    figures = (8 << 20, sizes.host, sizes.disk)
    return Plan("test", budget, placements, how, *figures, changes_numbers=changes)


class Trained:
    """The model under a plan."""

    def __init__(self, plan: Plan, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        model, self.dtype, self.device = network(dtype), dtype, CpuDevice(8 << 20)
        disk = f"{folder}:8MiB"
        self.model, self.optimizer = forebay.prepare(
            model, adamw(model), plan=plan, device_memory="8MiB", disk=disk, device=self.device
        )

    def steps(self, which: range) -> list[torch.Tensor]:
        losses = []
        for step in which:
            losses.append(backward(self.model, step, self.dtype))
            self.optimizer.step()
            self.optimizer.zero_grad()
        return losses

    def everything(self) -> dict[str, torch.Tensor]:
        return content(self.model, self.optimizer)

    def close(self) -> None:
        forebay.close(self.model)
        self.device.close()


def written_out(model: nn.Module, steps: range) -> list[torch.Tensor]:
    """Top-k with error feedback in plain PyTorch."""
    optimizer, losses = adamw(model), []
    residuals = {p: torch.zeros_like(p).view(-1) for p in model.parameters()}
    for step in steps:
        losses.append(backward(model, step))
        for parameter, residual in residuals.items():
            assert parameter.grad is not None
            residual += parameter.grad.view(-1)
            places = residual.abs().topk(ceil(DENSITY * residual.numel())).indices
            sent = torch.zeros_like(residual)
            sent[places] = residual[places]
            residual[places] = 0.0
            parameter.grad = sent.view_as(parameter)
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_elements_are_the_exact_mode(dtype: torch.dtype, tmp_path: Path) -> None:
    """Bit for bit that of gradients as they are: losses, parameters, masters and moments."""
    left = []
    for density in (None, 1.0):
        run = Trained(plan_for(tmp_path, density, dtype), tmp_path, dtype)
        losses = run.steps(range(STEPS))
        left.append((losses, {n: v for n, v in run.everything().items() if not n.startswith("residual")}))
        run.close()
    (whole, state), (sent, other) = left
    assert all(map(torch.equal, whole, sent)) and state.keys() == other.keys()
    assert all(
        torch.equal(state[name].view(torch.uint8), other[name].view(torch.uint8)) for name in state if state[name].dim()
    )


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
def test_a_run_goes_on_as_it_would_have(dtype: torch.dtype, tmp_path: Path) -> None:
    """It is top-k with error feedback; a checkpoint has what was not sent yet, and so has a ``state_dict``."""
    plan, plain = plan_for(tmp_path, DENSITY, dtype), network()
    first = Trained(plan, tmp_path, dtype)
    losses = first.steps(range(STEPS))
    if dtype is torch.float32:
        assert all(map(torch.equal, losses, written_out(plain, range(STEPS))))
        found = forebay.parameters(first.model)
        assert all(torch.equal(found[name], value) for name, value in plain.named_parameters())
    # Of the states the host has 4 bytes of residual an element: the others are on disk.
    host = forebay.report(first.model).timeline.usage(Tier.HOST)
    assert host.at_peak[Kind.STATE] == 4 * sum(p.numel() for p in plain.parameters()) + 3 * 4 * (-WIDTH % 16)
    saved = first.optimizer.state_dict()
    weights = {n: p.clone() for n, p in forebay.parameters(first.model).items()}
    forebay.save(first.model, first.optimizer, tmp_path / "kept", step=STEPS)
    expected = first.steps(range(STEPS, 2 * STEPS))
    everything = first.everything()
    assert any(name.startswith("residual") and value.any() for name, value in everything.items())
    first.close()
    second = Trained(plan, tmp_path, dtype)
    second.steps(range(2))  # has residuals of its own, which go
    for how in ("checkpoint", "state_dict"):
        if how == "checkpoint":
            forebay.resume(second.model, second.optimizer, tmp_path / "kept")
        else:
            second.model.load_state_dict(weights)
            second.optimizer.load_state_dict(saved)
        assert all(map(torch.equal, second.steps(range(STEPS, 2 * STEPS)), expected)), how
        found = second.everything()
        assert found.keys() == everything.keys()
        assert all(torch.equal(found[name], value) for name, value in everything.items()), how
    saved["state"][0]["residual"] = torch.zeros(3)
    with pytest.raises(OptimizerError, match=r"the saved residual of 0.weight has shape \(3,\), and the parameter"):
        second.optimizer.load_state_dict(saved)
    second.close()


@pytest.mark.slow
def test_a_checkpoint_without_residuals_begins_with_none_and_one_with_them_is_not_cut(tmp_path: Path) -> None:
    whole, part = plan_for(tmp_path, None), plan_for(tmp_path, DENSITY)
    first = Trained(whole, tmp_path)
    first.steps(range(2))
    forebay.save(first.model, first.optimizer, tmp_path / "whole", step=2)
    first.close()
    second = Trained(part, tmp_path)
    second.steps(range(2))
    nbytes = forebay.save(second.model, second.optimizer, tmp_path / "part", step=2)
    assert nbytes > 4 * 4 * sum(p.numel() for p in network().parameters())  # values, two moments, what is left
    saved = second.optimizer.state_dict()
    forebay.resume(second.model, second.optimizer, tmp_path / "whole")
    left = {n: v for n, v in second.everything().items() if n.startswith("residual")}
    assert left and not any(value.any() for value in left.values())
    second.close()
    third = Trained(whole, tmp_path)
    with pytest.raises(ConfigError, match=r"no update has had yet \(residual\..*policy='smart-infinity-compressed'"):
        forebay.resume(third.model, third.optimizer, tmp_path / "part")
    with pytest.raises(OptimizerError, match=r"no update has had yet \(residual\).*or leave that out"):
        third.optimizer.load_state_dict(saved)
    third.steps(range(1))  # nothing has changed
    third.close()
