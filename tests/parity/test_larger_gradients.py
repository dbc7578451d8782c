"""Gradients that are views of something larger: autograd hands a parameter the part that is its; all of it stays."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import forebay
from forebay.memory import Tier
from tests.parity.compare import adamw

AMPLE = 64 * 2**20
WIDTH, TOKENS, LAYERS = 16, 255, 3
WHOLE = (TOKENS + 1) * WIDTH * 4
"""Bytes of the gradient of all tokens, of which that of the class token is one row."""


class Classifier(nn.Module):
    """Tokens behind one of the model's own, as in a vision transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.ModuleDict({"patches": nn.Linear(WIDTH, WIDTH)})
        self.class_token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        hidden = torch.cat([self.class_token, self.embeddings["patches"](patches)], 1)
        for layer in self.layers:
            hidden = layer(hidden).tanh()
        return hidden[:, 0].square().sum()


def batch(number: int) -> dict[str, torch.Tensor]:
    return {"patches": torch.randn(1, TOKENS, WIDTH, generator=torch.Generator().manual_seed(number))}


@pytest.fixture(params=[True, False], ids=["accumulates", "one backward a step"])
def prepared(request: pytest.FixtureRequest) -> Iterator[tuple[nn.Module, torch.optim.Optimizer]]:
    torch.manual_seed(0)
    model = Classifier()
    how = {"device_memory": AMPLE, "accumulates": request.param, "device": "cpu", "policy": "resident"}
    model, optimizer = forebay.prepare(model, adamw(list(model.parameters())), batch(0), **how)
    yield model, optimizer
    forebay.close(model)


def test_all_of_it_is_promised(prepared: tuple[nn.Module, torch.optim.Optimizer]) -> None:
    """Beside the parameters, their states and gradients and what the passes take, the promise has room for what the
    class token's gradient keeps: all tokens' but its own row."""
    model, optimizer = prepared
    plan = forebay.report(model).plan
    for step in range(3):
        for number in range(2 if plan.accumulates else 1):
            model(**batch(2 * step + number)).backward()
        token = next(p for name, p in model.named_parameters() if name == "class_token")
        assert token.grad is not None and token.grad.untyped_storage().nbytes() == WHOLE
        optimizer.step()
        optimizer.zero_grad()
    peak = next(usage for usage in forebay.report(model).timeline.tiers if usage.tier is Tier.DEVICE).peak
    assert peak == plan.device
