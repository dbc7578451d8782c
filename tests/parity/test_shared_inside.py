"""Layers that call what lies around them: one module that all of them have, or a list of modules that are blocks by
themselves. While it runs, the layer is in use, too."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn

import forebay
from forebay.errors import DoesNotFit
from forebay.runtime.blocks import find_blocks

WIDTH, LAYERS = 48, 5


class Layer(nn.Module):
    """Two products, and between them what it shares with the others."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.up, self.shared, self.down = nn.Linear(WIDTH, 2 * WIDTH), shared, nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.up(x))
        parts = self.shared if isinstance(self.shared, nn.ModuleList) else [self.shared]
        for part in parts:
            y = y + torch.tanh(part(y))
        return x + self.down(y)


class Model(nn.Module):
    """``shared`` comes first, as in CoaT, or behind the layers."""

    def __init__(self, shared: Callable[[], nn.Module], *, first: bool) -> None:
        super().__init__()
        made = shared()
        if first:
            self.shared = made
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer(made) for _ in range(LAYERS))
        self.shared_too = made
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def one() -> nn.Module:
    return nn.Linear(2 * WIDTH, 2 * WIDTH)


def several() -> nn.Module:
    return nn.ModuleList(nn.Linear(2 * WIDTH, 2 * WIDTH) for _ in range(3))


def model(shared: Callable[[], nn.Module], *, first: bool) -> nn.Module:
    torch.manual_seed(0)
    return Model(shared, first=first)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> Sequence[torch.Tensor]:
    losses = []
    for _ in range(3):
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    state = model.state_dict()
    return [*losses, *(state[name] for name in sorted(state))]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


@pytest.mark.thinned(4)
@pytest.mark.parametrize("policy", ["auto", "stream", "stream-recompute", "zero-infinity", "patrickstar"])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("shared", [one, several])
def test_it_trains_within_the_least_budget(shared: Callable[[], nn.Module], policy: str, *, first: bool) -> None:
    batch = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(0))
    plain = model(shared, first=first)
    expected = steps(plain, adamw(plain), batch)
    ours = model(shared, first=first)
    optimizer = adamw(ours)
    with pytest.raises(DoesNotFit) as refused:
        forebay.prepare(ours, optimizer, batch, device_memory=1024, policy=policy, device="cpu")
    assert refused.value.needed is not None
    # What is needed at least, and the losses that the loop keeps.
    allowed = refused.value.needed + 3 * 4
    ours, optimizer = forebay.prepare(ours, optimizer, batch, device_memory=allowed, policy=policy, device="cpu")
    assert all(map(torch.equal, steps(ours, optimizer, batch), expected))
    forebay.close(ours)


def test_what_lies_around_the_layers_stays_while_they_run() -> None:
    (block,) = (block for block in find_blocks(model(one, first=True)).model.blocks if "shared" in block.modules)
    assert block.held
    assert "" in block.modules
