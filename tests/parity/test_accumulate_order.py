"""Models whose forwards leave something in their modules, where other micro-batches would find it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import forebay
from forebay.errors import ModelError
from forebay.runtime.forward_order import Passing
from forebay.runtime.hooks import attachment_of
from forebay.timeline import Lane
from forebay.trace import Leaves
from tests.parity.accumulating import moved

WIDTH, LAYERS, COUNT, STEPS = 16, 4, 3, 3


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale: Any = 1.0
        self.mean: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x).tanh() * self.scale
        return x + y + y.sin()


class Stack(nn.Module):
    """Leaves nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.layer() for _ in range(LAYERS))

    def layer(self) -> nn.Module:
        return Layer()

    def through(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.through(x)


class Handing(Stack):
    """Gives its layers what is of the batch, as older models do with a mask."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = (x > 0).float()
        for layer in self.layers:
            layer.scale = scale
        return self.through(x)


class Noting(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        self.mean = y.detach().mean()
        return y


class Asking(Stack):
    """Reads at its end what its layers have noted."""

    def layer(self) -> nn.Module:
        return Noting()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.through(x) * sum(layer.mean for layer in self.layers)


class Remembering(Stack):
    """Begins with what it had at its end."""

    memory: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.through(x if self.memory is None else x + self.memory)
        self.memory = x.detach().mean()
        return x


class Counting(Stack):
    """In a buffer, and in a list: at its beginning, and reads both at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.sizes: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.sizes.append(float(len(self.sizes)))
        return self.through(x) / (self.calls + sum(self.sizes))


class Averaging(Stack):
    """Begins with a running mean, which it changes at its end where torch does not count it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.through(x - self.mean)
        self.mean.data.lerp_(x.detach().mean(0), 0.1)
        return x


class Sharing(Stack):
    """All layers count in one object."""

    def __init__(self) -> None:
        super().__init__()
        calls = {"seen": 0}
        for layer in self.layers:
            layer.calls = calls

    def layer(self) -> nn.Module:
        return Sharer()


class Sharer(Layer):
    calls: dict[str, int]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls["seen"] += 1
        return super().forward(x) + 1 / self.calls["seen"]


class Once(Stack):
    """Makes a table in its first forward, behind its first layers."""

    table: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.through(x)
        if self.table is None:
            self.table = torch.linspace(0, 1, WIDTH)
        return x * self.table


class Hooked(Stack):
    """Reads at its end what a hook has noted, in a dict that is no attribute of it."""

    def __init__(self) -> None:
        super().__init__()
        noted: dict[nn.Module, torch.Tensor] = {}

        def note(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            noted[module] = output.detach().mean()

        for layer in self.layers:
            layer.register_forward_hook(note)
        self.noted = lambda: sum(noted.values())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.through(x) * self.noted()


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def batches(step: int) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(step)
    return [torch.randn(4, WIDTH, generator=made) for _ in range(COUNT)]


def made(kind: Callable[[], nn.Module]) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = kind()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def prepared(kind: Callable[[], nn.Module], policy: str = "stream") -> tuple[nn.Module, torch.optim.Optimizer]:
    return forebay.prepare(
        *made(kind), torch.zeros(4, WIDTH), device_memory="1MiB", policy=policy, device="cpu", loss_fn=loss_of
    )


def assert_the_loops(
    ours: nn.Module, optimizer: torch.optim.Optimizer, kind: Callable[[], nn.Module], steps: int = STEPS
) -> None:
    """Losses and parameters of ``steps`` steps are those of the loop on plain PyTorch."""
    plain, its = made(kind)
    for step in range(steps):
        found = forebay.accumulate(ours, batches(step), loss_of)
        for batch, loss in zip(batches(step), found, strict=True):
            expected = loss_of(plain, batch)
            expected.backward()
            assert torch.equal(loss, expected)
        for one in (optimizer, its):
            one.step()
            one.zero_grad()
        values = forebay.parameters(ours)
        assert all(torch.equal(values[name], parameter) for name, parameter in plain.named_parameters())


@pytest.mark.thinned(2)
@pytest.mark.parametrize("policy", ["stream", "stream-recompute"])
@pytest.mark.parametrize("kind", [Handing, Asking, Remembering, Counting, Averaging, Sharing, Hooked, Once, Stack])
def test_the_numbers_are_those_of_the_loop(kind: type[Stack], policy: str) -> None:
    ours, optimizer = prepared(kind, policy)
    leaves = {Once: Leaves.ONCE, Stack: Leaves.NOTHING}.get(kind, Leaves.ALWAYS)
    needs = forebay.report(ours).plan.accumulation
    assert needs is not None and needs.leaves is leaves
    assert_the_loops(ours, optimizer, kind)
    expected = Passing.IN_TURN if leaves is Leaves.ALWAYS else Passing.TOGETHER
    assert attachment_of(ours).passing is expected
    forebay.close(ours)


def fetched(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes of parameters that come to the device in one more step."""
    forebay.synchronize(model)
    before = sum(moved(model, Lane.H2D, "fetch").values())
    forebay.accumulate(model, batches(0), loss_of)
    optimizer.step()
    optimizer.zero_grad()
    forebay.synchronize(model)
    return sum(moved(model, Lane.H2D, "fetch").values()) - before


def test_parameters_are_fetched_for_each_where_something_is_left() -> None:
    """In forward. Where only a first one leaves something, the others wait until a step has shown that."""
    found = {}
    for kind in (Stack, Once, Handing):
        ours, optimizer = prepared(kind)
        found[kind] = [fetched(ours, optimizer) for _ in range(4)]
        forebay.close(ours)
    assert found[Once][:2] == found[Handing][:2] and found[Once][3] == found[Stack][3]
    assert found[Handing][3] - found[Stack][3] == (COUNT - 1) * LAYERS * 4 * WIDTH * (WIDTH + 1)


class Late(Stack):
    """Begins to leave something in its tenth forward."""

    calls = 0  # of the class, and so nothing that is seen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        type(self).calls += 1
        x = self.through(x)
        if type(self).calls > 10:
            self.memory = x.detach().mean()
        return x


def test_what_nobody_knew_of_is_an_error_once() -> None:
    ours, optimizer = prepared(Late)
    Late.calls = 0
    assert_the_loops(ours, optimizer, Stack, steps=2)
    Late.calls = 10
    with pytest.raises(ModelError, match=r"leaves something .*\(an attribute of the model\).*begin this step anew"):
        forebay.accumulate(ours, batches(2), loss_of)
    optimizer.zero_grad()
    losses = forebay.accumulate(ours, batches(2), loss_of)
    assert len(losses) == COUNT and attachment_of(ours).passing is Passing.IN_TURN
    forebay.close(ours)


def test_what_is_left_in_front_of_the_first_block_is_seen_in_time() -> None:
    """By a plan that does not know of it."""
    ours, optimizer = forebay.prepare(*made(Handing), device_memory="1MiB", policy="stream", device="cpu")
    assert forebay.report(ours).plan.accumulation is None
    assert_the_loops(ours, optimizer, Handing)
    forebay.close(ours)
