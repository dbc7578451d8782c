"""Accumulation where the parts of a parameter's gradient are not all that there is to their sum: refused; and where a
part that may come does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo import eval_frame

import forebay
from forebay.errors import ModelError
from tests.parity.small import Layer, Network, batch, prepared


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


class Product(torch.autograd.Function):
    """``x`` times the transposed weight, which has a gradient only where it is ``given`` one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, given: bool) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.given = given
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.t() @ x if ctx.given else None, None


class Sometimes(Layer):
    def forward(self, x: torch.Tensor, given: bool = True) -> torch.Tensor:  # type: ignore[override]
        made: torch.Tensor = Product.apply(x, self.inner.weight, given)
        return made + self.inner.bias


class SometimesTrained(Network):
    def __init__(self) -> None:
        super().__init__(Sometimes)

    def forward(self, x: torch.Tensor, given: bool = True) -> torch.Tensor:  # type: ignore[override]
        x = self.emb(x)
        for layer in self.layers:
            x = layer(x, given)
        return self.head(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("without", [0, 1, 2])
def test_a_gradient_that_a_micro_batch_does_not_give(without: int) -> None:
    """Those of the others are added up as in the loop."""

    def loss(model: nn.Module, number: int) -> torch.Tensor:
        return model(batch(number), number != without).square().mean()  # type: ignore[no-any-return]

    plain, (model, _) = SometimesTrained(), prepared(SometimesTrained(), "stream")
    forebay.accumulate(model, range(3), loss)
    for number in range(3):
        loss(plain, number).backward()
    gradients = forebay.gradients(model)
    for name, parameter in plain.named_parameters():
        assert parameter.grad is not None and torch.equal(gradients[name], parameter.grad), name
    forebay.close(model)
