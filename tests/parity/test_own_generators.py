"""Models that draw from generators of their own, of Python's, NumPy's and torch's kinds, which are attributes of
modules."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import nn

import forebay
from forebay.runtime.generators import OwnGenerator
from forebay.runtime.inside import own_generators
from tests.parity.compare import stepped

WIDTH, LAYERS, STEPS, MICRO_BATCHES = 16, 4, 3, 3

KINDS: dict[str, Callable[[], OwnGenerator]] = {
    "python": lambda: random.Random(3),
    "pcg": lambda: np.random.default_rng(3),
    "philox": lambda: np.random.Generator(np.random.Philox(3)),
    "legacy": lambda: np.random.RandomState(3),
    "torch": lambda: torch.Generator().manual_seed(3),
}


class Layer(nn.Module):
    def __init__(self, make: Callable[[], OwnGenerator]) -> None:
        super().__init__()
        self.linear, self.make = nn.Linear(WIDTH, WIDTH), make
        self.begin()

    def begin(self) -> None:
        self.numbers = self.make()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (self.linear(x) * self.drawn()).tanh() * self.drawn()

    def drawn(self) -> float | torch.Tensor:
        if isinstance(self.numbers, torch.Generator):
            return torch.rand((), generator=self.numbers)
        legacy = isinstance(self.numbers, np.random.RandomState)
        return self.numbers.random_sample() if legacy else self.numbers.random()


class Late(Layer):
    """Makes its generator when it is first called."""

    def begin(self) -> None:
        self.numbers: OwnGenerator | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.numbers = self.make() if self.numbers is None else self.numbers
        return super().forward(x)


class Borrowing(nn.Module):
    """Its layers draw from one that it has."""

    def __init__(self, make: Callable[[], OwnGenerator]) -> None:
        super().__init__()
        self.numbers = make()
        self.layers = nn.ModuleList(Layer(lambda: self.numbers) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def stack(layer: type[Layer], make: Callable[[], OwnGenerator]) -> nn.Module:
    return nn.Sequential(*(layer(make) for _ in range(LAYERS)))


MODELS: dict[str, Callable[[Callable[[], OwnGenerator]], nn.Module]] = {
    "each": lambda make: stack(Layer, make),
    "late": lambda make: stack(Late, make),
    "shared": Borrowing,
}


def made(model: str, kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    module = MODELS[model](KINDS[kind])
    return module, torch.optim.AdamW(module.parameters(), lr=1e-2, fused=True)


def prepared(model: str, kind: str, policy: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    return forebay.prepare(
        *made(model, kind),
        torch.zeros(4, WIDTH),
        device_memory="1MiB",
        policy=policy,
        device="cpu",
        loss_fn=loss_of,
    )


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().sum()


def batches(count: int) -> Iterator[torch.Tensor]:
    for number in range(count):
        yield torch.linspace(-1, 1 + number, 4 * WIDTH).view(4, WIDTH)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("policy", ["stream-recompute", "stream"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", MODELS)
def test_they_draw_what_they_draw_in_plain_pytorch(model: str, kind: str, policy: str) -> None:
    """Neither a plan that is made nor a forward that runs again moves them on."""
    plain, its = made(model, kind)
    expected = stepped(its, (loss_of(plain, batch) for batch in batches(STEPS)))
    ours, optimizer = prepared(model, kind, policy)
    assert stepped(optimizer, (loss_of(ours, batch) for batch in batches(STEPS))) == expected
    assert len(set(expected)) == STEPS
    assert bool(forebay.report(ours).plan.recompute) is (policy == "stream-recompute")
    assert all(torch.equal(forebay.parameters(ours)[n], p) for n, p in plain.named_parameters())
    forebay.close(ours)


@pytest.mark.parametrize("model", ["each", "shared"])
def test_accumulation_draws_in_the_order_of_the_loop(model: str) -> None:
    plain, its = made(model, "pcg")
    expected = []
    for batch in batches(MICRO_BATCHES):
        loss = loss_of(plain, batch)
        loss.backward()
        expected.append(loss.item())
    its.step()
    ours, optimizer = prepared(model, "pcg", "stream-recompute")
    losses = forebay.accumulate(ours, list(batches(MICRO_BATCHES)), loss_of)
    optimizer.step()
    assert [loss.item() for loss in losses] == expected
    assert all(torch.equal(forebay.parameters(ours)[n], p) for n, p in plain.named_parameters())
    forebay.close(ours)


def test_each_is_found_once_and_one_of_the_system_is_none() -> None:
    model = Borrowing(KINDS["pcg"])
    assert own_generators(model.modules()) == (model.numbers,)
    model.numbers = random.SystemRandom()
    assert own_generators([model]) == ()
