"""Updates in turns are a loop in plain PyTorch that leaves the gradients of a block alone until its turn, bit for bit.

The reference is that loop: a step updates the parameters of the blocks whose turn it is, with what ``backward`` has
added up since their last turn, and sets the gradients of those alone to None.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, final

import pytest
import torch

import forebay
from forebay.budgets import Budget
from forebay.checking import check
from forebay.device.base import Delays
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
from tests.parity.scheduled import Reference, Scheduled, assert_same, decay, passed, train
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


@final
class Plain(Reference):
    """Each block in its turn; a parameter keeps what ``backward`` adds up until then."""

    def __init__(self, case: Case, dtype: torch.dtype, turns: dict[str, int]) -> None:
        super().__init__(case, dtype)
        self.turns, self.steps, self.turn = turns, 0, 0

    def step(self) -> None:
        self._update({name for name, turn in self.turns.items() if turn == self.turn % EVERY})
        self.steps, self.turn = self.steps + 1, self.turn + 1

    def show(self) -> None:
        """Everybody's turn; the next round begins. The scheduler has been asked for the next learning rate by then."""
        self._update(set(self.turns))
        self.turn = 0

    def _update(self, names: set[str]) -> None:
        for name, parameter, master in self.pairs:
            owed = name in names and parameter.grad is not None
            master.grad = parameter.grad.float().clone() if owed else None  # type: ignore[union-attr]
            if owed:
                parameter.grad = None
        self.update([rate * decay(self.steps) for rate in self.rates])


def turns_of(name: str, plan: Plan, dtype: torch.dtype) -> dict[str, int]:
    """By parameter: every third block in the same step, those that stay in each (a case here has none)."""
    hosted = [p.block for p in plan.placements if not p.resident]
    assert len(hosted) == len(plan.placements) > EVERY
    model = trace_of(CASES[name], dtype).model
    return {p.name: hosted.index(b.name) % EVERY for b in model.blocks for p in b.parameters if p.trainable}


def trained(
    name: str,
    plan: Plan,
    dtype: torch.dtype = torch.float32,
    *,
    delays: Delays | None = None,
    between: Callable[[int, Scheduled, Plain], None] = lambda step, run, plain: None,
    **more: Any,
) -> None:
    case = CASES[name]
    plain = Plain(case, dtype, turns_of(name, plan, dtype))
    train(Scheduled(name, plan, dtype, delays, **more), plain, case, dtype, STEPS, between)


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
    trained(name, planned(name, dtype, policy), dtype)


@torchs_bits
def test_states_and_parameters_on_disk(tmp_path: Path) -> None:
    plan = in_turns(everything_on_disk(CASES["llama"].model(torch.float32), str(tmp_path)))
    trained("llama", plan, disk=str(tmp_path))


@pytest.mark.thinned(2)
@torchs_bits
@pytest.mark.parametrize("lane", [Lane.UPDATE, Lane.D2H])
def test_whatever_comes_late(lane: Lane) -> None:
    trained("llama", planned("llama"), delays=RandomDelays(0, 0.01, [lane]))


@torchs_bits
def test_a_state_dict_gives_everybody_a_turn_and_a_look_does_not() -> None:
    case = CASES["llama"]

    def look(step: int, run: Scheduled, plain: Plain) -> None:
        if step == 1:
            with torch.no_grad():
                losses = [one.model(**case.inputs(99, torch.float32))["loss"] for one in (run, plain)]
            assert torch.equal(*losses)
        if step == 2:
            masters = forebay.parameters(run.model)
            assert all(torch.equal(masters[name], master) for name, _, master in plain.pairs)
        if step == 3:
            assert_same(run, plain)

    trained("llama", planned("llama"), between=look)


def test_a_run_goes_on_from_what_was_saved_as_it_would_have(tmp_path: Path) -> None:
    dtype, case, plan = torch.float32, CASES["llama"], planned("llama")
    first = Scheduled("llama", plan, dtype)
    expected = []
    for step in range(8):
        if step == 4:
            forebay.save(first.model, first.optimizer, tmp_path, step=4)
            schedule = first.scheduler.state_dict()
        expected.append(passed(first.model, case, dtype, step))
        first.step()
    first.close()
    second = Scheduled("llama", plan, dtype)
    forebay.resume(second.model, second.optimizer, tmp_path)
    second.scheduler.load_state_dict(schedule)
    for step in range(4, 8):
        assert all(map(torch.equal, passed(second.model, case, dtype, step), expected[step])), step
        second.step()
    second.close()


def test_who_saves_inside_a_step_or_keeps_a_gradient_that_waits_is_told_so() -> None:
    dtype, case = torch.float32, CASES["llama"]
    run = Scheduled("llama", planned("llama"), dtype)
    passed(run.model, case, dtype, 0)
    name, parameter = next((n, p) for n, p in run.model.named_parameters() if n.endswith("layers.1.mlp.up_proj.weight"))
    kept = parameter.grad
    assert kept is not None
    run.step()
    assert parameter.grad is None and forebay.gradients(run.model).get(name) is None
    with pytest.raises(ForebayError, match="that of an earlier backward"):
        kept.sum()
    passed(run.model, case, dtype, 1)
    for look in (run.model.state_dict, run.optimizer.state_dict):
        with pytest.raises(UsageError, match=r"updates blocks in turns, .* behind the step"):
            look()
    run.step()
    run.model.state_dict()
    run.close()


@pytest.mark.parametrize("name", ["llama-tied", "unused"])
def test_the_program_is_what_the_runtime_does(name: str) -> None:
    plan = planned(name)
    steps = lower(trace_of(CASES[name], torch.float32), plan).steps
    program = lower(trace_of(CASES[name], torch.float32), plan, steps=steps)
    assert lowered(program) == by_lane(observed(CASES[name], plan, steps=steps).last)


def test_a_scaler_would_unscale_what_waits_twice() -> None:
    """The first step has nothing that waited; the second is refused before its sums are touched."""
    case, name = CASES["llama"], "llama"
    run = Scheduled(name, planned(name), torch.float32)
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
    run = Scheduled(name, planned(name), torch.float32)
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
