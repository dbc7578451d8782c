"""A tower of feed-forward layers, which tests of memory count bytes in."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from tests.parity.models import Case

__all__ = ["tower"]


class Feed(nn.Module):
    """A layer that saves three tensors: its input, what goes into GELU and what comes out of it (4 times as large)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


class Tower(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Feed(width) for _ in range(depth)])

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = layer(x)
        return {"loss": x.square().sum()}


def tower(rows: int, width: int, depth: int) -> Case:
    """``depth`` layers on ``rows`` x ``width`` numbers."""

    def inputs(step: int) -> dict[str, torch.Tensor]:
        return {"x": torch.randn(rows, width, generator=torch.Generator().manual_seed(step))}

    return Case(partial(Tower, width, depth), inputs)
