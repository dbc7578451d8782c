"""Models whose forward changes parameters: they train where these are at home on the device, and are refused where the
change would be lost with the slot."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import forebay
from forebay.errors import CannotServe, ModelError
from tests.parity.compare import stepped

WORDS, WIDTH, LAYERS, STEPS = 50, 16, 3, 3


class Renormed(nn.Module):
    """An embedding with ``max_norm``."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH, max_norm=0.5)
        self.layers = nn.ModuleList(self.layer() for _ in range(LAYERS))

    def layer(self) -> nn.Module:
        return nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().sum()


class Clamped(Renormed):
    """Its layers change ``weight.data`` in place, of which torch's count of changes says nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)

    def layer(self) -> nn.Module:
        return Clamping(WIDTH, WIDTH)


class Clamping(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data.clamp_(-0.1, 0.1)
        return F.linear(x, self.weight, self.bias)


class Binary(Clamped):
    """Its layers compute with the signs of their weights, as XNOR-Net's do."""

    def layer(self) -> nn.Module:
        return Signs(WIDTH, WIDTH)


class Signs(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data = 0.1 * self.weight.data.sign()
        return F.linear(x, self.weight, self.bias)


def made(kind: type[nn.Module]) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = kind()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


IDS = torch.arange(24).view(2, 12) % WORDS


@pytest.mark.parametrize(("kind", "first"), [(Renormed, "embed"), (Clamped, "layers.0"), (Binary, "layers.0")])
def test_a_plan_that_would_lose_the_change_is_refused(kind: type[nn.Module], first: str) -> None:
    with pytest.raises(CannotServe, match=rf"forward changes parameters of {first} .*load_state_dict") as refused:
        forebay.prepare(*made(kind), IDS, device_memory="1MiB", policy="stream", device="cpu")
    (remedy,) = refused.value.nearest
    model, optimizer = forebay.prepare(*made(kind), IDS, device_memory=remedy.needed, device="cpu")
    assert forebay.report(model).plan.planner == "auto"
    plain, its = made(kind)
    assert stepped(optimizer, (model(IDS) for _ in range(STEPS))) == stepped(its, (plain(IDS) for _ in range(STEPS)))
    forebay.close(model)


@pytest.mark.parametrize(("kind", "name"), [(Renormed, "embed.weight"), (Binary, "layers.0.weight")])
def test_without_a_batch_the_forward_is_refused(kind: type[nn.Module], name: str) -> None:
    model, _ = forebay.prepare(*made(kind), device_memory="1MiB", policy="stream", device="cpu")
    for _ in range(2):
        with pytest.raises(ModelError, match=rf"forward changes parameter {name}, .*policy='resident'"):
            model(IDS)
    with torch.no_grad():
        values = {n: v.clone() for n, v in forebay.parameters(model).items()}
    assert all(torch.equal(values[n], p) for n, p in made(kind)[0].named_parameters())
    forebay.close(model)
