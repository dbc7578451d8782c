"""Blocks that draw from Python's and NumPy's random numbers, and run again in backward."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

import forebay
from forebay.errors import ModelError
from forebay.runtime.generators import HostNumbers, drawn_so_far
from tests.parity.compare import stepped

WIDTH, LAYERS, STEPS = 16, 4, 4

Draw = Callable[[], float]

DRAWS: dict[str, Draw] = {
    "python": random.random,
    "numpy": np.random.random,
    "normal": lambda: random.gauss(0, 1),
    "numpy normal": np.random.normal,  # it makes two at a time
    "both": lambda: random.random() + np.random.random(),
}


class Layer(nn.Module):
    def __init__(self, draw: Draw) -> None:
        super().__init__()
        self.linear, self.draw = nn.Linear(WIDTH, WIDTH), draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (self.linear(x) * self.draw()).tanh() * self.draw()


def model(draw: Draw) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(draw) for _ in range(LAYERS)))


def seeded() -> None:
    random.seed(5)
    np.random.seed(5)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    batch = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)
    return stepped(optimizer, (model(batch).square().sum() for _ in range(STEPS)))


def prepared(module: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    return forebay.prepare(
        module,
        adamw(module),
        torch.zeros(4, WIDTH),
        device_memory="1MiB",
        policy="stream-recompute",
        device="cpu",
        loss_fn=lambda model, batch: model(batch).square().sum(),
    )


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-2, fused=True)


@pytest.mark.parametrize("name", DRAWS)
def test_the_second_run_draws_what_the_first_one_drew(name: str) -> None:
    """And the loop goes on with the numbers that it would have without."""
    plain = model(DRAWS[name])
    its = adamw(plain)
    seeded()
    expected = trained(plain, its), random.random(), np.random.normal()
    ours, optimizer = prepared(model(DRAWS[name]))
    seeded()
    assert (trained(ours, optimizer), random.random(), np.random.normal()) == expected
    assert forebay.report(ours).plan.recompute
    assert all(torch.equal(forebay.parameters(ours)[n], p) for n, p in plain.named_parameters())
    forebay.close(ours)


def test_one_that_begins_to_draw_later_says_so_once() -> None:
    calls = [0]

    def seldom() -> float:
        calls[0] += 1
        return random.random() if calls[0] > 100 else 1.0

    ours, optimizer = prepared(model(seldom))
    calls[0] = 0
    trained(ours, optimizer)
    calls[0] = 100
    with pytest.raises(
        ModelError, match=r"block 3 has drawn from Python's or NumPy's random numbers.*not in those before"
    ):
        trained(ours, optimizer)
    optimizer.zero_grad()
    assert len(trained(ours, optimizer)) == STEPS
    forebay.close(ours)


@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_shows(name: str) -> None:
    seeded()
    before, place = HostNumbers(), drawn_so_far()
    assert HostNumbers() == before and drawn_so_far() == place
    first = DRAWS[name]()
    assert HostNumbers() != before and drawn_so_far() != place
    with before.again():
        assert DRAWS[name]() == first
    after = HostNumbers()
    second = DRAWS[name]()
    with after.again():
        assert DRAWS[name]() == second
    assert HostNumbers() != after  # of two normal numbers, too, the second of which was made with the first


def test_another_generator_of_numpy_s_is_looked_at_too() -> None:
    own = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(1))
    try:
        place, before = drawn_so_far(), HostNumbers()
        assert drawn_so_far() == place and HostNumbers() == before
        first = np.random.random()
        assert drawn_so_far() != place and HostNumbers() != before
        with before.again():
            assert np.random.random() == first
        forebay.profile(model(np.random.random), torch.zeros(4, WIDTH), device="cpu")
    finally:
        np.random.set_bit_generator(own)
