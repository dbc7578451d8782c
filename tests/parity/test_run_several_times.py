"""Models whose step runs a block several times: layers that are shared, encoders of pairs, cells. What such a block
saves is planned as that of any other."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import forebay
from forebay.errors import DoesNotFit
from forebay.memory import Tier
from tests.parity.compare import assert_same_training
from tests.parity.models import Case, albert, llama

WORDS, WIDTH = 128, 64


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)


class Looped(nn.Module):
    """Two layers, one behind the other, five times."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList([encoder(), encoder()])
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.words(input_ids)
        for _ in range(5):
            for layer in self.layers:
                x = layer(x)
        return {"loss": nn.functional.cross_entropy(self.head(x).flatten(0, 1).float(), labels.flatten())}


class Pairs(nn.Module):
    """One encoder for questions and, in longer runs, for answers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList([encoder() for _ in range(3)])

    def encoded(self, ids: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.words(ids)
        for layer in self.layers:
            x = layer(x)
        return x.mean(1)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = self.encoded(input_ids[:, :16]) @ self.encoded(labels).T
        return {"loss": nn.functional.cross_entropy(scores.float(), torch.arange(len(scores)))}


class Preferred(nn.Module):
    """A model that is called for two batches before its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.model = llama()
        del self.model.get_submodule("model.layers")[2:]  # type: ignore[attr-defined]

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        better, worse = (self.model(ids, labels=ids).loss for ids in (input_ids, labels))
        return {"loss": nn.functional.softplus(better - worse)}


class Cells(nn.Module):
    """A cell that runs for every word."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.cell = nn.GRUCell(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.words(input_ids)
        h, states = torch.zeros_like(x[:, 0]), list[torch.Tensor]()
        for step in range(x.shape[1]):
            h = self.cell(x[:, step], h)
            states.append(h)
        return {"loss": nn.functional.cross_entropy(self.head(torch.stack(states, 1)).flatten(0, 1), labels.flatten())}


class Conditioned(nn.Module):
    """Looks at its own result, which it has made without gradients; and a frozen part that looks at two things."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList([encoder() for _ in range(3)])
        self.judges = nn.ModuleList([encoder() for _ in range(2)])
        self.judges.requires_grad_(False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        def through(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
            for layer in layers:
                x = layer(x)
            return x

        x = self.words(input_ids)
        with torch.no_grad():
            first = through(self.layers, x)
        judged = through(self.judges, through(self.layers, x + first))
        wanted = through(self.judges, self.words(labels).detach())
        return {"loss": (judged - wanted).square().mean()}


class Lists(nn.Module):
    """Layers that are lists: who calls what is in them is the model."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList([nn.ModuleList([encoder(), encoder()]) for _ in range(3)])

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.words(input_ids)
        for first, second in self.layers:  # type: ignore[misc]
            x = second(x + first(x))
        return {"loss": x.square().mean()}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = encoder(), encoder()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.second(self.first(x))
        return made


class Parts(nn.Module):
    """Calls its layers, and before that a part of each by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList([Layer() for _ in range(3)])

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.words(input_ids)
        for layer in self.layers:
            x = layer(x + layer.second(x))  # type: ignore[operator]
        return {"loss": x.square().mean()}


class Own(nn.Module):
    """Has parameters of its own, and saves more than it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (
            nn.Parameter(torch.randn(shape) / 8) for shape in ((WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(x @ self.up) @ self.down


class Held(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own = Own()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.own(x)
        return made


class Alone(nn.Module):
    """Calls the one part of each layer, and never a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList([Held() for _ in range(4)])

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.words(input_ids)
        for layer in self.layers:
            x = x + layer.own(x)  # type: ignore[operator]
        return {"loss": x.square().mean()}


class Norm(nn.Module):
    """A norm written out. Its last result is the input of whoever comes next."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred * torch.rsqrt(x.var(-1, keepdim=True) + 1e-5) * self.scale + self.shift


class Normed(nn.Module):
    """One norm in two places, of which one is followed by what saves its input."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.norm, self.mixers = nn.ModuleList([Norm()]), nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.mixers[0](self.norm[0](self.mixers[1](self.words(input_ids))))
        return {"loss": (self.norm[0](x) + x).sum()}


def ids(step: int) -> dict[str, torch.Tensor]:
    """Eight sequences, and as many others."""
    made = torch.randint(0, WORDS, (2, 8, 64), generator=torch.Generator().manual_seed(step))
    return {"input_ids": made[0], "labels": made[1]}


CASES = {
    "albert": (Case(albert, lambda step: {k: v[:, :32].clone() for k, v in ids(step).items()}), 0.7),
    "looped": (Case(Looped, ids), 0.3),
    "pairs": (Case(Pairs, ids), 0.5),
    "preferred": (Case(Preferred, ids), 0.5),
    "cells": (Case(Cells, ids, (torch.float32,)), 1.0),
    "conditioned": (Case(Conditioned, ids, (torch.float32,)), 0.5),
    "lists": (Case(Lists, ids), 0.4),
    "parts": (Case(Parts, ids), 0.7),
    "alone": (Case(Alone, ids), 1.01),
}
"""Models, and the share of what everything kept takes that is enough for them. Of cells there is little to recompute:
each is as large as what comes in. A part that is called by itself does not run again: what does is a block."""

WAYS = [(name, case.dtypes[number % len(case.dtypes)]) for number, (name, (case, _)) in enumerate(CASES.items())]
OTHERS = list(
    zip(
        [name for name in CASES if name not in ("parts", "alone")],
        itertools.cycle(["recompute", "offload-all", "auto"]),
        strict=False,
    )
)


def least(case: Case, dtype: torch.dtype, policy: str) -> int:
    """Bytes of the device that ``policy`` asks for where it has none."""
    model = case.model(dtype)
    with pytest.raises(DoesNotFit) as refused:
        forebay.prepare(
            model,
            torch.optim.AdamW(model.parameters()),
            case.inputs(0, dtype),
            device_memory=1,
            policy=policy,
            loss="plain",
        )
    return refused.value.needed


@pytest.mark.thinned(18)
@pytest.mark.parametrize(("name", "dtype"), WAYS, ids=str)
def test_within_the_least(name: str, dtype: torch.dtype) -> None:
    """The same bits, no byte more than promised, and less than with everything kept."""
    case, share = CASES[name]
    needed = least(case, dtype, "auto")
    assert needed < share * least(case, dtype, "keep")
    model = assert_same_training(case, dtype, steps=2, device_memory=needed, loss="plain")
    report = forebay.report(model)
    forebay.close(model)
    assert report.measured_peaks()[Tier.DEVICE] <= report.plan.device <= needed


@pytest.mark.thinned(2)
@pytest.mark.parametrize(("name", "policy"), OTHERS)
def test_above_the_least(name: str, policy: str) -> None:
    """Where single ops are treated, too."""
    case, _ = CASES[name]
    needed = int(1.3 * least(case, torch.float32, policy))
    model = assert_same_training(case, torch.float32, steps=2, device_memory=needed, policy=policy, loss="plain")
    report = forebay.report(model)
    forebay.close(model)
    assert report.plan.recompute or report.plan.activations
    assert report.measured_peaks()[Tier.DEVICE] <= report.plan.device <= needed


@pytest.mark.parametrize("policy", ["auto", "offload-all"])
def test_a_block_for_which_every_choice_but_to_run_again_is_beaten(policy: str) -> None:
    """All that it saves may move all the same, and a policy may ask for that."""
    case = Case(Normed, ids)
    model = assert_same_training(case, torch.float32, steps=2, device_memory="4MiB", policy=policy, device="cpu")
    forebay.close(model)


@pytest.mark.parametrize("policy", ["recompute", "offload-all"])
def test_micro_batches_that_pass_together(policy: str) -> None:
    """Each run of a block is one of all of them."""
    case, _ = CASES["looped"]
    model, reference = case.model(torch.float32), case.model(torch.float32)
    batches = [case.inputs(number, torch.float32) for number in range(2)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    needed = 2 * least(case, torch.float32, policy)
    forebay.prepare(model, optimizer, batches[0], device_memory=needed, policy=policy, micro_batches=2, device="cpu")
    losses = forebay.accumulate(model, batches, lambda m, batch: m(**batch)["loss"])
    for batch, loss in zip(batches, losses, strict=True):
        expected = reference(**batch)["loss"]
        expected.backward()
        assert torch.equal(loss, expected)
    gradients = forebay.gradients(model)
    assert all(torch.equal(gradients[name], p.grad) for name, p in reference.named_parameters() if p.grad is not None)
    report = forebay.report(model)
    forebay.close(model)
    assert gradients.keys() == dict(reference.named_parameters()).keys()
    assert report.measured_peaks()[Tier.DEVICE] <= needed
