"""Accumulation where the parts of a parameter's gradient are not all that there is to their sum: refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._dynamo import eval_frame

import forebay
from forebay.errors import ModelError
from tests.parity.small import Network, batch, prepared


class Tied(Network):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.emb.weight


def under_autocast(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model(x).float().square().mean()


def squares(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


@pytest.mark.parametrize("hooked", [True, False], ids=["hook", "autocast"])
def test_accumulation_of_tied_parameters(hooked: bool) -> None:
    model, optimizer = prepared(Tied(), "stream")
    if hooked:
        model.get_parameter("emb.weight").register_hook(lambda gradient: gradient * 1.5)
    with pytest.raises(ModelError, match=r"emb\.weight is used in several blocks .* the loop itself"):
        forebay.accumulate(model, [batch(0), batch(1)], squares if hooked else under_autocast)
    assert not forebay.gradients(model)
    optimizer.zero_grad()
    assert eval_frame._stance.stance == "default"  # what is compiled later is compiled
    plain = Network()
    forebay.close(model)
    # Untied, both work.
    model, _ = prepared(Network(), "stream")
    for one in (model, plain):
        if hooked:
            one.get_parameter("emb.weight").register_hook(lambda gradient: gradient * 1.5)
    loss = squares if hooked else under_autocast
    losses = forebay.accumulate(model, [batch(0), batch(1)], loss)
    for number in range(2):
        expected = loss(plain, batch(number))
        expected.backward()
        assert torch.equal(losses[number], expected.detach())
    gradients = forebay.gradients(model)
    assert all(torch.equal(gradients[n], p.grad) for n, p in plain.named_parameters() if p.grad is not None)
    forebay.close(model)
