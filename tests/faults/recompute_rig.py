"""A small model of layers that recompute, with something of the test's own inside each of them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
import torch
from torch import nn

import forebay
from forebay.memory import Tier
from forebay.runtime.blocks import find_blocks
from forebay.runtime.hooks import session_of
from forebay.treatments import Fate, Selection, Treatment
from tests.parity.compare import adamw
from tests.parity.recomputing import AMPLE, plan_of

ADDMM, GELU, SIN = "aten.addmm.default", "aten.gelu.default", "aten.sin.default"
LAYERS = [f"layers.{i}" for i in range(3)]
ROWS, WIDTH = 128, 16
FATES = pytest.mark.parametrize("fate", list(Fate))
Function = Callable[["Layer", torch.Tensor], torch.Tensor]


class Tally:
    """A count that nothing takes back: objects without fields are not looked into."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class Layer(nn.Module):
    """Two products with ``between`` between them. ``calls`` is counted where nothing takes it back."""

    def __init__(self, between: Function) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.between, self._counted = between, Tally()

    @property
    def calls(self) -> int:
        return self._counted.count

    @calls.setter
    def calls(self, count: int) -> None:
        self._counted.count = count

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.down(self.between(self, self.up(x)))


class Net(nn.Module):
    def __init__(self, between: Function) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(between) for _ in LAYERS])

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = x + layer(x)
        return {"loss": x.square().sum(), "x": x}


def made(between: Function) -> Net:
    torch.manual_seed(0)
    return Net(between)


def batch(seed: int = 0) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))


def prepared(model: nn.Module, named: Iterable[tuple[str, int]], fate: Fate = Fate.KEEP) -> nn.Module:
    """Every layer recomputes, and in each ``named`` has ``fate``; the layers stream, through a slot for each."""
    plan = plan_of(find_blocks(model).model, LAYERS, resident=False, slots=len(LAYERS))
    treatments = tuple(Treatment(*name, fate) for name in named)
    if treatments:
        arena = 2**20 if fate is Fate.OFFLOAD else 0
        streaming = replace(plan.streaming, host_activations=arena, offload_window=8192, reload_window=8192)
        chosen = (Selection(tuple(LAYERS), treatments),)
        plan = replace(plan, activations=chosen, streaming=streaming, host=plan.host + arena)
    return forebay.prepare(model, adamw(list(model.parameters())), plan=plan, device_memory=AMPLE, device="cpu")[0]


ALL = [(ADDMM, 0), (GELU, 0), (SIN, 0)]


def plain(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.gelu(x).sin()


def assert_same(model: nn.Module, reference: nn.Module, run: Callable[[nn.Module], list[torch.Tensor]]) -> None:
    """``run`` gives the same tensors and leaves the same gradients."""
    # First: after an interrupt it is the next forward of the model that puts things in order.
    actual = run(model)
    expected = run(reference)
    assert len(expected) == len(actual)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    gradients = forebay.gradients(model)
    for name, parameter in reference.named_parameters():
        assert parameter.grad is not None
        assert torch.equal(gradients[name], parameter.grad), name


def one_pass(model: nn.Module) -> list[torch.Tensor]:
    model.zero_grad()
    loss = model(batch())["loss"]
    loss.backward()
    return [loss.detach()]


def live(model: nn.Module) -> tuple[int, int]:
    """Bytes on the device, and those of the arena that are taken."""
    forebay.synchronize(model)
    attachment = session_of(model)
    assert attachment is not None
    gc.collect()
    tier = forebay.report(model).timeline.usage(Tier.DEVICE)
    return tier.live, attachment.session.stash.taken
