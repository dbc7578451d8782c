"""What the forward of a recomputed block may do, and how often its backward may run: the numbers are right."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import forebay
from forebay.treatments import Fate
from tests.faults.recompute_rig import (
    ADDMM,
    ALL,
    FATES,
    GELU,
    LAYERS,
    Function,
    Layer,
    Net,
    assert_same,
    batch,
    made,
    one_pass,
    plain,
    prepared,
)

# What a forward may do.


def changed_in_place(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    y = nn.functional.gelu(x)
    y.mul_(2.0)
    return y.sin()


class Cube(torch.autograd.Function):
    """Saves what it is given and what it makes."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor) -> torch.Tensor:
        square = x.sin() * x
        ctx.save_for_backward(x, square)
        return square * x

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, g: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        x, square = ctx.saved_tensors  # type: ignore[attr-defined]
        return g * (square + x)


def own_function(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.gelu(Cube.apply(x))


def without_graph(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        scale = nn.functional.gelu(x).sin()
    return nn.functional.gelu(x) * scale


def backward_inside(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        inner = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(nn.functional.gelu(inner).sin().sum(), inner)
    return plain(layer, x) * slope


def checkpoint_inside(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    return torch.utils.checkpoint.checkpoint(plain, layer, x, use_reentrant=False)


def draws(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    """Four draws, each mask depending on all before it."""
    for _ in range(2):
        x = torch.native_dropout(nn.functional.gelu(x), 0.5, True)[0] + torch.rand_like(x)
    return x.sin()


DRAWS = [("aten.native_dropout.default", 0), ("aten.rand_like.default", 0), ("aten.native_dropout.default", 1)]


@pytest.mark.parametrize("named", [DRAWS[:1], DRAWS[1:2], DRAWS[1:], DRAWS], ids=["first", "second", "later", "most"])
@FATES
def test_ops_that_draw_and_do_not_run_again(named: list[tuple[str, int]], fate: Fate) -> None:
    """Those after them draw what they drew, and so does the next pass."""

    def run(model: nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(7)
        return [*one_pass(model), *one_pass(model), torch.rand(1)]

    model = prepared(made(draws), named, fate)
    assert_same(model, made(draws), run)
    forebay.close(model)


@pytest.mark.parametrize(
    "between",
    [changed_in_place, own_function, without_graph, backward_inside, checkpoint_inside],
    ids=lambda f: f.__name__,
)
@FATES
def test_what_a_forward_may_do(between: Function, fate: Fate) -> None:
    names = [*ALL, (GELU, 1), ("aten.mul_.Tensor", 0), ("aten.mul.Tensor", 0)]
    model = prepared(made(between), names, fate)
    reference = made(between)
    assert_same(model, reference, one_pass)
    assert_same(model, reference, one_pass)
    forebay.close(model)


class Pair(Layer):
    """Gives out what its first product is, which nobody saves."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x)
        return y, self.down(self.between(self, y + 0.0))  # type: ignore[return-value]


class Pairs(Net):
    def __init__(self) -> None:
        super().__init__(plain)
        self.layers = nn.ModuleList([Pair(plain) for _ in LAYERS])

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = x + layer(x)[1]
        return {"loss": x.square().sum()}


def double(module: nn.Module, args: object, output: tuple[torch.Tensor, torch.Tensor]) -> None:
    with torch.no_grad():
        output[0].mul_(2.0)


def test_a_hook_that_changes_what_is_kept() -> None:
    """The op whose result was changed runs again, and the numbers are right."""
    torch.manual_seed(0)
    reference: nn.Module = Pairs()
    torch.manual_seed(0)
    model: nn.Module = Pairs()
    for one in (reference, model):
        for layer in one.layers:
            layer.register_forward_hook(double)
    model = prepared(model, [(ADDMM, 0), (GELU, 0)])
    assert_same(model, reference, one_pass)
    forebay.close(model)


# More than one backward.


def twice(model: nn.Module) -> list[torch.Tensor]:
    loss = model(batch())["loss"]
    loss.backward(retain_graph=True)
    loss.backward()
    return [loss.detach()]


def two_parts(model: nn.Module) -> list[torch.Tensor]:
    output = model(batch())
    output["x"].sin().sum().backward(retain_graph=True)
    output["loss"].backward()
    return []


def penalty(model: nn.Module) -> list[torch.Tensor]:
    x = batch().requires_grad_()
    loss = model(x)["loss"]
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + slope.square().sum()).backward()
    assert x.grad is not None
    return [slope.detach(), x.grad]


@pytest.mark.parametrize("run", [twice, two_parts, penalty])
@FATES
def test_more_than_one_backward(run: Callable[[nn.Module], list[torch.Tensor]], fate: Fate) -> None:
    model = prepared(made(plain), ALL, fate)
    assert_same(model, made(plain), run)
    forebay.close(model)
