"""A model under forebay beside a loop in plain PyTorch, both with clipping, two parameter groups and a schedule.

For updates that are not those of the step: the loop is a ``Reference``, which says when what is applied.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeVar, final

import torch
from torch import nn

import forebay
from forebay.device.base import Delays
from forebay.device.cpu import CpuDevice
from forebay.plans import Plan
from tests.parity.models import CASES, Case
from tests.parity.recomputing import AMPLE
from tests.parity.speculating import two_groups

__all__ = ["Reference", "Scheduled", "assert_same", "decay", "passed", "train"]

R = TypeVar("R", bound="Reference")


def decay(step: int) -> float:
    """What the learning rates are multiplied by."""
    return 1 / (1 + step)


class Reference(ABC):
    """The specification. 16-bit parameters have fp32 masters, as under forebay. torch's fused AdamW does the updates:
    forebay's kernels have its bits."""

    def __init__(self, case: Case, dtype: torch.dtype) -> None:
        self.model = case.model(dtype)
        self.optimizer = two_groups(self.model, fused=True)
        self.rates = [group["lr"] for group in self.optimizer.param_groups]
        names = {id(p): n for n, p in self.model.named_parameters()}
        self.pairs: list[tuple[str, nn.Parameter, nn.Parameter]] = []
        for group in self.optimizer.param_groups:
            masters = [nn.Parameter(p.detach().float().clone(), p.requires_grad) for p in group["params"]]
            triples = zip(group["params"], masters, strict=True)
            self.pairs += [(names[id(p)], p, master) for p, master in triples]
            group["params"] = masters

    @abstractmethod
    def step(self) -> None:
        """What is applied at the end of a step."""

    @abstractmethod
    def show(self) -> None:
        """Applies all that waits."""

    @torch.no_grad()
    def update(self, rates: list[float]) -> None:
        """Applies the gradients of the masters."""
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        self.optimizer.step()
        for _, parameter, master in self.pairs:
            parameter.copy_(master)


@final
class Scheduled:
    """A model under forebay, with a schedule of its learning rates."""

    def __init__(self, name: str, plan: Plan, dtype: torch.dtype, delays: Delays | None = None, **more: Any) -> None:
        case = CASES[name]
        self.device = CpuDevice(AMPLE, delays=delays)
        model = case.model(dtype)
        self.model, self.optimizer = forebay.prepare(
            model,
            two_groups(model, fused=True),
            case.inputs(0, dtype),
            plan=plan,
            device_memory=AMPLE,
            device=self.device,
            **more,
        )
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, decay)

    def step(self) -> None:
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()

    def close(self) -> None:
        forebay.close(self.model)
        self.device.close()


def passed(model: nn.Module, case: Case, dtype: torch.dtype, step: int, micro_batches: int = 2) -> list[torch.Tensor]:
    """The losses of a step before its update, and the norm of what has been added up, clipped."""
    found = []
    for micro in range(micro_batches):
        loss = model(**case.inputs(micro_batches * step + micro, dtype))["loss"]
        loss.backward()
        found.append(loss.detach())
    found.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
    return found


def assert_same(run: Scheduled, reference: Reference) -> None:
    """Parameters, their masters and the states, with every update."""
    reference.show()
    saved = run.model.state_dict()
    for name, value in reference.model.state_dict().items():
        assert torch.equal(saved[name], value), name
    masters = forebay.parameters(run.model)
    for name, _, master in reference.pairs:
        assert torch.equal(masters[name], master), name
    order = [p for group in run.optimizer.param_groups for p in group["params"]]
    states = run.optimizer.state_dict()["state"]
    for index, (_, _, master) in zip(range(len(order)), reference.pairs, strict=True):
        for key, value in reference.optimizer.state[master].items():
            assert torch.equal(states[index][key], value), (index, key)


def train(
    run: Scheduled,
    reference: R,
    case: Case,
    dtype: torch.dtype,
    steps: int,
    between: Callable[[int, Scheduled, R], None] = lambda step, run, reference: None,
) -> None:
    """Both side by side, compared in every step and behind the last; ``between`` is called behind every step. Closes
    ``run``."""
    try:
        for step in range(steps):
            expected, found = (passed(one.model, case, dtype, step) for one in (reference, run))
            assert all(map(torch.equal, found, expected)), (step, found, expected)
            reference.step()
            run.step()
            between(step, run, reference)
        assert_same(run, reference)
    finally:
        run.close()
