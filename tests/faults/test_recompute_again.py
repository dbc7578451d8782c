"""Blocks whose forward does something else the second time, and passes that end early: named, and nothing is lost."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

import forebay
from forebay.errors import ModelError
from forebay.treatments import Fate
from tests.faults.recompute_rig import (
    ALL,
    FATES,
    GELU,
    ROWS,
    SIN,
    Function,
    Layer,
    assert_same,
    batch,
    live,
    made,
    one_pass,
    plain,
    prepared,
)

# What a forward does the second time.


def another_op(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.gelu(x).sin() if layer.calls == 1 else x.sin().sin()


def another_order(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.gelu(x).sin() if layer.calls == 1 else nn.functional.gelu(x.sin())


def one_more(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    return plain(layer, x) if layer.calls == 1 else plain(layer, x.sin())


def another_shape(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    if layer.calls > 1:
        x = torch.cat([x, x])
    return plain(layer, x)[:ROWS]


def fewer_saved(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    return plain(layer, x) if layer.calls == 1 else x


def saved_shapes(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    return plain(layer, x).exp() if layer.calls == 1 else torch.cat([x, x]).exp().exp().exp()[:ROWS]


@pytest.mark.parametrize(
    ("between", "named", "message"),
    [
        (another_op, [(GELU, 0)], r"aten.gelu.default#0 did not run again|saved"),
        (another_op, ALL, r"aten.sin.default#0 ran where aten.gelu.default#0 had"),
        (another_order, ALL, r"aten.sin.default#0 ran where aten.gelu.default#0 had"),
        (one_more, [(SIN, 0)], r"aten.sin.default#0 ran after other ops|ended after other ops"),
        (one_more, [(SIN, 0), (GELU, 0)], r"aten.sin.default#0 ran where aten.gelu.default#0 had"),
        (another_shape, [(GELU, 0)], r"aten.gelu.default#0 ran after other ops, or on tensors of other shapes"),
        (fewer_saved, [(SIN, 0)], r"aten.sin.default#0 did not run again|different number of tensors"),
        (fewer_saved, [], r"different number of tensors"),
        (saved_shapes, [], r"different metadata"),
    ],
)
@FATES
def test_a_forward_that_does_something_else_is_refused(
    between: Function, named: list[tuple[str, int]], message: str, fate: Fate
) -> None:
    model = prepared(made(between), named, fate)
    loss = model(batch())["loss"]
    with pytest.raises(ModelError, match=rf"block layers\.2 computed something else.*{message}") as raised:
        loss.backward()
    assert "Leave the block out of recomputation" in str(raised.value)
    # Backward is over, and the model still trains where the fault is gone.
    del loss, raised
    for layer in model.layers:
        layer.between = plain
    reference = made(plain)
    assert_same(model, reference, one_pass)
    forebay.close(model)


def test_what_a_forward_does_where_nobody_looks_it_does_twice() -> None:
    model = prepared(made(plain), ALL)
    one_pass(model)
    assert [layer.calls for layer in model.layers] == [2, 2, 2]
    forebay.close(model)


class Hidden:
    generator = torch.Generator()


OWN = torch.Generator()


def masked(layer: Layer, x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return plain(layer, x * torch.bernoulli(torch.full_like(x, 0.5), generator=generator))


def found(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    return masked(layer, masked(layer, x, OWN), OWN)


def hidden(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    return masked(layer, x, Hidden.generator)


def made_anew(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    return masked(layer, x, torch.Generator().manual_seed(7))


def seeded(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    return masked(layer, x, Hidden.generator.manual_seed(7))


def test_a_generator_that_nobody_finds_is_refused_where_the_op_runs_again() -> None:
    model = prepared(made(hidden), [(GELU, 0)])
    loss = model(batch())["loss"]
    with pytest.raises(ModelError, match=r"layers\.2.*bernoulli.*generator of its own"):
        loss.backward()
    forebay.close(model)


BERNOULLI = "aten.bernoulli.default"


@pytest.mark.parametrize("named", [GELU, BERNOULLI])
@pytest.mark.parametrize("function", [found, made_anew, seeded])
def test_a_generator_of_its_own_draws_again_what_it_drew(function: Function, named: str) -> None:
    """It is brought back, or it is where it was without that."""

    def run(model: nn.Module) -> list[torch.Tensor]:
        OWN.manual_seed(5)
        return [*one_pass(model), *one_pass(model), OWN.get_state()]

    model = prepared(made(function), [(named, 0)])
    assert_same(model, made(function), run)
    forebay.close(model)


@FATES
def test_one_that_nobody_finds_is_fine_where_the_op_does_not_run_again(fate: Fate) -> None:
    def run(model: nn.Module) -> list[torch.Tensor]:
        Hidden.generator.manual_seed(5)
        return [*one_pass(model), Hidden.generator.get_state()]

    model = prepared(made(hidden), [(BERNOULLI, 0)], fate)
    assert_same(model, made(hidden), run)
    forebay.close(model)


# Passes that end early.


class Stop:
    """Raises once it is armed, in the layer that is called next, also where that runs again: as ``Tally``, it is not
    looked into."""

    __slots__ = ("error", "storages")

    def __init__(self) -> None:
        self.error: type[BaseException] | None = None
        self.storages: list[weakref.ref[torch.UntypedStorage]] = []

    def __call__(self, layer: Layer, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.gelu(x)
        self.storages.append(weakref.ref(y.untyped_storage()))
        if self.error is not None and layer.calls % 2:
            error, self.error = self.error, None
            raise error("stop")
        return y.sin()

    @property
    def alive(self) -> int:
        return sum(storage() is not None for storage in self.storages)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@FATES
def test_the_step_after_a_failed_forward(error: type[BaseException], fate: Fate) -> None:
    stop = Stop()
    model = prepared(made(stop), ALL, fate)
    reference = made(stop)
    assert_same(model, reference, one_pass)
    model.zero_grad()
    before = live(model)
    stop.error = error
    with pytest.raises(error):
        model(batch())
    for layer in model.layers:
        layer.calls = 0
    assert_same(model, reference, one_pass)
    model.zero_grad()
    assert live(model) == before
    assert stop.alive == 0
    forebay.close(model)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@FATES
def test_the_step_after_a_failed_recomputation(error: type[BaseException], fate: Fate) -> None:
    stop = Stop()
    model = prepared(made(stop), [(SIN, 0)], fate)
    reference = made(stop)
    before = live(model)
    loss = model(batch())["loss"]
    for layer in model.layers:
        layer.calls = 0  # the call of the recomputation is the one that fails
    stop.error = error
    with pytest.raises(error):
        loss.backward()
    del loss
    for layer in model.layers:
        layer.calls = 0
    assert_same(model, reference, one_pass)
    model.zero_grad()
    assert live(model) == before
    assert stop.alive == 0
    forebay.close(model)
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()


@FATES
def test_an_exception_between_forward_and_backward(fate: Fate) -> None:
    stop = Stop()
    model = prepared(made(stop), ALL, fate)
    before = live(model)

    def step() -> None:
        loss = model(batch())["loss"]
        assert stop.alive or fate is Fate.OFFLOAD
        raise ValueError(f"the loss is {loss.item()}")

    for _ in range(2):
        with pytest.raises(ValueError, match="the loss is"):
            step()
        assert live(model) == before
        assert stop.alive == 0
    forebay.close(model)
