"""A small model of linear layers, and how it is prepared and trained."""

from __future__ import annotations

import torch
from torch import nn

import forebay

__all__ = ["Layer", "Network", "batch", "prepared", "train"]

WIDTH = 8


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.inner(x))


class Network(nn.Module):
    """Of ``layer``s; always with the same values."""

    def __init__(self, layer: type[nn.Module] = Layer, layers: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.emb = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([layer() for _ in range(layers)])
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.emb(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


def batch(seed: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))


def prepared(model: nn.Module, policy: str, **asked: object) -> tuple[nn.Module, torch.optim.Optimizer]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    made: tuple[nn.Module, torch.optim.Optimizer] = forebay.prepare(
        model, optimizer, batch(0), device_memory="64MiB", device="cpu", policy=policy, **asked
    )
    return made


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> list[float]:
    """The losses of some steps."""
    losses = []
    for step in range(steps):
        loss = model(batch(step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
