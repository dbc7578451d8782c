"""Gradients that are views of something larger: autograd hands a parameter the part that is its; all of it stays."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import forebay
from forebay.memory import Tier
from forebay.planners import Bench
from forebay.planners.parts import RESIDENT
from forebay.planners.shapes import options, streamed_through, usual_window
from tests.null.planning import asked, machine
from tests.parity.compare import adamw

AMPLE = 64 * 2**20
WIDTH, TOKENS, LAYERS = 16, 255, 3
WHOLE = (TOKENS + 1) * WIDTH * 4
"""Bytes of the gradient of all tokens, of which that of the class token is one row."""


class Classifier(nn.Module):
    """Tokens behind one of the model's own, as in a vision transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.ModuleDict({"patches": nn.Linear(WIDTH, WIDTH)})
        self.class_token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        hidden = torch.cat([self.class_token, self.embeddings["patches"](patches)], 1)
        for layer in self.layers:
            hidden = layer(hidden).tanh()
        return hidden[:, 0].square().sum()


def batch(number: int) -> dict[str, torch.Tensor]:
    return {"patches": torch.randn(1, TOKENS, WIDTH, generator=torch.Generator().manual_seed(number))}


@pytest.fixture(params=[True, False], ids=["accumulates", "one backward a step"])
def prepared(request: pytest.FixtureRequest) -> Iterator[tuple[nn.Module, torch.optim.Optimizer]]:
    torch.manual_seed(0)
    model = Classifier()
    how = {"device_memory": AMPLE, "accumulates": request.param, "device": "cpu", "policy": "resident"}
    model, optimizer = forebay.prepare(model, adamw(list(model.parameters())), batch(0), **how)
    yield model, optimizer
    forebay.close(model)


def test_all_of_it_is_promised(prepared: tuple[nn.Module, torch.optim.Optimizer]) -> None:
    """Beside the parameters, their states and gradients and what the passes take, the promise has room for what the
    class token's gradient keeps: all tokens' but its own row."""
    model, optimizer = prepared
    plan = forebay.report(model).plan
    for step in range(3):
        for number in range(2 if plan.accumulates else 1):
            model(**batch(2 * step + number)).backward()
        token = next(p for name, p in model.named_parameters() if name == "class_token")
        assert token.grad is not None and token.grad.untyped_storage().nbytes() == WHOLE
        optimizer.step()
        optimizer.zero_grad()
    peak = forebay.report(model).timeline.peaks[Tier.DEVICE]
    assert peak == plan.device


class LateTurn(Classifier):
    """Takes the most where the gradients of its last layers are on their way."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (WIDTH, 8 * WIDTH), (8 * WIDTH, WIDTH), (WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(*size) for size in sizes)


def test_a_window_is_no_wider_than_there_is_room_for() -> None:
    """What is beside the class token's own in its gradient counts as soon as there is a window for gradients on their
    way, however narrow: where there is no room for that there is none for a window, and all else fits as it is."""
    trace = forebay.profile(LateTurn(), batch(0))

    def streamed(limit: int) -> tuple[int, int]:
        bench = Bench(asked(trace, machine(), device=limit))
        draft = streamed_through(bench, options(bench)[-1], usual_window(bench))
        return draft.streaming.gradient_window, bench.device(draft)

    beside, row = WHOLE - WIDTH * 4, WIDTH * 4
    none, least = streamed(1)
    assert none == 0
    for room in (0, row, beside):
        assert streamed(least + room) == (0, least)
    for room in (row, 8 * row):
        assert streamed(least + beside + room) == (room, least + beside + room)
    widest, most = streamed(least + 2 * WHOLE)
    assert widest == max(block.gradient_nbytes for block in trace.model.blocks)
    assert most == least + beside + widest


class Positions(nn.Module):
    """Relative positions, normalised as a whole: the gradients of the table and of its norm are made by one op."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(TOKENS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        # The norm runs before what its positions are added to, so that the most is taken behind its backward.
        near = self.norm(self.table.weight)
        hidden = (patches.repeat(1, 1, 4).tanh().view(1, -1, WIDTH)[:, :TOKENS] + near).sigmoid()
        for layer in self.layers:
            hidden = layer(hidden).tanh()
        return hidden.square().sum()


def test_an_op_may_complete_gradients_that_stay_and_gradients_that_leave() -> None:
    trace = forebay.profile(Positions(), batch(0))
    bench = Bench(asked(trace, machine(), device=AMPLE))
    draft = streamed_through(bench, options(bench)[-1], 0).placed("norm", RESIDENT)
    plan = bench.plan("stream", draft)
    assert bench.fault_of(plan) is None
