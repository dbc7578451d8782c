"""Delayed updates are a loop in plain PyTorch that applies each step's gradients one step late, bit for bit.

The reference is that loop: what it takes from a step are its gradients, after clipping, and its learning rates; it
applies them at the end of the next step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import final

import pytest
import torch

import forebay
from forebay.budgets import Budget
from forebay.device.base import Delays
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
from tests.parity.scheduled import Reference, Scheduled, assert_same, decay, passed, train
from tests.parity.test_kernels import torchs_bits

WARM_UP, STEPS = 1, 5


@cache
def planned(name: str, dtype: torch.dtype = torch.float32, after: int = WARM_UP) -> Plan:
    trace = trace_of(CASES[name], dtype)
    plan = forebay.plan(trace, machine(kind="cpu"), Budget(AMPLE, AMPLE), "zero-offload-delayed")
    return replace(plan, streaming=replace(plan.streaming, delay_after=after))


@final
class Plain(Reference):
    """Gradients and learning rates of a step are applied at the end of the next one, those of the first ``after``
    steps at once."""

    def __init__(self, case: Case, dtype: torch.dtype, after: int = WARM_UP) -> None:
        super().__init__(case, dtype)
        self.after, self.steps = after, 0
        self.pending: tuple[list[torch.Tensor | None], list[float]] | None = None

    def step(self) -> None:
        gradients = [None if p.grad is None else p.grad.float().clone() for _, p, _ in self.pairs]
        rates = [lr * decay(self.steps) for lr in self.rates]
        self.show()
        self.pending = gradients, rates
        if self.steps < self.after:
            self.show()
        self.steps += 1
        self.model.zero_grad()

    def show(self) -> None:
        if self.pending is None:
            return
        (gradients, rates), self.pending = self.pending, None
        for (_, _, master), gradient in zip(self.pairs, gradients, strict=True):
            master.grad = gradient
        self.update(rates)


def late(name: str, dtype: torch.dtype, delays: Delays | None = None, after: int = WARM_UP) -> Scheduled:
    """A model under forebay, whose updates are delayed."""
    return Scheduled(name, planned(name, dtype, after), dtype, delays)


def trained(
    name: str,
    dtype: torch.dtype,
    *,
    delays: Delays | None = None,
    after: int = WARM_UP,
    between: Callable[[int, Scheduled, Plain], None] = lambda step, run, plain: None,
) -> None:
    case = CASES[name]
    train(late(name, dtype, delays, after), Plain(case, dtype, after), case, dtype, STEPS, between)


@torchs_bits
@pytest.mark.parametrize(("name", "dtype"), [("llama-tied", torch.bfloat16), ("unused", torch.float32)])
def test_it_is_the_loop_that_applies_each_step_one_step_late(name: str, dtype: torch.dtype) -> None:
    trained(name, dtype)


@torchs_bits
@pytest.mark.parametrize("lane", [Lane.UPDATE, Lane.H2D])
def test_whatever_comes_late(lane: Lane) -> None:
    trained("llama", torch.float32, delays=RandomDelays(0, 0.01, [lane]))


@torchs_bits
def test_the_warm_up_is_exact() -> None:
    trained("unused", torch.float32, after=STEPS)


@torchs_bits
def test_who_looks_sees_every_update_and_so_does_the_step_behind_an_evaluation_or_a_state_dict() -> None:
    """A look at the parameters alone changes no step."""
    case, seen = CASES["llama"], list[torch.Tensor]()

    def look(step: int, run: Scheduled, plain: Plain) -> None:
        if step == 1:
            plain.show()
            with torch.no_grad():
                losses = [one.model(**case.inputs(99, torch.float32))["loss"] for one in (run, plain)]
            assert torch.equal(*losses)
        if step == 2:
            seen.append(forebay.parameters(run.model)["model.norm.weight"])
        if step == 3:
            assert torch.equal(seen[0], plain.model.get_parameter("model.norm.weight"))
            assert_same(run, plain)

    trained("llama", torch.float32, between=look)


def test_a_run_goes_on_from_what_was_saved_as_it_would_have() -> None:
    dtype, case = torch.float32, CASES["llama"]
    first = late("llama", dtype)
    for step in range(3):
        passed(first.model, case, dtype, step)
        first.step()
    model = {name: value.clone() for name, value in first.model.state_dict().items()}
    optimizer = first.optimizer.state_dict()
    second = late("llama", dtype)
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
    run = late("llama", dtype, after=0)
    passed(run.model, case, dtype, 0)
    run.step()
    assert "a step late" in forebay.report(run.model).plan.changes_numbers[0]
    loss = run.model(**case.inputs(1, dtype))["loss"]
    loss.backward(retain_graph=True)  # another backward may follow
    for look in (run.model.state_dict, run.optimizer.state_dict, lambda: run.model(**case.inputs(2, dtype))):
        with torch.no_grad(), pytest.raises(UsageError, match=r"between the forward of a training step and its "):
            look()
    run.step()
    with torch.no_grad():
        run.model(**case.inputs(2, dtype))
    run.model.state_dict()
    run.close()


@pytest.mark.parametrize("name", ["llama-tied", "unused"])
def test_the_program_is_what_the_runtime_does(name: str) -> None:
    plan = planned(name, after=0)
    assert lowered(lower(trace_of(CASES[name], torch.float32), plan)) == by_lane(observed(CASES[name], plan).last)
