"""Updates in turns are a loop in plain PyTorch that leaves the gradients of a block alone until its turn, bit for bit.

The reference is that loop: a step updates the parameters of the blocks whose turn it is, with what ``backward`` has
added up since their last turn, and sets the gradients of those alone to None.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import forebay
from forebay.budgets import Budget
from forebay.checking import check
from forebay.device.base import Delays
from forebay.device.cpu import CpuDevice
from forebay.device.delays import RandomDelays
from forebay.errors import ForebayError, UsageError
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
from tests.parity.test_streaming import everything_on_disk

EVERY, STEPS = 3, 7


def in_turns(plan: Plan, every: int = EVERY) -> Plan:
    return replace(
        plan,
        streaming=replace(plan.streaming, update_every=every, overlap_update=True),
        changes_numbers=("blocks are updated in turns",),
    )


@cache
def planned(name: str, dtype: torch.dtype = torch.float32, policy: str = "stream") -> Plan:
    trace = trace_of(CASES[name], dtype)
    plan = in_turns(forebay.plan(trace, machine(kind="cpu"), Budget(AMPLE, AMPLE), policy))
    check(trace, machine(kind="cpu"), plan)
    return plan


def decay(step: int) -> float:
    return 1 / (1 + step)


class Plain:
    """The specification. 16-bit parameters have fp32 masters, as under forebay."""

    def __init__(self, case: Case, dtype: torch.dtype, turns: dict[str, int]) -> None:
        self.model = case.model(dtype)
        self.optimizer = two_groups(self.model, fused=True)
        names = {id(p): n for n, p in self.model.named_parameters()}
        self.pairs: list[tuple[str, nn.Parameter, nn.Parameter]] = []
        for group in self.optimizer.param_groups:
            masters = [nn.Parameter(p.detach().float().clone(), p.requires_grad) for p in group["params"]]
            triples = zip(group["params"], masters, strict=True)
            self.pairs += [(names[id(p)], p, master) for p, master in triples]
            group["params"] = masters
        self.rates = [group["lr"] for group in self.optimizer.param_groups]
        self.turns, self.steps, self.turn = turns, 0, 0

    def step(self) -> None:
        self._update({name for name, turn in self.turns.items() if turn == self.turn % EVERY}, self.steps)
        self.steps, self.turn = self.steps + 1, self.turn + 1

    def show(self) -> None:
        """Everybody's turn; the next round begins. The scheduler has been asked for the next learning rate by then."""
        self._update(set(self.turns), self.steps)
        self.turn = 0

    @torch.no_grad()
    def _update(self, names: set[str], step: int) -> None:
        for name, parameter, master in self.pairs:
            owed = name in names and parameter.grad is not None
            master.grad = parameter.grad.float().clone() if owed else None  # type: ignore[union-attr]
            if owed:
                parameter.grad = None
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * decay(step)
        self.optimizer.step()
        for _, parameter, master in self.pairs:
            parameter.copy_(master)


class Turning:
    """A model under forebay, whose blocks are updated in turns."""

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


def turns_of(name: str, plan: Plan, dtype: torch.dtype) -> dict[str, int]:
    """By parameter: every third block in the same step, those that stay in each (a case here has none)."""
    hosted = [p.block for p in plan.placements if not p.resident]
    assert len(hosted) == len(plan.placements) > EVERY
    model = trace_of(CASES[name], dtype).model
    return {p.name: hosted.index(b.name) % EVERY for b in model.blocks for p in b.parameters if p.trainable}


def passed(model: nn.Module, case: Case, dtype: torch.dtype, step: int, micro_batches: int = 2) -> list[torch.Tensor]:
    """The losses of a step before its update, and the norm of what has been added up, clipped."""
    found = []
    for micro in range(micro_batches):
        loss = model(**case.inputs(micro_batches * step + micro, dtype))["loss"]
        loss.backward()
        found.append(loss.detach())
    found.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
    return found


def assert_same(turning: Turning, plain: Plain) -> None:
    """Parameters, their masters and the states, when all have had their turn."""
    plain.show()
    saved = turning.model.state_dict()
    for name, value in plain.model.state_dict().items():
        assert torch.equal(saved[name], value), name
    masters = forebay.parameters(turning.model)
    for name, _, master in plain.pairs:
        assert torch.equal(masters[name], master), name
    states = turning.optimizer.state_dict()["state"]
    for index, (_, _, master) in enumerate(plain.pairs):
        for key, value in plain.optimizer.state[master].items():
            assert torch.equal(states[index][key], value), (index, key)


def train(
    name: str,
    plan: Plan,
    dtype: torch.dtype = torch.float32,
    *,
    delays: Delays | None = None,
    between: Callable[[int, Turning, Plain], None] = lambda step, turning, plain: None,
    **more: Any,
) -> None:
    """Both side by side, clipping and a schedule included; ``between`` is called behind every step."""
    case, plain = CASES[name], Plain(CASES[name], dtype, turns_of(name, plan, dtype))
    turning = Turning(name, plan, dtype, delays, **more)
    try:
        for step in range(STEPS):
            expected, found = (passed(one.model, case, dtype, step) for one in (plain, turning))
            assert all(map(torch.equal, found, expected)), (step, found, expected)
            plain.step()
            turning.step()
            between(step, turning, plain)
        assert_same(turning, plain)
    finally:
        turning.close()


@torchs_bits
@pytest.mark.parametrize(
    ("name", "dtype", "policy"),
    [
        ("llama-tied", torch.bfloat16, "stream"),
        ("unused", torch.float32, "stream"),
        ("llama", torch.float32, "zero-offload"),
    ],
)
def test_it_is_the_loop_that_lets_blocks_wait_for_their_turn(name: str, dtype: torch.dtype, policy: str) -> None:
    train(name, planned(name, dtype, policy), dtype)


@torchs_bits
def test_states_and_parameters_on_disk(tmp_path: Path) -> None:
    plan = in_turns(everything_on_disk(CASES["llama"].model(torch.float32), str(tmp_path)))
    train("llama", plan, disk=str(tmp_path))


@torchs_bits
@pytest.mark.parametrize("lane", [Lane.UPDATE, Lane.D2H])
def test_whatever_comes_late(lane: Lane) -> None:
    train("llama", planned("llama"), delays=RandomDelays(0, 0.01, [lane]))


@torchs_bits
def test_a_state_dict_gives_everybody_a_turn_and_a_look_does_not() -> None:
    case = CASES["llama"]

    def look(step: int, turning: Turning, plain: Plain) -> None:
        if step == 1:
            with torch.no_grad():
                losses = [one.model(**case.inputs(99, torch.float32))["loss"] for one in (turning, plain)]
            assert torch.equal(*losses)
        if step == 2:
            masters = forebay.parameters(turning.model)
            assert all(torch.equal(masters[name], master) for name, _, master in plain.pairs)
        if step == 3:
            assert_same(turning, plain)

    train("llama", planned("llama"), between=look)


def test_a_run_goes_on_from_what_was_saved_as_it_would_have(tmp_path: Path) -> None:
    dtype, case, plan = torch.float32, CASES["llama"], planned("llama")
    first = Turning("llama", plan, dtype)
    expected = []
    for step in range(8):
        if step == 4:
            forebay.save(first.model, first.optimizer, tmp_path, step=4)
            schedule = first.scheduler.state_dict()
        expected.append(passed(first.model, case, dtype, step))
        first.step()
    first.close()
    second = Turning("llama", plan, dtype)
    forebay.resume(second.model, second.optimizer, tmp_path)
    second.scheduler.load_state_dict(schedule)
    for step in range(4, 8):
        assert all(map(torch.equal, passed(second.model, case, dtype, step), expected[step])), step
        second.step()
    second.close()


def test_who_saves_inside_a_step_or_keeps_a_gradient_that_waits_is_told_so() -> None:
    dtype, case = torch.float32, CASES["llama"]
    turning = Turning("llama", planned("llama"), dtype)
    passed(turning.model, case, dtype, 0)
    name, parameter = next(
        (n, p) for n, p in turning.model.named_parameters() if n.endswith("layers.1.mlp.up_proj.weight")
    )
    kept = parameter.grad
    assert kept is not None
    turning.step()
    assert parameter.grad is None and forebay.gradients(turning.model).get(name) is None
    with pytest.raises(ForebayError, match="that of an earlier backward"):
        kept.sum()
    passed(turning.model, case, dtype, 1)
    for look in (turning.model.state_dict, turning.optimizer.state_dict):
        with pytest.raises(UsageError, match=r"updates blocks in turns, .* behind the step"):
            look()
    turning.step()
    turning.model.state_dict()
    turning.close()


@pytest.mark.parametrize("name", ["llama-tied", "unused"])
def test_the_program_is_what_the_runtime_does(name: str) -> None:
    plan = planned(name)
    steps = lower(trace_of(CASES[name], torch.float32), plan).steps
    program = lower(trace_of(CASES[name], torch.float32), plan, steps=steps)
    assert lowered(program) == by_lane(observed(CASES[name], plan, steps=steps).last)


def test_a_scaler_would_unscale_what_waits_twice() -> None:
    """The first step has nothing that waited; the second is refused before its sums are touched."""
    case, name = CASES["llama"], "llama"
    run = Turning(name, planned(name), torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    try:

        def unscaled(step: int) -> None:
            scaler.scale(run.model(**case.inputs(step, torch.float32))["loss"]).backward()
            scaler.unscale_(run.optimizer)

        unscaled(0)
        scaler.step(run.optimizer)
        scaler.update()
        run.optimizer.zero_grad()
        with pytest.raises(UsageError, match="a GradScaler has unscaled already"):
            unscaled(1)
    finally:
        run.close()


def test_a_resume_in_the_middle_of_a_round_goes_back(tmp_path: Path) -> None:
    """As behind a loss that is not finite: what waits is dropped with the values that it was for."""
    case, name = CASES["llama"], "llama"
    run = Turning(name, planned(name), torch.float32)
    try:
        passed(run.model, case, torch.float32, 0)
        run.step()
        forebay.save(run.model, run.optimizer, tmp_path / "checkpoint", step=1)
        kept = {n: p.clone() for n, p in forebay.parameters(run.model).items()}
        for step in (1, 2):
            passed(run.model, case, torch.float32, step)
            run.step()
        passed(run.model, case, torch.float32, 3)
        forebay.resume(run.model, run.optimizer, tmp_path / "checkpoint")
        run.optimizer.zero_grad()
        found = dict(forebay.parameters(run.model))
        assert found.keys() == kept.keys() and all(torch.equal(found[n], kept[n]) for n in kept)
    finally:
        run.close()
