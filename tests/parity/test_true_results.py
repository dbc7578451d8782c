"""Ops whose results have other bytes than fake tensors say: a trace has those of the op, and the least budget holds."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import forebay
from forebay.errors import DoesNotFit
from forebay.memory import Tier
from forebay.profiler.capture import capture
from tests.parity.capture_rig import real_peak, traced_peak
from tests.parity.compare import adamw

CHANNELS, SIDE = 4, 8
Batch = dict[str, torch.Tensor]


class Net(nn.Module):
    """A few times a 1 by 1 convolution, and what ``make`` makes behind it."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 1), make()) for _ in range(3))

    def forward(self, x: torch.Tensor) -> Batch:
        for layer in self.layers:
            x = layer(x)
        return {"loss": x.float().square().mean()}


class Overlapping(nn.Module):
    """Averages over overlapping patches: of what is unfolded and folded again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        patches = F.unfold(x, 3, padding=1)
        return F.fold(patches / 9, (SIDE, SIDE), 3, padding=1)


class Halved(nn.Module):
    """Every other pixel, and as many zeros: fewer are unfolded than there are."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        some = F.unfold(x, 1, stride=2).view(*x.shape[:2], SIDE // 2, SIDE // 2)
        return F.pad(some.sin(), (0, SIDE // 2, 0, SIDE // 2))


class InPlace(nn.Module):
    """``change`` writes to what a layer makes, a view of all of another tensor for more than two dimensions; and a head
    whose backward takes less."""

    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor], layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first, self.layer, self.change, self.head = line(), layer(), change, nn.Linear(SIDE, 1)

    def forward(self, x: torch.Tensor) -> Batch:
        x = self.first(x)
        return {"loss": self.head(x + self.change(self.layer(x))).sum()}


def line() -> nn.Module:
    return nn.Linear(SIDE, SIDE)


class Turned(nn.Module):
    """The result of a convolution, its dimensions in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv2d(CHANNELS, CHANNELS, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.inner(x)
        return made.transpose(2, 3)


def upper(x: torch.Tensor) -> torch.Tensor:
    """A part of ``x`` is written to, all of it is read."""
    x[..., 1:].tanh_()
    return x


def lower(x: torch.Tensor) -> torch.Tensor:
    """A part of ``x`` is written to, and read."""
    return F.pad(x[..., 1:].tanh_(), (1, 0))


def unread(x: torch.Tensor) -> torch.Tensor:
    """What is written to is not read again; a view of it is."""
    other = x.flatten(2)
    x.tanh_()
    return other.view_as(x)


class Bags(nn.Module):
    """Embeddings of bags of words, the last offset given too, and a layer."""

    def __init__(self, mode: str, *, trained: bool) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(10, 2, mode=mode, include_last_offset=True, padding_idx=1)
        self.words.requires_grad_(trained)
        self.head = nn.Linear(2, 2)

    def forward(self, words: torch.Tensor, offsets: torch.Tensor) -> Batch:
        return {"loss": self.head(self.words(words, offsets)).square().mean()}


def pixels() -> Batch:
    return {"x": torch.randn(2, CHANNELS, SIDE, SIDE, generator=torch.Generator().manual_seed(0))}


def words() -> Batch:
    return {"words": torch.arange(400) % 10, "offsets": torch.arange(0, 401, 4)}


AUTOCAST: dict[str, Callable[[], nn.Module]] = {
    "layer-norm": lambda: nn.LayerNorm(SIDE),
    "group-norm": lambda: nn.GroupNorm(2, CHANNELS),
    "batch-norm": lambda: nn.BatchNorm2d(CHANNELS),
    "batch-norm-alone": lambda: nn.BatchNorm2d(CHANNELS, affine=False),
}
PLAIN: dict[str, Callable[[], nn.Module]] = {"fold": Overlapping, "unfold": Halved, "rrelu": nn.RReLU}

IN_PLACE: dict[str, Callable[[], nn.Module]] = {
    "relu": lambda: InPlace(torch.relu_, line),
    "dropout": lambda: InPlace(lambda x: F.dropout(x, 0.5, inplace=True), line),
    "twice": lambda: InPlace(lambda x: x.mul_(2).tanh_(), line),
    "turned": lambda: InPlace(torch.tanh_, Turned),
    "upper": lambda: InPlace(upper, line),
    "lower": lambda: InPlace(lower, line),
    "unread": lambda: InPlace(unread, line),
    "no view": lambda: InPlace(torch.relu_, lambda: nn.Conv2d(CHANNELS, CHANNELS, 1)),
}

BAGS = tuple(f"bag-{mode}{kind}" for mode in ("sum", "mean", "max") for kind in ("", "-frozen"))


def case(name: str) -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    if name.startswith("bag"):
        return Bags(name.split("-")[1], trained=not name.endswith("frozen")), words()
    return IN_PLACE[name]() if name in IN_PLACE else Net((AUTOCAST | PLAIN)[name]), pixels()


def autocast(name: str) -> contextlib.AbstractContextManager[object]:
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=name in AUTOCAST)


@pytest.mark.parametrize("name", [*AUTOCAST, *PLAIN, *IN_PLACE, *BAGS])
def test_a_trace_has_the_bytes_of_a_step(name: str) -> None:
    model, batch = case(name)
    with autocast(name):
        trace = capture(model, batch).trace
    assert traced_peak(trace) == real_peak(model, batch, autocast=name in AUTOCAST)


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("layer-norm", "stream"),
        ("fold", "stream"),
        ("rrelu", "offload-all"),
        ("relu", "keep"),
        ("bag-mean", "stream-recompute"),
    ],
)
def test_the_least_device_memory_is_enough(name: str, policy: str) -> None:
    def prepared(budget: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model, batch = case(name)
        with autocast(name):
            return forebay.prepare(
                model, adamw(list(model.parameters())), batch, device_memory=budget, policy=policy, device="cpu"
            )

    with pytest.raises(DoesNotFit) as refused:
        prepared(64)
    model, optimizer = prepared(refused.value.needed)
    for _ in range(2):
        with autocast(name):
            loss = model(**case(name)[1])["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        del loss
    assert forebay.report(model).timeline.peaks[Tier.DEVICE] <= refused.value.needed
    forebay.close(model)
