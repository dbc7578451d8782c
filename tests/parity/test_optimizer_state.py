"""``optimizer.state`` of a prepared optimizer: empty to look at, and what is done to it is done or refused."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import pytest
import torch
from torch import nn

import forebay
from forebay.errors import OptimizerError
from tests.parity.compare import stepped

WIDTH, LAYERS = 16, 3


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    model[1].bias.requires_grad_(False)
    rest = [p for n, p in model.named_parameters() if n != "0.bias" and p.requires_grad]
    return model, torch.optim.AdamW(rest, lr=1e-2, fused=True)


def prepared(policy: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    return forebay.prepare(*made(), torch.zeros(4, WIDTH), device_memory="1MiB", policy=policy, device="cpu")


def steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    batch = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)
    return stepped(optimizer, (model(batch).square().sum() for _ in range(3)))


Reset = Callable[[nn.Module, torch.optim.Optimizer], None]


def cleared(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state.clear()


def replaced(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state = defaultdict(dict)


def of_one(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    del optimizer.state[model[1].weight]


@pytest.mark.parametrize("policy", ["stream", "resident"])
@pytest.mark.parametrize("reset", [cleared, replaced, of_one])
def test_parameters_start_anew(reset: Reset, policy: str) -> None:
    plain, its = made()
    ours, optimizer = prepared(policy)
    for _ in range(2):
        assert steps(ours, optimizer) == steps(plain, its)
        reset(plain, its)
        reset(ours, optimizer)
    found, expected = optimizer.state_dict()["state"], its.state_dict()["state"]
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[i][name], value) for i in expected for name, value in expected[i].items())
    assert steps(ours, optimizer) == steps(plain, its)
    forebay.close(ours)


def test_what_would_be_lost_is_refused() -> None:
    ours, optimizer = prepared("stream")
    steps(ours, optimizer)
    weight = ours[0].weight
    assert len(optimizer.state) == 0 and list(optimizer.state.items()) == [] and "lr: 0.01" in repr(optimizer)
    with pytest.raises(OptimizerError, match=r"states are elsewhere.*optimizer\.state_dict\(\)"):
        optimizer.state[weight]["exp_avg"].zero_()
    with pytest.raises(OptimizerError, match=r"optimizer\.load_state_dict\(\)"):
        optimizer.state[weight] = {"exp_avg": torch.zeros(1)}
    with pytest.raises(OptimizerError, match=r"optimizer\.state\.clear\(\)"):
        optimizer.state = {weight: {"step": torch.ones(())}}
    forebay.close(ours)
