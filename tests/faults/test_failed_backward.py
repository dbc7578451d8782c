"""A backward that raises on its way: what the loop does next is no part of the step, and it can go on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import forebay

WIDTH, LAYERS = 64, 5
MORE = 1 << 20
"""Elements of something that has no room beside the model."""


class Raises(torch.autograd.Function):
    """The identity, without a backward."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no backward")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.raises = nn.Linear(WIDTH, WIDTH), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + torch.tanh(self.linear(x))
        return Raises.apply(y) if self.raises else y


@pytest.mark.parametrize("policy", ["auto", "stream", "stream-recompute", "offload-all"])
def test_what_the_loop_makes_behind_it_is_not_the_steps(policy: str) -> None:
    batch = torch.randn(16, WIDTH)
    layers = [Layer() for _ in range(LAYERS)]
    made = nn.Sequential(*layers)
    plain = nn.Sequential(*(Layer() for _ in range(LAYERS)))
    plain.load_state_dict(made.state_dict())
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2, fused=True)
    model, optimizer = forebay.prepare(made, optimizer, batch, device_memory="1MiB", policy=policy, device="cpu")
    layers[2].raises = True
    with pytest.raises(RuntimeError, match="no backward"):
        model(batch).square().mean().backward()
    assert torch.zeros(MORE).sum() == 0
    layers[2].raises = False
    optimizer.zero_grad()
    beside = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    for _ in range(3):
        losses = []
        for one, steps in ((model, optimizer), (plain, beside)):
            loss = one(batch).square().mean()
            loss.backward()
            steps.step()
            steps.zero_grad()
            losses.append(loss.item())
        assert losses[0] == losses[1]
    forebay.close(model)
