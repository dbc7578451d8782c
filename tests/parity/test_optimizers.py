"""Every optimizer step, from the same state, is torch's.

forebay runs the arithmetic of torch's fused kernels, so with ``fused=True`` the bound is 1 ulp of each result. torch's
default (``fused=None``: one tensor after the other) rounds the same formula after every operation, and torch's two
implementations differ by more than 1 ulp: up to 256 ulp of the *result* were seen for an AdamW parameter that a step
moved close to 0, 5 ulp for a momentum. Measured in units of the last place of the *largest term* (the old value, the
new one, or their difference), over 200,000 elements, learning rates from 1e-3 to 0.1 and with and without decay, the
two implementations of torch are at most 4 apart. Against the default that is the bound: forebay is as far from it as
torch's own fused kernel, and no further.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import forebay
from forebay.arenas import arenas
from forebay.budgets import Budget, DiskBudget
from forebay.device.cpu import CpuDevice
from forebay.device.delays import RandomDelays
from forebay.errors import UsageError
from forebay.layout import PAGE, align
from forebay.memory import Tier
from forebay.plans import Plan
from forebay.runtime.blocks import find_blocks
from forebay.timeline import Lane
from forebay.units import MiB, parse_bytes

AMPLE = "64MiB"
STEPS = 5

DEFAULT_APART = 4
"""Ulps of the largest term: how far torch's default and fused implementations are apart (see above)."""

Make = Callable[..., torch.optim.Optimizer]
Late = Callable[..., tuple[nn.Module, torch.optim.Optimizer]]
State = dict[str, dict[str, torch.Tensor]]

OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda p, **o: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1, **o),
    "adamw-amsgrad-maximize": lambda p, **o: torch.optim.AdamW(p, lr=1e-2, amsgrad=True, maximize=True, **o),
    "adam": lambda p, **o: torch.optim.Adam(p, lr=1e-2, betas=(0.8, 0.95), eps=1e-6, **o),
    "adam-decay": lambda p, **o: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1, **o),
    "adam-amsgrad": lambda p, **o: torch.optim.Adam(p, lr=1e-2, amsgrad=True, **o),
    "adam-maximize": lambda p, **o: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1, maximize=True, **o),
    "sgd": lambda p, **o: torch.optim.SGD(p, lr=0.1, weight_decay=0.1, **o),
    "sgd-maximize": lambda p, **o: torch.optim.SGD(p, lr=0.1, maximize=True, **o),
    "sgd-momentum": lambda p, **o: torch.optim.SGD(p, lr=0.1, momentum=0.9, **o),
    "sgd-nesterov": lambda p, **o: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, **o),
    "sgd-dampening": lambda p, **o: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.3, **o),
}


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Three blocks and a head; sizes that fill no vector register evenly."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(37, 37) for _ in range(3)], nn.Linear(37, 5)).to(dtype)


def give_gradients(model: nn.Module, step: int) -> None:
    """The same random gradients for every model of these shapes."""
    for number, parameter in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(1000 * step + number)
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict(forebay.parameters(model).items())


def states(optimizer: torch.optim.Optimizer, names: list[str]) -> State:
    """States per parameter name, without masters."""
    saved = optimizer.state_dict()["state"]
    return {
        names[index]: {k: v.clone() for k, v in state.items() if isinstance(v, torch.Tensor) and k != "master"}
        for index, state in saved.items()
    }


def take_over(reference: nn.Module, plain: torch.optim.Optimizer, before: dict[str, torch.Tensor], old: State) -> None:
    """Gives a plain model and optimizer the parameters and states that forebay has."""
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            parameter.copy_(before[name])
            plain.state[parameter] = {k: v.clone() for k, v in old.get(name, {}).items()}


def ulps(left: torch.Tensor, right: torch.Tensor) -> int:
    """The largest number of fp32 values that lie between two corresponding elements."""

    def ordered(tensor: torch.Tensor) -> torch.Tensor:
        bits = tensor.contiguous().view(torch.int32).long()
        return torch.where(bits < 0, -(2**31) - bits, bits)

    assert left.dtype is torch.float32 and right.dtype is torch.float32
    return int((ordered(left) - ordered(right)).abs().max())


def terms_ulps(got: torch.Tensor, expected: torch.Tensor, old: torch.Tensor) -> float:
    """The largest difference in units of the last place of the largest term: old value, new value, what was added."""
    largest = torch.stack([old.abs(), expected.abs(), (expected - old).abs()]).amax(0).double()
    unit = torch.exp2(torch.floor(torch.log2(largest.clamp_min(torch.finfo(torch.float32).tiny))) - 23)
    return float(((got.double() - expected.double()).abs() / unit).max())


def disk_plan(model: nn.Module, folder: Path, state_names: tuple[str, ...], make: Make, **streaming: Any) -> Plan:
    """Parameters and states on disk, in chunks of 1024 elements that cut through parameters."""
    model, _ = forebay.prepare(model, make(model.parameters()), device_memory=AMPLE, policy="stream", device="cpu")
    made = forebay.report(model).plan
    forebay.close(model)
    largest = align(made.streaming.slots[0], PAGE)
    cut = replace(made.streaming, host_slots=(largest, largest), update_chunk=1024, **streaming)
    homes = tuple(replace(p, parameters=Tier.DISK, states=Tier.DISK) for p in made.placements)
    sizes = arenas(find_blocks(model).model, homes, cut, state_names)
    budget = Budget(made.budget.device, disk=DiskBudget(str(folder), 64 * MiB))
    return replace(made, budget=budget, placements=homes, streaming=cut, host=sizes.host, disk=sizes.disk)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("policy", ["auto", "stream"])
@pytest.mark.parametrize("fused", [True, None], ids=["fused", "default"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_is_torchs(name: str, fused: bool | None, policy: str) -> None:
    make = OPTIMIZERS[name]
    reference = network()
    names = [n for n, _ in reference.named_parameters()]
    plain = make(reference.parameters(), fused=fused)
    model = network()
    # The user's own choice of implementation goes in as it is.
    model, optimizer = forebay.prepare(
        model, make(model.parameters(), fused=fused), device_memory=AMPLE, policy=policy, device="cpu"
    )
    assert all(p.resident for p in forebay.report(model).plan.placements) == (policy == "auto")
    for step in range(STEPS):
        before, old = values(model), states(optimizer, names)
        take_over(reference, plain, before, old)
        give_gradients(model, step)
        give_gradients(reference, step)
        optimizer.step()
        plain.step()
        after, new = values(model), states(optimizer, names)
        for key, parameter in reference.named_parameters():
            expected = {k: v for k, v in plain.state[parameter].items() if isinstance(v, torch.Tensor) and v.dim()}
            assert set(expected) == set(new[key]) - {"step"}
            pairs = [(after[key], parameter.detach(), before[key])]
            zero = torch.zeros_like(before[key])
            pairs += [(new[key][k], v, old.get(key, {}).get(k, zero)) for k, v in expected.items()]
            for got, wanted, start in pairs:
                if fused:
                    assert ulps(got, wanted) <= 1, (step, key)
                else:
                    assert terms_ulps(got, wanted, start) <= DEFAULT_APART, (step, key)
        assert all(float(s["step"]) == step + 1 for s in new.values() if "step" in s)
    forebay.close(model)


@pytest.mark.parametrize("name", ["adamw", "adam-amsgrad", "sgd-dampening"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_where_the_update_runs_changes_no_bit(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    make = OPTIMIZERS[name]
    state_names = {
        "adamw": ("exp_avg", "exp_avg_sq"),
        "adam-amsgrad": ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
        "sgd-dampening": ("momentum_buffer",),
    }[name]
    ways: dict[str, dict[str, Any]] = {"device": {"policy": "auto"}, "host": {"policy": "stream"}}
    for overlap in (True, False):
        plan = disk_plan(network(dtype), tmp_path, state_names, make, overlap_update=overlap)
        ways[f"disk, overlap {overlap}"] = {"plan": plan, "disk": f"{tmp_path}:64MiB"}
    results = {}
    for way, options in ways.items():
        model = network(dtype)
        model, optimizer = forebay.prepare(
            model, make(model.parameters()), device_memory=AMPLE, device="cpu", **options
        )
        for step in range(STEPS):
            batch = torch.randn(4, 37, generator=torch.Generator().manual_seed(step)).to(dtype)
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        names = list(forebay.parameters(model))
        results[way] = {"parameters": values(model), **states(optimizer, names)}
        forebay.close(model)
    first = results.pop("device")
    for way, result in results.items():
        for owner, tensors in first.items():
            for key, tensor in tensors.items():
                assert torch.equal(result[owner][key], tensor), (way, owner, key)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("policy", ["auto", "stream"])
def test_master_of_a_bf16_model(policy: str) -> None:
    """The master is updated as torch updates an fp32 parameter; the parameter is the master, rounded."""
    model, reference = network(torch.bfloat16), network(torch.bfloat16).float()
    plain = torch.optim.AdamW(reference.parameters(), lr=1e-2, fused=True)
    model, optimizer = forebay.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), device_memory=AMPLE, policy=policy, device="cpu"
    )
    for step in range(STEPS):
        give_gradients(model, step)
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            theirs.grad = ours.grad.float() if ours.grad is not None else None
        optimizer.step()
        plain.step()
        stored = model.state_dict()
        for name, parameter in reference.named_parameters():
            master = forebay.parameters(model)[name]
            assert ulps(master, parameter.detach()) <= 1
            assert torch.equal(stored[name], master.to(torch.bfloat16))
            assert stored[name].dtype is torch.bfloat16
        # The reference goes on from forebay's master, so that a difference does not grow over the steps.
        with torch.no_grad():
            for name, parameter in reference.named_parameters():
                parameter.copy_(forebay.parameters(model)[name])
    forebay.close(model)


@pytest.mark.parametrize("policy", ["auto", "stream"])
@pytest.mark.parametrize("make", [OPTIMIZERS["adamw"], OPTIMIZERS["sgd-dampening"]], ids=["adamw", "sgd"])
def test_parameters_without_gradient_are_skipped(make: Make, policy: str) -> None:
    """Each parameter counts its own steps, as in torch."""
    model, reference = network(), network()
    # A group each: torch's fused SGD cannot run a first step and a later one in the same group.
    plain = make([{"params": [p]} for p in reference.parameters()], fused=True)
    model, optimizer = forebay.prepare(
        model, make(model.parameters()), device_memory=AMPLE, policy=policy, device="cpu"
    )
    for step in range(6):
        for subject in (model, reference):
            give_gradients(subject, step)
            for number, parameter in enumerate(subject.parameters()):
                if (number + step) % 3 == 0 or (number == 5 and step < 3):
                    parameter.grad = None
        optimizer.step()
        plain.step()
        for name, parameter in reference.named_parameters():
            assert torch.equal(forebay.parameters(model)[name], parameter), (step, name)
    expected = [int(plain.state[p]["step"]) for p in reference.parameters() if "step" in plain.state[p]]
    if expected:
        assert [int(s["step"]) for s in optimizer.state_dict()["state"].values()] == expected
        assert len(set(expected)) > 1
    forebay.close(model)


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    weights = [p for p in model.parameters() if p.dim() > 1]
    biases = [p for p in model.parameters() if p.dim() == 1]
    return [
        {"params": weights, "weight_decay": 0.1},
        {"params": biases, "weight_decay": 0.0, "lr": 3e-2, "betas": (0.5, 0.9)},
    ]


def halved(step: int) -> float:
    return 0.5**step


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, halved),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=4),
    "one-cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=8),
}


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("built_on", ["returned", "original"])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_groups_and_schedulers(late_updates: Late, scheduler: str, built_on: str) -> None:
    """The hyperparameters of a step are those of its moment, though updates may run after the scheduler's step."""
    model, reference = network(), network()
    plain = torch.optim.AdamW(groups_of(reference), lr=1e-2, fused=True)
    plain_schedule = SCHEDULERS[scheduler](plain)
    original = torch.optim.AdamW(groups_of(model), lr=1e-2)
    early = SCHEDULERS[scheduler](original) if built_on == "original" else None
    model, optimizer = late_updates(model, original)
    schedule = early or SCHEDULERS[scheduler](optimizer)
    seen = set()
    for step in range(STEPS):
        give_gradients(model, step)
        give_gradients(reference, step)
        optimizer.step()
        schedule.step()
        plain.step()
        plain_schedule.step()
        assert [g["lr"] for g in optimizer.param_groups] == [g["lr"] for g in plain.param_groups]
        seen.add(optimizer.param_groups[0]["lr"])
        for name, parameter in reference.named_parameters():
            assert torch.equal(forebay.parameters(model)[name], parameter), (step, name)
    assert len(seen) == STEPS
    forebay.close(model)


@pytest.fixture
def late_updates() -> Iterator[Late]:
    """``prepare`` with updates that overlap whatever follows the step, each one held back."""
    device = CpuDevice(parse_bytes(AMPLE), delays=RandomDelays(0, 0.01, [Lane.UPDATE]))
    yield partial(forebay.prepare, device_memory=AMPLE, plan=overlapping_plan(), device=device)
    device.close()


def overlapping_plan() -> Plan:
    model = network()
    model, _ = forebay.prepare(
        model, OPTIMIZERS["adamw"](model.parameters()), device_memory=AMPLE, policy="stream", device="cpu"
    )
    plan = forebay.report(model).plan
    forebay.close(model)
    return replace(plan, streaming=replace(plan.streaming, overlap_update=True))


def test_learning_rate_as_a_tensor(late_updates: Late) -> None:
    """torch writes a tensor's new value in place: an update that is still queued must not see it."""
    model, reference = network(), network()
    plain = torch.optim.AdamW(reference.parameters(), lr=torch.tensor(1e-2), fused=True)
    model, optimizer = late_updates(model, torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2), fused=True))
    for step in range(STEPS):
        for subject, used in ((model, optimizer), (reference, plain)):
            give_gradients(subject, step)
            used.step()
            used.param_groups[0]["lr"].fill_(1e-2 * 0.5**step)
        for name, parameter in reference.named_parameters():
            assert torch.equal(forebay.parameters(model)[name], parameter), (step, name)
    forebay.close(model)


def test_closure() -> None:
    model, reference = network(), network()
    batch = torch.randn(4, 37, generator=torch.Generator().manual_seed(0))
    plain = torch.optim.AdamW(reference.parameters(), fused=True)
    model, optimizer = forebay.prepare(
        model, torch.optim.AdamW(model.parameters()), device_memory=AMPLE, policy="stream", device="cpu"
    )

    def closure_of(subject: nn.Module, used: torch.optim.Optimizer) -> Callable[[], torch.Tensor]:
        def closure() -> torch.Tensor:
            used.zero_grad()
            loss: torch.Tensor = subject(batch).square().mean()
            loss.backward()
            return loss

        return closure

    for _ in range(3):
        assert torch.equal(optimizer.step(closure_of(model, optimizer)), plain.step(closure_of(reference, plain)))
    for name, parameter in reference.named_parameters():
        assert torch.equal(forebay.parameters(model)[name], parameter)
    forebay.close(model)


def test_what_comes_back_is_a_torch_optimizer() -> None:
    model = network()
    original = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = forebay.prepare(model, original, device_memory=AMPLE, device="cpu")
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.defaults == original.defaults
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in model.parameters()]
    with pytest.raises(forebay.ForebayError, match="add all groups before prepare"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    forebay.close(model)


def test_hooks_that_the_original_had_run_around_a_step() -> None:
    def calls_of(prepared: bool) -> list[str]:
        model, calls = network(), list[str]()
        optimizer = torch.optim.AdamW(model.parameters())
        before = optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
        optimizer.register_step_post_hook(lambda *_: calls.append("after"))
        optimizer.register_state_dict_pre_hook(lambda _: calls.append("saved"))
        used: torch.optim.Optimizer = optimizer
        if prepared:
            model, used = forebay.prepare(model, optimizer, device_memory=AMPLE, policy="stream", device="cpu")
        for step in range(2):
            give_gradients(model, step)
            used.step()
            before.remove()
        used.state_dict()
        forebay.close(model)
        return calls

    assert calls_of(prepared=True) == calls_of(prepared=False) == ["before", "after", "after", "saved"]


@pytest.mark.parametrize("policy", ["resident", "stream"])
def test_the_original_takes_no_step_while_its_model_is_prepared(policy: str) -> None:
    model = network()
    original = torch.optim.AdamW(model.parameters(), lr=1e-2)
    forebay.prepare(model, original, torch.zeros(4, 37), device_memory=AMPLE, policy=policy, device="cpu")
    give_gradients(model, 0)
    with pytest.raises(UsageError, match=r"step the one that it returned \(model, optimizer = "):
        original.step()
    assert not original.state
    forebay.close(model)
    give_gradients(model, 0)
    original.step()
    assert original.state
