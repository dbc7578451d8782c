"""A program that has set the dtype in which torch makes numbers (``torch.set_default_dtype``), as those do that build
their model in 16 bits: what forebay makes for itself has the dtype that it needs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import forebay
from forebay.optim.choosing import torch_arithmetic
from forebay.optim.reading import read_optimizer
from forebay.profiler.overhead import TINY
from forebay.states import Masters
from tests.parity.content import content
from tests.parity.models import llama, tokens
from tests.parity.test_device_update_ops import CASES, IDS, part_of
from tests.parity.test_device_update_ops import MAKERS as OPTIMIZERS

STEPS = 261
"""More than bf16 counts."""


@pytest.fixture(params=[torch.bfloat16, torch.float64], ids=str)
def default(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    try:
        yield request.param
    finally:
        torch.set_default_dtype(before)


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 8, dtype=torch.float32), nn.GELU()) for _ in range(2)]
    return nn.Sequential(*layers)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        model(torch.randn(4, 8, generator=generator, dtype=torch.float32)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("policy", ["resident", "stream"])
def test_steps_are_counted(default: torch.dtype, policy: str) -> None:
    plain = network()
    its = adamw(plain)
    trained(plain, its)
    model = network()
    batch = torch.zeros(4, 8, dtype=torch.float32)
    model, optimizer = forebay.prepare(
        model, adamw(model), batch, device_memory="16MiB", policy=policy, device="cpu", loss_fn=lambda m, b: m(b).sum()
    )
    trained(model, optimizer)
    states = optimizer.state_dict()["state"]
    assert {int(state["step"]) for state in states.values()} == {STEPS}
    assert {state["step"].dtype for state in states.values()} == {torch.float32}
    assert all(torch.equal(forebay.parameters(model)[n], p) for n, p in plain.named_parameters())
    forebay.close(model)


@pytest.mark.parametrize(("name", "dtype", "masters"), CASES, ids=IDS)
def test_updates_by_torch_s_ops(name: str, dtype: torch.dtype, masters: Masters, default: torch.dtype) -> None:
    optimizer = OPTIMIZERS[name]([nn.Parameter(torch.zeros(4, 4, dtype=torch.float32))])
    rule, group = read_optimizer(optimizer), optimizer.param_groups[0]
    made = []
    for ordinary in (torch.float32, default):
        torch.set_default_dtype(torch.float32)
        part = part_of(rule, dtype, masters, (3, 256))
        torch.set_default_dtype(ordinary)
        torch_arithmetic(rule).update([part], STEPS, group)
        made.append(part)
    one, other = made
    assert torch.equal(one.parameter, other.parameter)
    assert all(torch.equal(a, b) for a, b in zip(one.states, other.states, strict=True))


MAKERS: dict[str, Any] = {
    "adamw": adamw,
    "8bit": lambda m: forebay.optim.AdamW(m.parameters(), lr=1e-3, moments="8bit"),
    "lion": lambda m: forebay.optim.Lion(m.parameters(), lr=1e-4),
    "adafactor": lambda m: torch.optim.Adafactor(m.parameters(), lr=1e-2),
    "muon": lambda m: forebay.optim.Muon(forebay.optim.muon_groups(m), lr=1e-2),
}


def left(name: str, narrow: torch.dtype, policy: str) -> Any:
    torch.manual_seed(0)
    model = llama().to(narrow)
    model, optimizer = forebay.prepare(
        model, MAKERS[name](model), tokens(0), device_memory="64MiB", policy=policy, loss="chunked", device="cpu"
    )
    for step in range(3):
        model(**tokens(step)).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    found = content(model, optimizer)
    forebay.close(model)
    return found


@pytest.mark.thinned(20)
@pytest.mark.parametrize("policy", ["auto", "offload-all"])
@pytest.mark.parametrize("narrow", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MAKERS)
def test_the_same_wherever_it_trains(name: str, narrow: torch.dtype, policy: str, default: torch.dtype) -> None:
    """The model's own numbers follow the default dtype, so forebay is held against itself with all of it there."""
    one, other = left(name, narrow, policy), left(name, narrow, "resident")
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)


def test_the_layers_that_a_machine_is_measured_with_are_in_fp32(default: torch.dtype) -> None:
    model, batch = TINY.model(), TINY.batch()
    assert {tensor.dtype for tensor in (*model.parameters(), batch, model(batch))} == {torch.float32}
