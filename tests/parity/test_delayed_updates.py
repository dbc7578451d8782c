"""Delayed updates are a loop in plain PyTorch that applies each step's gradients one step late, bit for bit.

The reference is that loop: what it takes from a step are its gradients, after clipping, and its learning rates; it
applies them at the end of the next step. torch's fused AdamW does the updates: forebay's kernels have its bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn

import forebay
from forebay.budgets import Budget
from forebay.device.base import Delays
from forebay.device.cpu import CpuDevice
from forebay.device.delays import RandomDelays
from forebay.errors import UsageError
from forebay.lowering import lower
from forebay.plans import Plan
from forebay.timeline import Lane
from tests.null.planning import machine
from tests.parity.models import CASES, Case
from tests.parity.observed import by_lane, lowered, observed
from tests.parity.offloading import trace_of
from tests.parity.recomputing import AMPLE
from tests.parity.speculating import two_groups
from tests.parity.test_kernels import torchs_bits

WARM_UP, STEPS = 1, 5


@cache
def planned(name: str, dtype: torch.dtype = torch.float32, after: int = WARM_UP) -> Plan:
    trace = trace_of(CASES[name], dtype)
    plan = forebay.plan(trace, machine(kind="cpu"), Budget(AMPLE, AMPLE), "zero-offload-delayed")
    return replace(plan, streaming=replace(plan.streaming, delay_after=after))


def decay(step: int) -> float:
    return 1 / (1 + step)


class Plain:
    """The specification: gradients and learning rates of a step are applied at the end of the next one, those of the
    first ``after`` steps at once. 16-bit parameters have fp32 masters, as under forebay."""

    def __init__(self, case: Case, dtype: torch.dtype, after: int = WARM_UP) -> None:
        self.model = case.model(dtype)
        self.optimizer = two_groups(self.model, fused=True)
        self.rates = [group["lr"] for group in self.optimizer.param_groups]
        self.pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
        for group in self.optimizer.param_groups:
            masters = [nn.Parameter(p.detach().float().clone(), p.requires_grad) for p in group["params"]]
            self.pairs += zip(group["params"], masters, strict=True)
            group["params"] = masters
        self.after, self.steps = after, 0
        self.pending: tuple[list[torch.Tensor | None], list[float]] | None = None

    def step(self) -> None:
        gradients = [None if p.grad is None else p.grad.float().clone() for p, _ in self.pairs]
        rates = [lr * decay(self.steps) for lr in self.rates]
        self.show()
        self.pending = gradients, rates
        if self.steps < self.after:
            self.show()
        self.steps += 1
        self.model.zero_grad()

    @torch.no_grad()
    def show(self) -> None:
        """Applies what is pending."""
        if self.pending is None:
            return
        (gradients, rates), self.pending = self.pending, None
        for (_, master), gradient in zip(self.pairs, gradients, strict=True):
            master.grad = gradient
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        self.optimizer.step()
        for parameter, master in self.pairs:
            parameter.copy_(master)


class Late:
    """A model under forebay, whose updates are delayed."""

    def __init__(self, name: str, dtype: torch.dtype, delays: Delays | None = None, after: int = WARM_UP) -> None:
        case = CASES[name]
        self.device = CpuDevice(AMPLE, delays=delays)
        model = case.model(dtype)
        self.model, self.optimizer = forebay.prepare(
            model,
            two_groups(model, fused=True),
            case.inputs(0, dtype),
            plan=planned(name, dtype, after),
            device_memory=AMPLE,
            device=self.device,
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
    """The losses of a step before its update, and the norm of its gradients, clipped."""
    found = []
    for micro in range(micro_batches):
        loss = model(**case.inputs(micro_batches * step + micro, dtype))["loss"]
        loss.backward()
        found.append(loss.detach())
    found.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
    return found


def assert_same(late: Late, plain: Plain) -> None:
    """Parameters, their masters and the states, with every update."""
    plain.show()
    saved = late.model.state_dict()
    for name, value in plain.model.state_dict().items():
        assert torch.equal(saved[name], value), name
    names = {id(p): n for n, p in plain.model.named_parameters()}
    masters = forebay.parameters(late.model)
    for parameter, master in plain.pairs:
        assert torch.equal(masters[names[id(parameter)]], master), names[id(parameter)]
    order = [p for group in late.optimizer.param_groups for p in group["params"]]
    states = late.optimizer.state_dict()["state"]
    for index, (_, master) in zip(range(len(order)), plain.pairs, strict=True):
        for key, value in plain.optimizer.state[master].items():
            assert torch.equal(states[index][key], value), (index, key)


def train(
    name: str,
    dtype: torch.dtype,
    *,
    delays: Delays | None = None,
    after: int = WARM_UP,
    between: Callable[[int, Late, Plain], None] = lambda step, late, plain: None,
) -> None:
    """Both side by side, clipping and a schedule included; ``between`` is called behind every step."""
    case, plain, late = CASES[name], Plain(CASES[name], dtype, after), Late(name, dtype, delays, after)
    try:
        for step in range(STEPS):
            expected, found = (passed(one.model, case, dtype, step) for one in (plain, late))
            assert all(map(torch.equal, found, expected)), (step, found, expected)
            plain.step()
            late.step()
            between(step, late, plain)
        assert_same(late, plain)
    finally:
        late.close()


@torchs_bits
@pytest.mark.parametrize(("name", "dtype"), [("llama-tied", torch.bfloat16), ("unused", torch.float32)])
def test_it_is_the_loop_that_applies_each_step_one_step_late(name: str, dtype: torch.dtype) -> None:
    train(name, dtype)


@torchs_bits
@pytest.mark.parametrize("lane", [Lane.UPDATE, Lane.H2D])
def test_whatever_comes_late(lane: Lane) -> None:
    train("llama", torch.float32, delays=RandomDelays(0, 0.01, [lane]))


@torchs_bits
def test_the_warm_up_is_exact() -> None:
    train("unused", torch.float32, after=STEPS)


@torchs_bits
def test_who_looks_sees_every_update_and_so_does_the_step_behind_an_evaluation_or_a_state_dict() -> None:
    """A look at the parameters alone changes no step."""
    case, seen = CASES["llama"], list[torch.Tensor]()

    def look(step: int, late: Late, plain: Plain) -> None:
        if step == 1:
            plain.show()
            with torch.no_grad():
                losses = [one.model(**case.inputs(99, torch.float32))["loss"] for one in (late, plain)]
            assert torch.equal(*losses)
        if step == 2:
            seen.append(forebay.parameters(late.model)["model.norm.weight"])
        if step == 3:
            assert torch.equal(seen[0], plain.model.get_parameter("model.norm.weight"))
            assert_same(late, plain)

    train("llama", torch.float32, between=look)


def test_a_run_goes_on_from_what_was_saved_as_it_would_have() -> None:
    dtype, case = torch.float32, CASES["llama"]
    first = Late("llama", dtype)
    for step in range(3):
        passed(first.model, case, dtype, step)
        first.step()
    model = {name: value.clone() for name, value in first.model.state_dict().items()}
    optimizer = first.optimizer.state_dict()
    second = Late("llama", dtype)
    second.model.load_state_dict(model)
    second.optimizer.load_state_dict(optimizer)
    second.scheduler.load_state_dict(first.scheduler.state_dict())
    for step in range(3, 5):
        expected, found = (passed(one.model, case, dtype, step) for one in (first, second))
        assert all(map(torch.equal, found, expected)), step
        first.step()
        second.step()
    first.close()
    second.close()


def test_a_forward_without_gradients_inside_a_step_is_refused() -> None:
    dtype, case = torch.float32, CASES["llama"]
    late = Late("llama", dtype, after=0)
    passed(late.model, case, dtype, 0)
    late.step()
    assert "a step late" in forebay.report(late.model).plan.changes_numbers[0]
    loss = late.model(**case.inputs(1, dtype))["loss"]
    loss.backward(retain_graph=True)  # another backward may follow
    for look in (late.model.state_dict, late.optimizer.state_dict, lambda: late.model(**case.inputs(2, dtype))):
        with torch.no_grad(), pytest.raises(UsageError, match=r"between the forward of a training step and its "):
            look()
    late.step()
    with torch.no_grad():
        late.model(**case.inputs(2, dtype))
    late.model.state_dict()
    late.close()


@pytest.mark.parametrize("name", ["llama-tied", "unused"])
def test_the_program_is_what_the_runtime_does(name: str) -> None:
    plan = planned(name, after=0)
    assert lowered(lower(trace_of(CASES[name], torch.float32), plan)) == by_lane(observed(CASES[name], plan).last)
