"""Masks of 1 bit in the place of what ReLU and comparisons make: the numbers stay plain PyTorch's, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import forebay
from forebay.compression import encoded_nbytes
from forebay.layout import MOVED_LEAST
from forebay.plans import Plan
from forebay.treatments import Fate, Treatment
from tests.parity.bits import bits_plan, opened
from tests.parity.models import Case
from tests.parity.offloading import movable, trace_of
from tests.parity.test_offload import counters, moved
from tests.parity.treated import SUBJECTS

RELU, GREATER = "aten.relu.default", "aten.gt.Scalar"
FATES = pytest.mark.parametrize("fate", Fate)
ROWS, WIDTH = 64, 64


def passes(case: Case, plan: Plan | None, steps: int = 2) -> tuple[list[torch.Tensor], nn.Module]:
    """Losses and gradients of steps of two micro-batches after one seed, what the generator draws next, the model."""
    model = case.model(torch.float32)
    if plan is not None:
        model, _, _ = opened(case, plan)
    torch.manual_seed(7)
    seen = []
    for step in range(steps):
        for micro in range(2):
            loss = model(**case.inputs(2 * step + micro, torch.float32))["loss"]
            loss.backward()
            seen.append(loss.detach())
        made = forebay.gradients(model) if plan is not None else {n: p.grad for n, p in model.named_parameters()}
        seen += [g.clone() for _, g in sorted(made.items()) if g is not None]
        for parameter in model.parameters():
            parameter.grad = None
    return [*seen, torch.rand(1)], model


def assert_same(case: Case, plan: Plan, kept: int) -> nn.Module:
    """Returns the prepared model, still open. ``kept`` is of one pass."""
    expected, _ = passes(case, None)
    actual, model = passes(case, plan)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    assert counters(model) == 4 * kept
    return model


@FATES
def test_relu_before_dropout(fate: Fate, tmp_path: Path) -> None:
    """T5: what ReLU has made is saved by nobody but itself."""
    case = SUBJECTS["t5-dropout"]
    named = [one for one in movable(trace_of(case, torch.float32)) if one.op == RELU]
    assert len(named) == 4
    elements = max(n for one in named for n in one.nbytes) // 4
    chosen = {one.block: [Treatment(RELU, 0, fate, bits=1)] for one in named}
    plan = bits_plan(case, chosen, elements=elements, folder=tmp_path)
    model = assert_same(case, plan, kept=0)
    if fate is not Fate.KEEP:
        expected = sorted(encoded_nbytes(n // 4, 4, 1) for one in named for n in one.nbytes)
        assert sorted(n for _, n in moved(model, "offload")) == sorted(4 * expected)
        assert sorted(moved(model, "reload")) == sorted(moved(model, "offload"))
    forebay.close(model)


class Layer(nn.Module):
    """``body`` between two products."""

    def __init__(self, body: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.after(self.body(self.before(x)))
        return made


class Layers(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = layer(x)
        return {"loss": x.square().mean()}


def batch(step: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))}


def case_of(body: Callable[[torch.Tensor], torch.Tensor]) -> Case:
    return Case(lambda: Layers(Layer(body), Layer(body)), batch)


def plan_of_all(case: Case, op: str, fate: Fate, folder: Path, *, bits: int = 1, recompute: bool = False) -> Plan:
    blocks = ["layers.0", "layers.1"]
    chosen = {block: [Treatment(op, 0, fate, bits=bits)] for block in blocks}
    again = blocks if recompute else []
    return bits_plan(case, chosen, recompute=again, elements=ROWS * WIDTH, folder=folder)


def not_a_number(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(torch.where(x > 2, torch.nan, x)).nan_to_num()


@FATES
@pytest.mark.parametrize(
    "body",
    [
        lambda x: torch.relu(x) * 0.5,
        torch.relu,  # the next product saves it too
        lambda x: torch.relu(x).sin(),
        lambda x: torch.relu(torch.relu(x)),
        lambda x: torch.relu(x).view(WIDTH, ROWS).t(),
        not_a_number,
    ],
    ids=["alone", "saved by a product", "saved by a sine", "twice", "a view is saved", "NaN"],
)
def test_relu_and_whoever_saves_it_after_it(
    body: Callable[[torch.Tensor], torch.Tensor], fate: Fate, tmp_path: Path
) -> None:
    case = case_of(body)
    forebay.close(assert_same(case, plan_of_all(case, RELU, fate, tmp_path), kept=0))


def held(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        positive = torch.relu(x)
    return x * positive


def on_cpu(x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.save_on_cpu():
        made = torch.relu(x)
    return made * made


class Own(torch.autograd.Function):
    """Saves what ReLU has made inside it, and reads its numbers."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor) -> torch.Tensor:
        made = torch.relu(x)
        ctx.save_for_backward(made)
        return made * made

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: torch.Tensor) -> torch.Tensor:
        (made,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return 2 * made * gradient


@pytest.mark.parametrize(
    "body",
    [held, on_cpu, Own.apply, lambda x: x * torch.relu(x.detach())],
    ids=["no_grad", "other hooks", "a function of the user's own", "detached"],
)
def test_relu_that_saves_nothing_here_stays_as_it_is(
    body: Callable[[torch.Tensor], torch.Tensor], tmp_path: Path
) -> None:
    case = case_of(body)
    forebay.close(assert_same(case, plan_of_all(case, RELU, Fate.KEEP, tmp_path), kept=2))


def gated(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x > 0.25, x * 3, x.sin())


@pytest.mark.parametrize("recompute", [False, True])
@FATES
def test_what_is_true_or_false(fate: Fate, recompute: bool, tmp_path: Path) -> None:
    case = case_of(gated)
    assert ROWS * WIDTH >= MOVED_LEAST
    forebay.close(assert_same(case, plan_of_all(case, GREATER, fate, tmp_path, recompute=recompute), kept=0))


@FATES
def test_relu_of_a_block_that_recomputes_stays_as_it_is(fate: Fate, tmp_path: Path) -> None:
    """What comes after it is computed again from its numbers."""
    case = case_of(lambda x: torch.relu(x).sin())
    forebay.close(assert_same(case, plan_of_all(case, RELU, fate, tmp_path, recompute=True), kept=2))


@pytest.mark.parametrize("op", ["aten.addmm.default", "aten.sin.default"])
def test_other_numbers_stay_as_they_are(op: str, tmp_path: Path) -> None:
    case = case_of(torch.sin)
    forebay.close(assert_same(case, plan_of_all(case, op, Fate.OFFLOAD, tmp_path), kept=2))


def test_integers_have_no_codes(tmp_path: Path) -> None:
    case = case_of(lambda x: x.gather(1, x.argsort(dim=1)))
    plan = plan_of_all(case, "aten.sort.default", Fate.KEEP, tmp_path, bits=8)
    # argsort makes the sorted values too, which have codes that nobody saves.
    forebay.close(assert_same(case, plan, kept=2))
