"""What decides and is not known beforehand: numbers that are drawn, checks, and answers that a loss matches."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import linear_sum_assignment
from torch import nn

import forebay
from forebay.errors import CaptureFailed, DoesNotFit
from forebay.memory import Tier
from forebay.profiler.capture import capture
from forebay.profiler.granted import CHECKED, DECIDED, DRAWN, MADE_UP, MASKED
from forebay.profiler.guesses import Draw
from forebay.profiler.host_draws import STEERED, steer
from forebay.runtime.generators import drawn_from
from forebay.trace import Trace
from tests.parity.capture_rig import real_peak, traced_peak
from tests.parity.compare import assert_same_training, stepped
from tests.parity.models import Case

WIDTH, LAYERS, ROWS, TARGETS = 32, 4, 24, 5

Forward = Callable[["Deciding", torch.Tensor, torch.Generator], torch.Tensor]


class Deciding(nn.Module):
    """Layers, of which ``forward_by`` runs as many as it likes; what it draws is the same for the same ``seed``."""

    def __init__(self, forward_by: Forward) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.halves = [torch.full((WIDTH,), 0.5) for _ in range(LAYERS)]  # neither parameters nor buffers
        self.forward_by = forward_by

    def forward(self, x: torch.Tensor, seed: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.forward_by(self, x, torch.Generator().manual_seed(int(seed)))}

    def through(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` behind all layers."""
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x


def batch(number: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(number)
    return {"x": torch.randn(ROWS, WIDTH, generator=draw), "seed": torch.tensor(number)}


def some_left_out(model: Deciding, x: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    for layer, half in zip(model.layers, model.halves, strict=True):
        if torch.rand([], generator=draw) < 0.5:
            continue
        x = x + half * layer(x).tanh()
    return (x * model.layers[0].weight.sum()).square().mean()


def left_out_by_python(model: Deciding, x: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    return through_some(model, x, random.random)


def left_out_by_numpy(model: Deciding, x: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    return through_some(model, x, np.random.uniform)


def through_some(model: Deciding, x: torch.Tensor, drawn: Callable[[], float]) -> torch.Tensor:
    for layer in model.layers:
        if drawn() >= 0.5:
            x = x + layer(x).tanh()
    return (x * model.layers[0].weight.sum()).square().mean()


def sometimes_twice(model: Deciding, x: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    x = model.through(x)
    if torch.empty(1).uniform_(-1, 1, generator=draw) < 0:
        x = model.through(x)
    return x.square().mean()


def up_to_three_times(model: Deciding, x: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    for _ in range(int(torch.randint(1, 4, (1,), generator=draw))):
        x = model.through(x)
    return x.square().mean()


def tried_first(model: Deciding, x: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    """As self-conditioning has it: what a first try without gradients makes goes in with some batches."""
    tried = torch.zeros_like(x)
    if torch.rand([], generator=draw) < 0.5:
        with torch.no_grad():
            tried = model.through(x)
    return model.through(x + tried).square().mean()


def checked(model: Deciding, x: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    x = model.through(x)
    if x.isinf().any() or x.isnan().any():
        x = torch.clamp(x, -1, 1)
    if not (x.abs() < 1e4).all():
        raise ValueError("values are out of their range")
    return x.square().mean()


def matched(model: Deciding, x: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    targets = torch.randn(TARGETS, WIDTH, generator=draw)
    answers = model.through(x)
    with torch.no_grad():
        cost = torch.cdist(answers, targets).cpu()
    rows, columns = (torch.as_tensor(places) for places in linear_sum_assignment(cost))
    return (answers[rows] - targets[columns]).square().mean()


def some_missing(model: Deciding, x: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    """Ways to leave elements out."""
    there = x.abs() < 1
    x = model.through(x)
    if torch.equal(x, x.round()):
        raise ValueError("floats are no whole numbers")
    chosen = [x[there], x[~there], torch.masked_select(x, there[:1]), x[there.nonzero(as_tuple=True)]]
    for values in chosen:
        x = x + values.tanh().square().mean()
    return x.square().mean()


def either_way(model: Deciding, x: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    behind = model.through(x)
    if x.mean() > 0:
        behind = model.through(behind)
    if torch.isnan(behind).sum() > 0:
        raise ValueError("not a number")
    if behind.square().mean().item() > 0.5:
        behind = torch.cat([behind, behind * 2])
    return behind.square().mean()


def only_one_way(model: Deciding, x: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    x = model.through(x)
    if x.isnan().sum() > 0:
        raise ValueError("not a number")
    if not x.mean().isfinite().item():
        raise ValueError(f"{x.max().item()} is too large")
    return x.square().mean()


ELSEWHERE = (left_out_by_python, left_out_by_numpy)
DRAWING = (some_left_out, sometimes_twice, up_to_three_times)
DECISIONS = (*DRAWING, checked, matched)


def traced(forward: Forward) -> Trace:
    return capture(Deciding(forward), batch(0)).trace


@pytest.mark.thinned(3)
@pytest.mark.parametrize("forward", [*DECISIONS, some_missing, either_way, only_one_way])
def test_it_trains_within_what_is_asked_for(forward: Forward) -> None:
    case = Case(lambda: Deciding(forward), batch, (torch.float32,))
    with pytest.raises(DoesNotFit) as refused:
        assert_same_training(case, torch.float32, device_memory="4KiB", device="cpu")
    needed = refused.value.needed
    model = assert_same_training(case, torch.float32, device_memory=needed, device="cpu", steps=8)
    assert forebay.report(model).timeline.peaks[Tier.DEVICE] <= needed
    forebay.close(model)


@pytest.mark.parametrize("policy", ["offload-all", "swapadvisor"])
def test_a_policy_that_moves_activations_asks_for_enough_of_either_way(policy: str) -> None:
    """Ops of layers that run without gradients first, in one of the two, have no names there."""

    def model() -> nn.Module:
        made = Deciding(tried_first)
        inner = (nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, WIDTH)) for _ in range(LAYERS))
        made.layers = nn.ModuleList(inner)
        return made

    case, how = Case(model, batch, (torch.float32,)), {"policy": policy, "device": "cpu"}
    with pytest.raises(DoesNotFit) as refused:
        assert_same_training(case, torch.float32, device_memory="48KiB", **how)
    needed = refused.value.needed
    assert needed > refused.value.allowed
    trained = assert_same_training(case, torch.float32, device_memory=needed, steps=4, **how)
    assert forebay.report(trained).timeline.peaks[Tier.DEVICE] <= needed
    forebay.close(trained)


def seeded(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@pytest.mark.parametrize("forward", ELSEWHERE)
def test_what_python_and_numpy_draw_trains_within_what_is_asked_for(forward: Forward) -> None:
    def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        seeded(1)
        return stepped(optimizer, (model(**batch(number))["loss"] for number in range(8)))

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = Deciding(forward)
        return model, torch.optim.AdamW(model.parameters(), fused=True)

    expected = trained(*made())
    with pytest.raises(DoesNotFit) as refused:
        forebay.prepare(*made(), batch(0), device_memory="4KiB", device="cpu")
    needed = refused.value.needed + 4  # and the loss of the step before
    model, optimizer = forebay.prepare(*made(), batch(0), device_memory=needed, device="cpu")
    assert trained(model, optimizer) == expected
    assert forebay.report(model).timeline.peaks[Tier.DEVICE] <= needed
    forebay.close(model)


def test_what_trains_nothing_is_no_extreme() -> None:
    """With all layers left out there is no backward, here and in plain PyTorch."""

    def squared(model: Deciding, x: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
        return model.through(x).square().mean()

    def all_left_out(model: Deciding, x: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
        return squared(model, x, draw) if random.random() >= 0.5 else x.square().mean()

    trace = traced(all_left_out)
    assert not trace.extremes and traced_peak(trace) == real_peak(Deciding(squared), batch(0))


@pytest.mark.parametrize("forward", [*DECISIONS, *ELSEWHERE])
def test_no_step_takes_more_than_the_traces(forward: Forward) -> None:
    torch.manual_seed(0)
    trace, model = traced(forward), Deciding(forward)
    most = max(traced_peak(one) for one in trace.routings)
    taken = set()
    for number in range(24):
        seeded(number)
        taken.add(real_peak(model, batch(number)))
    assert max(taken) == most
    # Which of them it is, is drawn.
    assert (len(taken) > 1) == (forward in (*DRAWING, *ELSEWHERE))


def test_masks_take_no_more_than_all_elements() -> None:
    torch.manual_seed(0)
    (trace,), model = traced(some_missing).routings, Deciding(some_missing)
    taken = [real_peak(model, batch(number)) for number in range(8)]
    assert len(set(taken)) > 1
    assert max(taken) <= traced_peak(trace)
    all_there = {"x": torch.zeros(ROWS, WIDTH), "seed": torch.tensor(0)}
    # Both a mask and its opposite are taken to choose all, here.
    assert real_peak(model, all_there) < traced_peak(trace) < 2 * real_peak(model, all_there)


@pytest.mark.parametrize(
    ("forward", "notes"),
    [
        *((forward, [DRAWN]) for forward in (*DRAWING, *ELSEWHERE)),
        (checked, [CHECKED]),
        (some_missing, [CHECKED, MASKED]),
        (matched, [MADE_UP]),
        (only_one_way, [DECIDED]),
        (lambda model, x, draw: model.through(x).sum() * torch.rand((), generator=draw), []),
        (lambda model, x, draw: model.through(x).sum() * random.random() * np.random.random(), []),
    ],
)
def test_what_is_taken_for_granted_is_said(forward: Forward, notes: list[str]) -> None:
    assert list(traced(forward).notes) == notes


def test_a_check_hides_no_way() -> None:
    """What raises an error the one way leaves both ways open for what else is asked."""
    torch.manual_seed(0)
    trace, model = traced(either_way), Deciding(either_way)
    most = max(traced_peak(one) for one in trace.routings)
    up = {"x": torch.full((ROWS, WIDTH), 9.0), "seed": torch.tensor(0)}
    down = {"x": torch.full((ROWS, WIDTH), -1e-3), "seed": torch.tensor(0)}
    assert real_peak(model, down) < real_peak(model, up) == most


def test_what_only_one_way_reads_outside_is_known() -> None:
    def seldom_tied(model: Deciding, x: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
        *layers, last = model.layers
        for layer in layers:
            x = x + layer(x).tanh()
        if torch.rand([], generator=draw) < 0.5:
            return (x @ last.weight).square().mean()
        return last(x).square().mean()

    case = Case(lambda: Deciding(seldom_tied), batch, (torch.float32,))
    forebay.close(assert_same_training(case, torch.float32, device_memory="1MiB", device="cpu", policy="stream"))
    assert len(traced(seldom_tied).extremes) == 1


def until_small(model: Deciding, x: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    while x.abs().max() > 1:
        x = model.through(x)
    return x.square().mean()


def of_a_size(model: Deciding, x: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    return model.through(x[: int(x.abs().sum().item())]).square().mean()


@pytest.mark.parametrize("forward", [until_small, of_a_size])
def test_what_floats_decide_otherwise_is_not_guessed(forward: Forward) -> None:
    with pytest.raises(CaptureFailed, match=r"depends on the values of a tensor: aten\._local_scalar_dense"):
        traced(forward)


def highest_and_lowest() -> tuple[float, ...]:
    return (*(random.random() for _ in range(STEERED)), *np.random.random(STEERED))


def test_python_and_numpy_draw_what_is_asked_for_and_then_any_numbers() -> None:
    """Whoever draws again until a number is another one comes to an end."""
    with drawn_from(0):
        has_drawn = steer(Draw.HIGHEST)
        assert not has_drawn()
        assert set(highest_and_lowest()) == {1 - 2**-53}
        assert has_drawn()
        steer(Draw.LOWEST)
        assert set(highest_and_lowest()) == {0.0}
        assert len(set(highest_and_lowest())) == 2 * STEERED
        steer(Draw.LOWEST)
        assert random.normalvariate(0, 1) != random.normalvariate(0, 1)
        for draw in (random.random, np.random.random):
            has_drawn = steer(Draw.HIGHEST)
            draw()
            assert has_drawn()


def drawn() -> tuple[Any, ...]:
    return random.random(), np.random.random(), float(torch.rand(()))


def test_nobody_draws_other_numbers_for_it() -> None:
    def everywhere(model: Deciding, x: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
        return model.through(x).mean() * sum(drawn())

    model = Deciding(everywhere)
    seeded(1)
    expected = drawn()
    seeded(1)
    optimizer = torch.optim.AdamW(model.parameters())
    prepared, _ = forebay.prepare(model, optimizer, batch(0), device_memory="1MiB", device="cpu")
    assert drawn() == expected
    forebay.close(prepared)
