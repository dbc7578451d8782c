"""Who updates what: the kernels wherever memory is the host's, torch elsewhere; both give the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from forebay.kernels.team import Team
from forebay.optim import choosing
from forebay.optim.arithmetic import KernelArithmetic, TorchArithmetic
from forebay.optim.choosing import host_arithmetic
from forebay.optim.parts import Part
from forebay.optim.rules import AdamRule, SgdRule, UpdateRule
from tests.parity.kernel_rig import same
from tests.parity.test_kernels import torchs_bits

GROUPS: dict[str, tuple[UpdateRule, dict[str, Any]]] = {
    "adamw": (
        AdamRule(decoupled=True, amsgrad=False),
        {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "amsgrad": False, "maximize": False},
    ),
    # A rule with the third state, for groups with and without it.
    "adam": (
        AdamRule(decoupled=False, amsgrad=True),
        {"lr": 1e-2, "betas": (0.8, 0.9), "eps": 1e-8, "weight_decay": 0.1, "amsgrad": True, "maximize": False},
    ),
    "sgd": (
        SgdRule(momentum=True),
        {
            "lr": 0.1,
            "momentum": 0.9,
            "dampening": 0.1,
            "weight_decay": 0.1,
            "nesterov": False,
            "maximize": True,
        },
    ),
}

SIZES = (37, 0, 1369, 40_013)


@pytest.fixture
def team() -> Iterator[Team]:
    made = Team(2)
    yield made
    made.close()


def parts(rule: UpdateRule) -> list[Part]:
    """Parameters in fp32, bf16 and fp16, several sizes of each, with first states of 0."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for size in SIZES:
            value = torch.randn(size, generator=generator)
            gradient = (0.1 * torch.randn(size, generator=generator)).to(dtype)
            states = tuple(torch.zeros(size) for _ in rule.state_names)
            made.append(Part(value.to(dtype), gradient, None if dtype is torch.float32 else value, states))
    return made


@pytest.mark.thinned(2)
@torchs_bits
@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("workspace", [True, False])
def test_both_give_the_same_bits(name: str, workspace: bool, team: Team) -> None:
    rule, group = GROUPS[name]
    ours, theirs = parts(rule), parts(rule)
    room = torch.empty(4 * 2 * sum(SIZES), dtype=torch.uint8) if workspace else None
    kernels, fused = host_arithmetic(rule, team, room), TorchArithmetic(rule, room)
    assert isinstance(kernels, KernelArithmetic)
    groups = [group, {**group, "lr": 1e-3, "weight_decay": 0.0}]
    if "amsgrad" in group:
        groups.append({**group, "amsgrad": False})
    for step, options in enumerate(groups, start=1):
        kernels.update(ours, step, options)
        # torch's lists hold tensors of one dtype: masters are fp32 as the others are.
        fused.update(theirs, step, options)
        for left, right in zip(ours, theirs, strict=True):
            assert same(left.parameter, right.parameter), (step, left.parameter.shape)
            assert left.master is None or right.master is None or same(left.master, right.master)
            assert all(same(a, b) for a, b in zip(left.states, right.states, strict=True))


def test_torch_updates_where_there_is_no_numba(team: Team, monkeypatch: pytest.MonkeyPatch) -> None:
    rule, group = GROUPS["adamw"]
    monkeypatch.setattr(choosing, "find_spec", lambda name: None)
    found = host_arithmetic(rule, team, torch.empty(4 * 2 * sum(SIZES), dtype=torch.uint8))
    assert isinstance(found, TorchArithmetic)
    ours = parts(rule)
    before = [part.parameter.clone() for part in ours]
    found.update(ours, 1, group)
    assert all(not same(part.parameter, old) for part, old in zip(ours, before, strict=True) if old.numel())


@pytest.mark.parametrize("wrong", ["gradient", "states", "strided"])
def test_memory_of_another_shape_is_refused(wrong: str, team: Team) -> None:
    _, group = GROUPS["sgd"]
    full, short = torch.zeros(8), torch.zeros(7)
    part = {
        "gradient": Part(full, short, None, (full.clone(),)),
        "states": Part(full, full.clone(), None, (short,)),
        "strided": Part(full, torch.zeros(16)[::2], None, (full.clone(),)),
    }[wrong]
    with pytest.raises(ValueError, match="an update of 8 elements"):
        KernelArithmetic(SgdRule(momentum=True), team).update([part], 1, group)
    assert not full.any()
