"""What forwards leave in their modules for the next ones: a mask that is made once, the state of the step before. The
first step runs other ops than the later ones; both are within the budget and have the bits of plain PyTorch, whatever
runs again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import nn

import forebay
from forebay.errors import DoesNotFit
from forebay.profiler.capture import capture

WIDTH = 64


class MakesMasks(nn.Module):
    """A mask and a bias, made when the first batch of a size comes, by ops that the layer itself runs too."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.mask: torch.Tensor | None = None
        self.register_buffer("bias", torch.zeros(1, 1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mask is None or len(self.mask) != len(x):
            self.mask = (torch.arange(len(x), dtype=x.dtype)[:, None] * 0.1).sin().tanh().add(1).clone()
            self.bias = torch.ones(len(x), 1).add(0.5).mul(2).exp().tanh()
        y = torch.tanh(self.up(x))
        return x + self.down(y * torch.sigmoid(y) * self.mask) * self.bias


class Remembers(nn.Module):
    """Computes with what it has made in the step before, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.before: torch.Tensor | None = None
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y = torch.tanh(self.linear(x)) * (1 + 1 / self.calls)
        if self.before is not None:
            y = y * torch.sigmoid(self.before)
        self.before = y.detach()
        return x + y


class Shows(nn.Module):
    """Leaves something that its forward never reads."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.shown: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.linear(x))
        self.shown = y.detach().mean(1)
        return x + y


class Normed(nn.Module):
    """A hook computes its weight anew in every forward, and keeps it in an attribute that nothing reads before."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


class Positions(nn.Module):
    """A table of biases, made when it is asked for more rows than it has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", None, persistent=False)

    def forward(self, rows: int) -> torch.Tensor:
        if self.table is None or len(self.table) < rows:
            self.table = torch.arange(rows, dtype=torch.float32)[:, None].mul(0.1).sin().tanh().sigmoid()
        table: torch.Tensor = self.table[:rows]
        return table


class Asks(nn.Module):
    """Calls the table of positions that it is handed."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, positions: nn.Module) -> torch.Tensor:
        y = torch.tanh(self.up(x))
        return x + self.down(y * torch.sigmoid(y) * positions(len(x)))


class Hands(nn.Module):
    """Hands its table of positions, or what has parameters of its own, to its layers."""

    def __init__(self, positions: nn.Module) -> None:
        super().__init__()
        self.positions = positions
        self.layers = nn.ModuleList(Asks() for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, self.positions)
        return x


class Learned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(256, 1)

    def forward(self, rows: int) -> torch.Tensor:
        table: torch.Tensor = self.table(torch.arange(rows))
        return table


class Averages(nn.Module):
    """Puts a new mean in the place of the one that it has found, as a buffer or as an attribute."""

    def __init__(self, *, buffer: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.mean: torch.Tensor
        if buffer:
            self.register_buffer("mean", torch.zeros(128, WIDTH))
        else:
            self.mean = torch.zeros(128, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = self.mean * 0.9 + x.detach() * 0.1
        return x + self.down(torch.tanh(self.up(x - self.mean)))


class Recalls(nn.Module):
    """Computes with what it was given in the step before."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.before: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x if self.before is None else x + self.before.mean(0)
        self.before = x.detach()
        return x + self.down(torch.tanh(self.up(y)))


LAYERS = (MakesMasks, Remembers, Shows, Normed, Positions, Learned)


def model(layer: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    if layer in (Positions, Learned):
        return Hands(layer())
    return nn.Sequential(*(layer() for _ in range(5)))


def batches(*sizes: int) -> list[torch.Tensor]:
    return [torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(n)) for n, size in enumerate(sizes)]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


@dataclass(frozen=True)
class Trained:
    losses: Sequence[torch.Tensor]
    weights: Sequence[torch.Tensor]

    def equals(self, other: Trained) -> bool:
        ours, others = (*self.losses, *self.weights), (*other.losses, *other.weights)
        return len(ours) == len(others) and all(map(torch.equal, ours, others))


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, given: Sequence[torch.Tensor]) -> Trained:
    losses = []
    for x in given:
        loss = model(x).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        del loss
    state = model.state_dict()
    return Trained(losses, [state[name] for name, _ in model.named_parameters()])


def least(layer: Callable[[], nn.Module], policy: str, batch: torch.Tensor) -> int:
    """Bytes of the device."""
    refused = model(layer)
    with pytest.raises(DoesNotFit) as refusal:
        forebay.prepare(refused, adamw(refused), batch, device_memory=1024, policy=policy, device="cpu")
    assert refusal.value.needed is not None
    return refusal.value.needed


@pytest.mark.thinned(8)
@pytest.mark.parametrize("room", [1.0, 1.5])
@pytest.mark.parametrize("policy", ["auto", "recompute", "offload-all", "checkmate", "capuchin", "superneurons"])
@pytest.mark.parametrize("layer", LAYERS)
def test_all_steps_are_within_the_budget(layer: Callable[[], nn.Module], policy: str, room: float) -> None:
    assert_within_the_budget(layer, policy, room)


@pytest.mark.parametrize("layer", [partial(Averages, buffer=True), partial(Averages, buffer=False), Recalls])
def test_what_is_kept_of_what_forwards_replace_is_within_the_budget(layer: Callable[[], nn.Module]) -> None:
    assert_within_the_budget(layer, "stream-recompute", 1.0)


def assert_within_the_budget(layer: Callable[[], nn.Module], policy: str, room: float) -> None:
    """``room``: how many times what is needed at least."""
    given = batches(128, 128, 128)
    plain = model(layer)
    expected = trained(plain, adamw(plain), given)
    # What is needed at least, and the losses that the loop keeps.
    allowed = int(room * least(layer, policy, given[0])) + 4 * len(given)
    ours = model(layer)
    ours, optimizer = forebay.prepare(ours, adamw(ours), given[0], device_memory=allowed, policy=policy, device="cpu")
    assert trained(ours, optimizer, given).equals(expected)
    forebay.close(ours)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("policy", ["recompute", "checkmate", "superneurons"])
@pytest.mark.parametrize("layer", [MakesMasks, Positions])
def test_what_is_made_anew_for_another_size_is_made_anew_when_it_runs_again(
    layer: Callable[[], nn.Module], policy: str
) -> None:
    given = batches(128, 96, 96, 160)
    plain = model(layer)
    expected = trained(plain, adamw(plain), given)
    ours = model(layer)
    ours, optimizer = forebay.prepare(ours, adamw(ours), given[0], device_memory="64MiB", policy=policy, device="cpu")
    assert trained(ours, optimizer, given).equals(expected)
    forebay.close(ours)


def test_what_runs_again_counts_once() -> None:
    (x,) = batches(128)
    counted = model(Remembers)
    prepared, _ = forebay.prepare(counted, adamw(counted), x, device_memory="64MiB", policy="recompute", device="cpu")
    prepared(x).square().mean().backward()
    assert [layer.calls for layer in counted.modules() if isinstance(layer, Remembers)] == [1] * 5
    forebay.close(prepared)


def test_the_first_step_is_an_extreme_of_the_later_ones() -> None:
    (x,) = batches(128)
    made = capture(model(MakesMasks), x).trace
    (first,) = made.extremes
    ops = [sum(len(trace.segments[visit.segment].ops) for visit in trace.visits) for trace in (made, first)]
    assert ops[0] < ops[1]
    assert capture(model(Shows), x).trace.extremes == ()
