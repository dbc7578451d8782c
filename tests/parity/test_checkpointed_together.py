"""Checkpoints of the model's own around several blocks, whose parameters are there together when they run again."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import forebay
from forebay.checking import check
from forebay.errors import CannotServe, DoesNotFit, PlanInvalid
from forebay.memory import Tier
from forebay.trace import Trace
from tests.null.strategies import roomy, roomy_machine
from tests.parity.compare import stepped

WIDTH, LAYERS, STEPS = 32, 6, 3


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Model(nn.Module):
    """``size`` layers to a checkpoint, the last ones to none."""

    def __init__(self, size: int, *, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 4)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.size, self.reentrant = size, reentrant

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.first(x)
        for start in range(0, LAYERS, self.size):
            through = partial(self.through, layers=self.layers[start : start + self.size])
            last = start + self.size >= LAYERS
            x = through(x) if last else checkpoint(through, x, use_reentrant=self.reentrant)
        return {"loss": nn.functional.cross_entropy(self.head(x), y)}

    def through(self, x: torch.Tensor, layers: nn.ModuleList) -> torch.Tensor:
        """``x`` behind ``layers``, with ops between them."""
        for layer in layers:
            x = layer(x) * 0.5 + x
        return x


def batch() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {"x": torch.randn(16, 8, generator=draw), "y": torch.randint(0, 4, (16,), generator=draw)}


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    return stepped(optimizer, (model(**batch())["loss"] for _ in range(STEPS)))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def beside(trace: Trace) -> dict[str, tuple[str, ...]]:
    return {block.name: block.beside for block in trace.model.blocks if block.beside}


@pytest.mark.thinned(2)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("policy", ["auto", "stream", "stream-recompute"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_they_train_within_the_least_budget(size: int, policy: str, *, reentrant: bool) -> None:
    plain = Model(size, reentrant=reentrant)
    expected = trained(plain, adamw(plain))
    model = Model(size, reentrant=reentrant)
    with pytest.raises(DoesNotFit) as refused:
        forebay.prepare(model, adamw(model), batch(), device_memory=1024, policy=policy, device="cpu")
    needed = refused.value.needed + 4  # and the loss of the step before
    model, optimizer = forebay.prepare(model, adamw(model), batch(), device_memory=needed, policy=policy, device="cpu")
    assert trained(model, optimizer) == expected
    report = forebay.report(model)
    assert len(report.plan.streaming.slots) >= size
    assert report.timeline.peaks[Tier.DEVICE] <= needed
    values = model.state_dict()
    assert all(torch.equal(values[name], value) for name, value in plain.state_dict().items())
    forebay.close(model)


@pytest.mark.parametrize("reentrant", [False, True])
def test_it_is_known_which_run_again_together(*, reentrant: bool) -> None:
    threes = forebay.profile(Model(3, reentrant=reentrant), batch(), device="cpu")
    first = [f"layers.{i}" for i in range(3)]
    assert beside(threes) == {name: tuple(n for n in first if n != name) for name in first}
    assert not beside(forebay.profile(Model(1, reentrant=reentrant), batch(), device="cpu"))


def test_so_it_is_in_a_checkpoint_of_modules_in_a_row() -> None:
    class Rows(Model):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
            x = checkpoint_sequential(self.layers, 3, self.first(x), use_reentrant=False)
            return {"loss": nn.functional.cross_entropy(self.head(x), y)}

    trace = forebay.profile(Rows(1, reentrant=False), batch(), device="cpu")
    pairs = {f"layers.{i}": (f"layers.{i ^ 1}",) for i in range(4)}
    assert beside(trace) == pairs


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_second_run_that_ends_in_the_middle(*, reentrant: bool, error: type[BaseException]) -> None:
    """The next step is as if it had not been."""
    plain = Model(1, reentrant=reentrant)
    expected = trained(plain, adamw(plain))
    model = Model(1, reentrant=reentrant)
    model, optimizer = forebay.prepare(model, adamw(model), batch(), device_memory="100KiB", device="cpu")
    calls = []

    def failing(module: nn.Module, args: object, output: object) -> None:
        calls.append(module)
        if len(calls) == 2:
            raise error("in the middle")

    handle = model.layers[2].up.register_forward_hook(failing)
    loss = model(**batch())["loss"]
    with pytest.raises(error, match="in the middle"):
        loss.backward()
    handle.remove()
    del loss
    optimizer.zero_grad()
    assert trained(model, optimizer) == expected
    forebay.close(model)


class Functional(Model):
    """Reads parameters of layers without calling them."""

    def through(self, x: torch.Tensor, layers: nn.ModuleList) -> torch.Tensor:
        for layer in layers:
            x = nn.functional.linear(nn.functional.linear(x, layer.up.weight), layer.down.weight) + x
        return x


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_one_that_reads_what_may_be_elsewhere_is_refused_with_what_to_do(size: int, *, reentrant: bool) -> None:
    """Where its parameters are needed again, no module says so."""
    model = Functional(size, reentrant=reentrant)
    with pytest.raises(CannotServe, match=r"reads them itself, .* call the module .* or give device_memory") as refused:
        forebay.prepare(model, adamw(model), batch(), device_memory="150KiB", device="cpu")
    (remedy,) = refused.value.nearest
    plain = Functional(size, reentrant=reentrant)
    expected = trained(plain, adamw(plain))
    model, optimizer = forebay.prepare(model, adamw(model), batch(), device_memory=remedy.needed + 4, device="cpu")
    assert trained(model, optimizer) == expected
    forebay.close(model)


def test_a_plan_with_too_few_slots_is_refused() -> None:
    trace = forebay.profile(Model(3, reentrant=False), batch(), device="cpu")
    plan = roomy(trace, slots=3)
    check(trace, roomy_machine(), plan)
    few = replace(plan, streaming=replace(plan.streaming, slots=plan.streaming.slots[:2], prefetch_distance=0))
    with pytest.raises(PlanInvalid, match=r"runs blocks layers\.0, .*again together, in a checkpoint of its own"):
        check(trace, roomy_machine(), few)
