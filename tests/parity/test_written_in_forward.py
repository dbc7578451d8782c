"""Models whose forward writes to parameters: they train where these are at home on the device, and where nothing is
changed by it, and are refused where a change would be lost with the slot."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

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

    def __init__(self, words: int = WORDS) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, WIDTH, max_norm=0.5)
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
    most = 0.1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data.clamp_(-self.most, self.most)
        return F.linear(x, self.weight, self.bias)


class ClampedInAList(Clamped):
    """By an op on a list of tensors, which returns nothing."""

    def layer(self) -> nn.Module:
        return ClampingInAList(WIDTH, WIDTH)


class ClampingInAList(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._foreach_clamp_max_([self.weight.data], 0.1)
        return F.linear(x, self.weight, self.bias)


class Binary(Clamped):
    """Its layers compute with the signs of their weights, as XNOR-Net's do."""

    def layer(self) -> nn.Module:
        return Signs(WIDTH, WIDTH)


class Signs(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data = 0.1 * self.weight.data.sign()
        return F.linear(x, self.weight, self.bias)


class Bounded(Clamped):
    """Clamps what is within the bounds anyway, as Gemma 3n's layers do."""

    def layer(self) -> nn.Module:
        layer = Clamping(WIDTH, WIDTH)
        layer.most = 100.0
        return layer


def made(kind: Callable[[], nn.Module]) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = kind()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


IDS = torch.arange(24).view(2, 12) % WORDS


def assert_trains_as_plain(kind: Callable[[], nn.Module], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    plain, its = made(kind)
    assert stepped(optimizer, (model(IDS) for _ in range(STEPS))) == stepped(its, (plain(IDS) for _ in range(STEPS)))
    assert all(torch.equal(forebay.parameters(model)[n], p) for n, p in plain.named_parameters())


@pytest.mark.parametrize("kind", [Renormed, Clamped, Binary, Bounded])
def test_on_the_device_they_train(kind: type[nn.Module]) -> None:
    model, optimizer = forebay.prepare(*made(kind), IDS, device_memory="4MiB", device="cpu")
    assert all(placed.resident for placed in forebay.report(model).plan.placements)
    assert_trains_as_plain(kind, model, optimizer)
    forebay.close(model)


@pytest.mark.parametrize("policy", ["stream", "stream-recompute"])
def test_a_write_that_changes_nothing_is_nothing(policy: str) -> None:
    model, optimizer = forebay.prepare(*made(Bounded), IDS, device_memory="1MiB", policy=policy, device="cpu")
    assert forebay.report(model).plan.written == tuple(f"layers.{i}.weight" for i in range(LAYERS))
    assert_trains_as_plain(Bounded, model, optimizer)
    forebay.close(model)


@pytest.mark.parametrize("batch", [IDS, None], ids=["planned", "without a batch"])
@pytest.mark.parametrize(("kind", "name"), [(Renormed, "embed.weight"), (Binary, "layers.0.weight")])
def test_one_that_would_be_lost_is_refused(kind: type[nn.Module], name: str, batch: torch.Tensor | None) -> None:
    assert_refused(kind, name, batch)


@pytest.mark.parametrize("kind", [Clamped, ClampedInAList])
def test_one_that_torch_does_not_count_is_refused(kind: type[nn.Module]) -> None:
    """Where a recording says where to look."""
    assert_refused(kind, "layers.0.weight", IDS)


def assert_refused(kind: type[nn.Module], name: str, batch: torch.Tensor | None) -> None:
    """Every time, and the parameters at home are what they were."""
    model, _ = forebay.prepare(*made(kind), batch, device_memory="1MiB", policy="stream", device="cpu")
    for _ in range(2):
        with pytest.raises(ModelError, match=rf"forward changes parameter {name}, .*policy='resident'"):
            model(IDS)
    values = forebay.parameters(model)
    assert all(torch.equal(values[n], p) for n, p in made(kind)[0].named_parameters())
    forebay.close(model)


def test_what_is_large_has_to_stay() -> None:
    """Nobody keeps a copy of it to compare with."""
    kind = partial(Renormed, 2048)
    with pytest.raises(CannotServe, match=r"forward writes to parameter embed\.weight .*load_state_dict") as refused:
        forebay.prepare(*made(kind), IDS, device_memory="1MiB", policy="stream", device="cpu")
    (remedy,) = refused.value.nearest
    model, optimizer = forebay.prepare(*made(kind), IDS, device_memory=remedy.needed, device="cpu")
    assert_trains_as_plain(kind, model, optimizer)
    forebay.close(model)
