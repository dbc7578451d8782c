"""Every published planner for activations trains a GPT-2-, a Llama-, a T5- and a ResNet-shaped model with the loss
and the gradients of plain PyTorch, bit for bit, within its budget of the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import nn

import forebay
from forebay.errors import CannotServe, DoesNotFit
from forebay.memory import Tier
from forebay.planners import LITERATURE, Bench, make_plan
from forebay.plans import Plan
from tests.null.planning import asked, machine
from tests.parity.compare import adamw
from tests.parity.models import CASES, Case, WithLoss, images
from tests.parity.offloading import larger, trace_of
from tests.parity.recomputing import AMPLE

SHARE = 0.6
"""Of what activations take beside all parameters; who needs more is given what it asks for."""


class Residual(nn.Module):
    """Two convolutions with norms around a shortcut, as in ResNet."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm_too = nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.norm_too(self.second(self.norm(self.first(x)).relu()))).relu()


def _resnet() -> nn.Module:
    layers = [nn.Conv2d(3, 16, 3, padding=1), *[Residual(16) for _ in range(3)], nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return WithLoss(nn.Sequential(*layers, nn.Linear(16, 4)))


SHAPES: Mapping[str, Case] = {
    **{name: larger(CASES[name], 2) for name in ("gpt2", "llama", "t5")},
    "resnet": Case(_resnet, images),
}

NO_ATTENTION = {(policy, "resnet") for policy in ("selective", "distflashattn", "loongtrain")}


@dataclass(frozen=True)
class Run:
    """What a step has given: loss, gradients, and bytes by tier, those that were taken and those that were promised."""

    loss: torch.Tensor
    gradients: Mapping[str, torch.Tensor]
    peaks: Mapping[Tier, int]
    promised: Mapping[Tier, int]


@dataclass(frozen=True)
class Shape:
    """A model and its step, with the loss and the gradients of plain PyTorch. ``device`` bytes are between what
    parameters and states take and ``everything``. ``runs`` are those of plans so far."""

    name: str
    case: Case
    bench: Bench
    device: int
    everything: int
    loss: torch.Tensor
    gradients: Mapping[str, torch.Tensor]
    runs: dict[Plan, Run] = field(default_factory=dict)


@pytest.fixture(scope="module", params=SHAPES)
def shape(request: pytest.FixtureRequest) -> Shape:
    case = SHAPES[request.param]
    trace = trace_of(case, torch.float32)
    bench = Bench(asked(trace, machine(kind="cpu"), device=AMPLE, host=AMPLE))
    everything = make_plan(bench.problem, "resident", bench).device
    standing = 4 * sum(block.nbytes for block in trace.model.blocks)
    device = standing + round(SHARE * (everything - standing))
    model = case.model(torch.float32)
    loss = model(**case.inputs(0, torch.float32))["loss"]
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Shape(request.param, case, bench, device, everything, loss.detach(), gradients)


def planned(shape: Shape, policy: str, device: int) -> Plan:
    problem = asked(shape.bench.costs.trace, shape.bench.costs.machine, device=device, host=AMPLE)
    return make_plan(problem, policy, shape.bench.with_limits(problem))


@pytest.mark.thinned(16)
@pytest.mark.parametrize("policy", LITERATURE)
def test_it_trains_with_the_same_numbers(shape: Shape, policy: str) -> None:
    if (policy, shape.name) in NO_ATTENTION:
        with pytest.raises(CannotServe, match=f"policy {policy} .*attention"):
            planned(shape, policy, shape.device)
        return
    try:
        plan = planned(shape, policy, shape.device)
    except DoesNotFit as refused:
        plan = planned(shape, policy, refused.needed)
    assert plan.planner == policy and (plan.recompute or plan.activations) and plan.device < shape.everything
    run = _trained(shape, plan)
    assert torch.equal(run.loss, shape.loss)
    assert run.gradients.keys() == shape.gradients.keys()
    assert all(torch.equal(run.gradients[name], gradient) for name, gradient in shape.gradients.items())
    assert run.peaks[Tier.DEVICE] <= run.promised[Tier.DEVICE] <= plan.budget.device
    assert run.peaks[Tier.HOST] <= run.promised[Tier.HOST]


def _trained(shape: Shape, plan: Plan) -> Run:
    """A step under ``plan``. Policies that decide the same are run once: a run does not know who has decided."""
    same = replace(plan, planner="whoever", reasons=(), budget=shape.bench.problem.budget)
    if same not in shape.runs:
        model = shape.case.model(torch.float32)
        optimizer = adamw(list(model.parameters()))
        on = {"device_memory": plan.budget.device, "host_memory": AMPLE, "plan": plan, "device": "cpu"}
        model, optimizer = forebay.prepare(model, optimizer, **on)
        loss = model(**shape.case.inputs(0, torch.float32))["loss"]
        loss.backward()
        gradients = {name: gradient.clone() for name, gradient in forebay.gradients(model).items()}
        optimizer.step()
        report = forebay.report(model)
        forebay.close(model)
        shape.runs[same] = Run(loss.detach(), gradients, report.measured_peaks(), report.predicted_peaks())
    return shape.runs[same]
