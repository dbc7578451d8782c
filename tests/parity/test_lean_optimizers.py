"""forebay's own optimizers: in plain PyTorch, saved and loaded, and the same bits wherever a prepared model is."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import forebay
from forebay.errors import OptimizerError
from forebay.kernels.shares import BLOCK as KERNEL_BLOCK
from forebay.optim import Adafactor, AdamW, Lion, Muon
from forebay.optim.arithmetic import KernelArithmetic, TorchArithmetic
from forebay.optim.parts import Part
from forebay.optim.rules import AdamRule, LionRule
from forebay.states import BLOCK, MOMENTS, Moments, form_of
from tests.parity.test_kernels import torchs_bits
from tests.parity.test_optimizers import disk_plan, give_gradients, network, values

Make = Callable[[Any], torch.optim.Optimizer]

MAKERS: dict[str, Make] = {
    "bfloat16": lambda p: AdamW(p, lr=1e-2, weight_decay=0.1, moments="bfloat16"),
    "8bit": lambda p: AdamW(p, lr=1e-2, weight_decay=0.1, moments="8bit"),
    "4bit": lambda p: AdamW(p, lr=1e-2, weight_decay=0.1, moments="4bit"),
    "lion": lambda p: Lion(p, lr=1e-3, weight_decay=0.1),
    "adafactor": lambda p: Adafactor(p, lr=1e-2, weight_decay=0.1),
}
BYTES = {"bfloat16": (2, 0), "8bit": (1, 4), "4bit": (1, 4), "lion": (4, 0)}
"""By maker: bytes of a code, and of a scale."""


def parameters_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        give_gradients(model, step)
        optimizer.step()
        optimizer.zero_grad()


def equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@torchs_bits
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp32_moments_are_torchs(dtype: torch.dtype) -> None:
    ours, theirs = network(dtype), network().to(dtype).float()
    own = AdamW(ours.parameters(), lr=1e-2, weight_decay=0.1)
    plain = torch.optim.AdamW(theirs.parameters(), lr=1e-2, weight_decay=0.1, fused=True)
    for step in range(3):
        give_gradients(ours, step)
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            other.grad = mine.grad.float()  # type: ignore[union-attr]
        own.step()
        plain.step()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        master = mine if dtype is torch.float32 else own.state[mine]["master"]
        assert torch.equal(master, other) and torch.equal(mine, other.to(dtype))
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(own.state[mine][name], plain.state[other][name])


@pytest.mark.parametrize("name", MAKERS)
def test_saved_and_loaded_it_goes_on_as_if_nothing_had_happened(name: str) -> None:
    whole, first = network(torch.bfloat16), network(torch.bfloat16)
    uninterrupted, optimizer = MAKERS[name](whole.parameters()), MAKERS[name](first.parameters())
    steps(whole, uninterrupted, 0, 4)
    steps(first, optimizer, 0, 2)
    file = io.BytesIO()
    torch.save({"model": first.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file)
    second = network(torch.bfloat16)
    second.load_state_dict(saved["model"])
    loaded = MAKERS[name](second.parameters())
    loaded.load_state_dict(saved["optimizer"])
    twin = copy.deepcopy((second, loaded))
    for model, resumed in ((second, loaded), twin):
        steps(model, resumed, 2, 4)
        assert equal(parameters_of(model), parameters_of(whole))
        for mine, other in zip(model.parameters(), whole.parameters(), strict=True):
            assert resumed.state[mine].keys() == uninterrupted.state[other].keys()
            assert all(torch.equal(v, uninterrupted.state[other][k]) for k, v in resumed.state[mine].items())
            assert all(v.dtype == uninterrupted.state[other][k].dtype for k, v in resumed.state[mine].items())


@torchs_bits
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_goes_on_from_torchs_states(dtype: torch.dtype) -> None:
    """Whose groups do without some options, and whose moments have the dtype of their parameter."""
    theirs, ours = network(dtype), network(dtype)
    plain, own = torch.optim.AdamW(theirs.parameters(), lr=1e-3, fused=True), AdamW(ours.parameters(), maximize=True)
    steps(theirs, plain, 0, 2)
    ours.load_state_dict(theirs.state_dict())
    own.load_state_dict(plain.state_dict())
    assert own.param_groups[0].items() >= {"lr": 1e-3, "maximize": False, "moments": "float32"}.items()
    steps(theirs, plain, 2, 4)
    steps(ours, own, 2, 4)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert own.state[mine]["exp_avg"].dtype is torch.float32 and own.state[mine]["step"] == 4
        assert dtype is torch.bfloat16 or torch.equal(mine, other)


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize(("own", "other"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_loaded_moments_are_kept_as_they_were_asked_for(own: Moments, other: Moments, there: bool) -> None:
    """By an optimizer that has taken steps (``there``) or none. A kernel for the other form would read other memory."""
    saved, one = (nn.Parameter(torch.ones(BLOCK)) for _ in range(2))
    source, loading = AdamW([saved], moments=other), AdamW([one], moments=own)
    saved.grad = torch.linspace(-1, 1, BLOCK)
    source.step()
    if there:
        one.grad = torch.zeros(BLOCK)
        loading.step()
    loading.load_state_dict(source.state_dict())
    assert loading.param_groups[0]["moments"] == own
    assert loading.state[one]["exp_avg"].dtype is getattr(torch, own)
    one.grad = torch.linspace(-1, 1, BLOCK)
    loading.step()
    assert loading.state[one]["exp_avg"].dtype is getattr(torch, own)
    assert torch.equal(loading.state[one]["step"], torch.tensor(2.0))


@pytest.mark.parametrize("change", [{"moments": "8bit"}, {"moments": "bfloat16"}, {"stochastic_rounding": True}])
def test_options_of_states_that_change_are_refused(change: dict[str, Any]) -> None:
    parameters = [nn.Parameter(torch.ones(BLOCK, dtype=torch.bfloat16)) for _ in range(2)]
    optimizer = AdamW([{"params": [p]} for p in parameters])
    for parameter in parameters:
        parameter.grad = torch.linspace(-1, 1, BLOCK).bfloat16()
    optimizer.step()
    for group in optimizer.param_groups:
        group.update(change)
    with pytest.raises(OptimizerError, match=r"made for other .*\(moments, stochastic_rounding\); set them back"):
        optimizer.step()
    assert all(torch.equal(optimizer.state[p]["step"], torch.tensor(1.0)) for p in parameters)
    optimizer.state.clear()
    optimizer.step()
    fresh = nn.Parameter(torch.ones(BLOCK, dtype=torch.bfloat16))
    fresh.grad = parameters[0].grad
    other = AdamW([fresh], **change)
    other.step()
    assert other.state[fresh].keys() == optimizer.state[parameters[0]].keys()


def test_muon_goes_on_from_torchs_states() -> None:
    parameter = nn.Parameter(torch.eye(4))
    parameter.grad = torch.ones(4, 4)
    theirs = torch.optim.Muon([parameter], lr=0.5)
    theirs.step()
    optimizer = Muon([parameter])
    optimizer.load_state_dict(theirs.state_dict())
    optimizer.step()
    assert optimizer.state[parameter]["step"] == 2 and optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("name", BYTES)
def test_states_take_the_bytes_that_they_say(name: str) -> None:
    model = nn.Linear(1024, 3, bias=False)
    optimizer = MAKERS[name](model.parameters())
    steps(model, optimizer, 0, 1)
    state = {k: v for k, v in optimizer.state[model.weight].items() if k != "step"}
    elements, moments = 3 * 1024, 1 if name == "lion" else 2
    code, scale = BYTES[name]
    packed = 2 if name == "4bit" else 1
    assert sum(v.nbytes for v in state.values()) == moments * (elements * code // packed + elements // 256 * scale)


def test_groups_schedulers_and_parameters_without_gradient() -> None:
    model = network()
    first, *rest = model.parameters()
    optimizer = AdamW([{"params": [first], "lr": 0.5}, {"params": rest}], lr=1e-2, weight_decay=0.0, moments="8bit")
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    for step in range(2):
        before = parameters_of(model)
        give_gradients(model, step)
        rest[-1].grad = None
        optimizer.step(lambda: 1.0)
        after = parameters_of(model)
        moved = [float((after[name] - before[name]).abs().max()) for name in before]
        # The first step moves every element by the learning rate; later ones by at most a few of it.
        scale = 0.5**step
        assert 0.4 * scale < moved[0] < scale and 0.004 * scale < moved[1] < 0.02 * scale and moved[-1] == 0
        scheduler.step()
    assert rest[-1] not in optimizer.state
    assert float(optimizer.state[first]["step"]) == 2


def prepared(name: str, dtype: torch.dtype, **options: Any) -> dict[str, torch.Tensor]:
    """Parameters, and states by ``parameter.state``, after three steps of a prepared model."""
    model = network(dtype)
    model, optimizer = forebay.prepare(model, MAKERS[name](model.parameters()), device="cpu", **options)
    for step in range(3):
        batch = torch.randn(4, 37, generator=torch.Generator().manual_seed(step)).to(dtype)
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = values(model)
    names = list(found)
    for index, state in optimizer.state_dict()["state"].items():
        found.update({f"{names[index]}.{key}": value.clone() for key, value in state.items()})
    forebay.close(model)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MAKERS)
def test_the_same_bits_everywhere(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = network(dtype)
    optimizer = MAKERS[name](model.parameters())
    for step in range(3):
        batch = torch.randn(4, 37, generator=torch.Generator().manual_seed(step)).to(dtype)
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    plain: dict[str, torch.Tensor] = {}
    for key, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        plain[key] = state.get("master", parameter.detach())
        plain.update({f"{key}.{k}": v for k, v in state.items()})
    plan = disk_plan(network(dtype), tmp_path, optimizer.rule.state_names, MAKERS[name])  # type: ignore[attr-defined]
    for options in (
        {"device_memory": "64MiB"},
        {"device_memory": "64MiB", "policy": "stream"},
        {"device_memory": "64MiB", "plan": plan, "disk": f"{tmp_path}:64MiB"},
    ):
        assert equal(prepared(name, dtype, **options), plain), options


@pytest.mark.parametrize("name", ["8bit", "4bit"])
def test_a_prepared_optimizer_takes_the_states_of_a_plain_one(name: str) -> None:
    model = network()
    optimizer = MAKERS[name](model.parameters())
    steps(model, optimizer, 0, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    other = copy.deepcopy(model)
    steps(model, optimizer, 2, 4)
    other, streamed = forebay.prepare(
        other, MAKERS[name](other.parameters()), device_memory="64MiB", policy="stream", device="cpu"
    )
    assert forebay.report(other).plan.changes_numbers
    streamed.load_state_dict(saved)
    steps(other, streamed, 2, 4)
    assert equal(values(other), parameters_of(model))
    wide = AdamW(model.parameters(), moments="float32")
    steps(model, wide, 0, 1)
    with pytest.raises(OptimizerError, match=r"exp_avg of .* and this optimizer keeps \(\d+,\) as"):
        streamed.load_state_dict(wide.state_dict())
    forebay.close(other)


@pytest.mark.parametrize("moments", MOMENTS)
def test_torchs_ops_do_what_the_kernels_do(moments: Moments) -> None:
    """Up to codes next to each other where a value lies between two, and up to roundings."""
    assert BLOCK == KERNEL_BLOCK
    rule = AdamRule(decoupled=True, amsgrad=False, moments=moments)
    group = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "amsgrad": False, "maximize": False}
    generator = torch.Generator().manual_seed(0)
    count = 5 * BLOCK + 131

    def part() -> Part:
        states = tuple(
            torch.zeros(form_of(s).count(count), dtype=getattr(torch, form_of(s).dtype)) for s in rule.state_names
        )
        return Part(torch.ones(count), torch.zeros(count), None, states, 77)

    from forebay.kernels.team import Team

    team = Team(1)
    ours, theirs = part(), part()
    kernels, ops = KernelArithmetic(rule, team), TorchArithmetic(rule)
    for step in range(1, 5):
        gradient = torch.randn(count, generator=generator) * torch.rand(count, generator=generator).square()
        for one, arithmetic in ((ours, kernels), (theirs, ops)):
            one.gradient.copy_(gradient)
            arithmetic.update([one], step, group)
        torch.testing.assert_close(ours.parameter, theirs.parameter, rtol=1e-5, atol=2e-5)
        for left, right in zip(ours.states, theirs.states, strict=True):
            same = (left == right).float().mean()
            assert same > 0.99, (step, same)
    team.close()


def test_lion_in_torchs_ops() -> None:
    from forebay.kernels.team import Team

    team = Team(1)
    group = {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.1}
    generator = torch.Generator().manual_seed(0)
    start, gradient = torch.randn(1000, generator=generator), torch.randn(1000, generator=generator)
    found = []
    for arithmetic in (KernelArithmetic(LionRule(), team), TorchArithmetic(LionRule())):
        part = Part(start.clone(), gradient, None, (torch.zeros(1000),))
        for step in (1, 2):
            arithmetic.update([part], step, group)
        found.append((part.parameter, part.states[0]))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    team.close()


def test_a_parameter_without_elements_takes_its_steps() -> None:
    parameter = nn.Parameter(torch.zeros(4, 0))
    parameter.grad = torch.zeros(4, 0)
    optimizer = AdamW([parameter])
    optimizer.step()
    assert optimizer.state[parameter]["step"] == 1


def test_what_is_refused() -> None:
    model = nn.Linear(4, 4)
    for options, words in (
        ({"moments": "2bit"}, "not '2bit'"),
        ({"lr": -1.0}, "lr must be 0 or more"),
        ({"betas": (0.9, 1.0)}, "betas must be"),
    ):
        with pytest.raises(OptimizerError, match=words):
            AdamW(model.parameters(), **options)  # type: ignore[arg-type]
    with pytest.raises(OptimizerError, match="moments differs"):
        _ = AdamW([{"params": [model.weight], "moments": "4bit"}, {"params": [model.bias]}], moments="8bit").rule
    with pytest.raises(OptimizerError, match="amsgrad keeps no moments as 8bit"):
        AdamRule(decoupled=True, amsgrad=True, moments="8bit")
    optimizer = AdamW(model.parameters())
    with pytest.raises(OptimizerError, match="no max_exp_avg_sq"):
        optimizer.load_state_dict(torch.optim.AdamW(model.parameters(), amsgrad=True).state_dict())
    optimizer.param_groups[0]["amsgrad"] = True
    with pytest.raises(OptimizerError, match=r"use that of torch\.optim"):
        optimizer.step()
    strided = nn.Parameter(torch.zeros(8)[::2])
    strided.grad = torch.zeros(4)
    with pytest.raises(OptimizerError, match="has gaps"):
        AdamW([strided]).step()
    embedding = nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(OptimizerError, match="sparse"):
        Lion(embedding.parameters()).step()
