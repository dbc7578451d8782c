"""Updates in backward: the numbers of a step after it, the gradients of a few blocks on the host, of one on the device
where blocks stay there, and a clear word to whoever asks for a gradient that was used up."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import forebay
from forebay.arenas import arenas_of
from forebay.cli.main import app
from forebay.device.delays import RandomDelays
from forebay.errors import ConfigError, DoesNotFit, GradientUsedUp, UsageError
from forebay.memory import Kind, Tier
from forebay.plans import Plan, Update
from forebay.runtime.blocks import find_blocks
from tests.null.updating import at_home, updating
from tests.parity.accumulating import loss_of
from tests.parity.in_backward import Stays, in_backward, left_by, stepped, used_up
from tests.parity.models import CASES
from tests.parity.speculating import AMPLE, MIXED, Run, two_groups
from tests.parity.square import BLOCKS, ELEMENTS, STATES, WIDTH, WIDTHS, network, plan_for
from tests.parity.test_delays import NARROW


def assert_same(made: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert made.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(made[name], tensor), name


# Numbers.


@pytest.mark.thinned(4)
@pytest.mark.parametrize("stays", ["none", "half"])
@pytest.mark.parametrize("name", ["llama-tied", "t5", "mixtral", "experts", "used-twice"])
def test_every_model_as_with_a_step_after_backward(name: str, stays: Stays, tmp_path: Path) -> None:
    """Every kind of home in turn, 16-bit parameters with a master where there are any."""
    case = CASES[name]
    dtype, folder = case.dtypes[-1], f"{tmp_path}:64MiB"
    plan = in_backward(case, dtype, disk=True, stays=stays)
    expected = left_by(case, dtype, at_home(plan, host=AMPLE), folder, steps=2)
    assert_same(left_by(case, dtype, plan, folder, steps=2), expected)


@settings(max_examples=5)
@given(st.integers(1, 5), st.booleans(), st.sampled_from(get_args(Stays)), st.integers(0, 9))
def test_whatever_comes_late(
    tmp_path_factory: pytest.TempPathFactory, slots: int, disk: bool, stays: Stays, seed: int
) -> None:
    """Copies, updates, reads and writes are late by chance; a slot that is given on too early would show."""
    folder = f"{tmp_path_factory.mktemp('disk')}:64MiB" if disk else None
    plan = in_backward(NARROW, torch.float32, disk=disk, slots=slots, stays=stays)
    expected = left_by(NARROW, torch.float32, at_home(plan, host=AMPLE), folder)
    assert_same(left_by(NARROW, torch.float32, plan, folder, RandomDelays(seed, max_seconds=0.002)), expected)


@pytest.mark.parametrize("stays", get_args(Stays))
def test_the_numbers_of_plain_pytorch(stays: Stays) -> None:
    """With a scheduler, and a block of which one parameter has a gradient in some steps only: it never has all of them
    before, and is updated when its slot is wanted (on the device when another block's gradient is made), or by the
    step."""
    run = Run(MIXED, torch.float32, in_backward(MIXED, torch.float32, disk=False, slots=1, stays=stays), None, None)
    reference = MIXED.model(torch.float32)
    plain = two_groups(reference, fused=True)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(one, 0.5) for one in (run.optimizer, plain)]
    for step, whole in enumerate([False, True, True, False, False, True]):
        for model, optimizer in ((run.model, run.optimizer), (reference, plain)):
            model.body.layers[0].whole = whole
            model(**MIXED.inputs(step, torch.float32))["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
        for scheduler in schedulers:
            scheduler.step()
    values = forebay.parameters(run.model)
    assert all(torch.equal(values[n], p) for n, p in reference.named_parameters())
    run.close()


@pytest.mark.parametrize("stays", ["none", "half"])
def test_micro_batches_that_pass_the_model_together(stays: Stays) -> None:
    """Their gradients are complete once, when all are in the sum: that is one backward."""
    plan = in_backward(CASES["llama-tied"], torch.float32, disk=False, stays=stays)
    case, left = CASES["llama-tied"], []
    for one in (plan, at_home(plan, host=AMPLE)):
        run = Run(case, torch.float32, one, None, None)
        losses = []
        for step in range(2):
            batches = [case.inputs(3 * step + micro, torch.float32) for micro in range(3)]
            losses += forebay.accumulate(run.model, batches, loss_of)
            run.optimizer.step()
            run.optimizer.zero_grad()
        left.append({n: p for n, p in forebay.parameters(run.model).items()} | dict(enumerate(map(str, losses))))
        run.close()
    first, second = left
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]) if isinstance(value, torch.Tensor) else value == second[name], name


def test_micro_batches_one_after_the_other_are_refused() -> None:
    """Where all stays on the device accumulate is a loop, and the first would use up what the second adds to."""
    case = CASES["llama-tied"]
    run = Run(case, torch.float32, in_backward(case, torch.float32, disk=False, stays="all"), None, None)
    batches = [case.inputs(micro, torch.float32) for micro in range(2)]
    with pytest.raises(UsageError, match="2 micro-batches pass this model one after the other"):
        forebay.accumulate(run.model, batches, loss_of)
    forebay.accumulate(run.model, batches[:1], loss_of)
    run.optimizer.step()
    run.close()


# Bytes.


def one_slot_less(plan: Plan, dtype: torch.dtype, slots: int) -> Plan:
    """``plan_for`` with all blocks updated in backward, through ``slots`` slots of one block."""
    model = find_blocks(network(dtype)).model
    names = tuple(block.name for block in model.blocks)
    streaming = replace(plan.streaming, gradient_slots=(model.blocks[0].nbytes,) * slots)
    plan = updating(plan, Update.BACKWARD, names, streaming=streaming)
    return replace(plan, host=arenas_of(model, plan, STATES).host)


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("home", [Tier.HOST, Tier.DISK])
@pytest.mark.parametrize("dtype", WIDTHS, ids=str)
def test_the_host_holds_the_gradients_of_the_slots(dtype: torch.dtype, home: Tier, slots: int, tmp_path: Path) -> None:
    """To the byte, on the ledger that counts what is there: ``slots`` in the place of all blocks."""
    plan = plan_for(dtype, home, tmp_path)
    less = one_slot_less(plan, dtype, slots)
    width = WIDTHS[dtype][0] * ELEMENTS
    assert plan.host - less.host == (BLOCKS - slots) * width
    model = network(dtype)
    model, optimizer = forebay.prepare(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        plan=less,
        device_memory=AMPLE,
        disk=f"{tmp_path}:64MiB" if home is Tier.DISK else None,
        device="cpu",
    )
    for _ in range(2):
        model(torch.ones(2, WIDTH, dtype=dtype)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    forebay.synchronize(model)
    host = forebay.report(model).timeline.usage(Tier.HOST)
    forebay.close(model)
    assert host.at_peak[Kind.GRADIENT] == slots * width
    assert host.peak == less.host


# What cannot be had any more.


@pytest.fixture(params=["none", "half", "all"])
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    made = Run(NARROW, torch.float32, in_backward(NARROW, torch.float32, disk=False, stays=request.param), None, None)
    stepped(made, 0)
    yield made
    made.close()


def another_rate(run: Run) -> None:
    run.optimizer.param_groups[0]["lr"] *= 2
    run.optimizer.step()


def taken_out(run: Run) -> None:
    run.optimizer.param_groups.pop()
    run.optimizer.step()


def dropped(run: Run) -> None:
    run.model.get_parameter("body.head.weight").grad = None
    run.optimizer.step()


def replaced(run: Run) -> None:
    parameter = run.model.get_parameter("body.head.weight")
    parameter.grad = torch.ones(parameter.shape)
    run.optimizer.step()


def skipped(run: Run) -> None:
    run.optimizer.zero_grad()
    run.backward(2)


def evaluated(run: Run) -> None:
    with torch.no_grad():
        run.model(**NARROW.inputs(9, torch.float32))


BETWEEN: dict[str, tuple[Callable[[Run], Any], str]] = {
    "clip": (lambda run: torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1.0), "was used up"),
    "clip by the optimizer": (lambda run: run.optimizer.clip_grad_norm_(1.0), "was used up"),
    "clip by value": (lambda run: torch.nn.utils.clip_grad_value_(run.model.parameters(), 1.0), "was used up"),
    "scale": (lambda run: run.model.get_parameter("body.head.weight").grad.mul_(0.5), "was used up"),
    "read": (lambda run: dict(forebay.gradients(run.model)), "was used up"),
    "look": (lambda run: run.model.get_parameter("body.head.weight").grad.clone(), "was used up"),
    "zero in place": (lambda run: run.optimizer.zero_grad(set_to_none=False), "was used up"),
    "another backward": (lambda run: run.backward(2), "optimizer.step"),
    "skip the step": (skipped, "optimizer.step"),
    "evaluate": (evaluated, "optimizer.step"),
    "save the model": (lambda run: run.model.state_dict(), "optimizer.step"),
    "save the optimizer": (lambda run: run.optimizer.state_dict(), "optimizer.step"),
    "parameters": (lambda run: dict(forebay.parameters(run.model)), "optimizer.step"),
    "learning rate": (another_rate, "hyperparameters were changed between backward and step"),
    "no group": (taken_out, "the optimizer does not hold it any more"),
    "drop": (dropped, "dropped or replaced between backward and step"),
    "replace": (replaced, "dropped or replaced between backward and step"),
}


@pytest.mark.thinned(2)
@pytest.mark.parametrize("what", BETWEEN)
def test_between_backward_and_step(what: str, run: Run) -> None:
    act, words = BETWEEN[what]
    run.backward(1)
    with pytest.raises(GradientUsedUp, match=words):
        act(run)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("what", [w for w, (_, words) in BETWEEN.items() if words == "was used up"])
def test_a_refused_look_changes_nothing(what: str, run: Run) -> None:
    """The step that comes all the same is the one that was made."""
    run.backward(1)
    with pytest.raises(GradientUsedUp):
        BETWEEN[what][0](run)
    run.optimizer.step()
    run.optimizer.zero_grad()
    stepped(run, 2)
    made = {n: p.clone() for n, p in forebay.parameters(run.model).items()}
    plan = in_backward(NARROW, torch.float32, disk=False)
    expected = left_by(NARROW, torch.float32, at_home(plan, host=AMPLE), None)
    assert all(torch.equal(p, expected[f"parameter {n}"]) for n, p in made.items())


@pytest.mark.parametrize("again", [lambda run: run.backward(2), lambda run: run.optimizer.step()])
def test_gradients_that_nobody_zeroed(again: Callable[[Run], Any], run: Run) -> None:
    """In plain PyTorch the next backward would add to them, and a second step would take them once more."""
    run.backward(1)
    run.optimizer.step()
    before = {n: p.clone() for n, p in forebay.parameters(run.model).items()}
    with pytest.raises(GradientUsedUp, match="zero_grad"):
        again(run)
    assert all(torch.equal(p, before[n]) for n, p in run.model.state_dict().items())


def test_resuming_forgets_a_backward_without_its_step(run: Run, tmp_path: Path) -> None:
    stepped(run, 1)
    forebay.save(run.model, run.optimizer, tmp_path / "checkpoint", step=1)
    before = {n: p.clone() for n, p in forebay.parameters(run.model).items()}
    run.backward(2)
    with pytest.raises(GradientUsedUp, match=r"optimizer\.step"):  # some blocks have taken the next step already
        forebay.save(run.model, run.optimizer, tmp_path / "checkpoint", step=1)
    forebay.resume(run.model, run.optimizer, tmp_path / "checkpoint")
    with pytest.raises(GradientUsedUp):
        run.optimizer.step()
    run.optimizer.zero_grad()
    assert all(torch.equal(p, before[n]) for n, p in forebay.parameters(run.model).items())
    stepped(run, 2)
    assert any(not torch.equal(p, before[n]) for n, p in forebay.parameters(run.model).items())


def test_close_with_gradients_that_are_gone(tmp_path: Path) -> None:
    """Between backward and step as well: the parameters are what is at home, and there are no gradients."""
    for steps, stays in ((0, "none"), (1, "none"), (0, "half"), (1, "all")):
        run = Run(NARROW, torch.float32, in_backward(NARROW, torch.float32, disk=False, stays=stays), None, None)
        run.backward(0)
        for _ in range(steps):
            run.optimizer.step()
        run.close()
        assert all(p.grad is None and p.isfinite().all() for p in run.model.parameters())


def test_a_block_that_trains_nothing_is_refused() -> None:
    plan = in_backward(NARROW, torch.float32, disk=False)
    model = NARROW.model(torch.float32)
    names = used_up(NARROW, torch.float32)
    for parameter in find_blocks(model).model.block(names[0]).parameters:
        model.get_parameter(parameter.name).requires_grad_(False)
    with pytest.raises(ConfigError, match=f"update backward for block {names[0]}, which trains nothing"):
        forebay.prepare(model, torch.optim.AdamW(model.parameters()), plan=plan, device_memory=AMPLE, device="cpu")


# From the outside.


def test_prepare_fits_by_it_and_trains_the_same(tmp_path: Path) -> None:
    """A host that has no room for all gradients: refused, and with ``update="backward"`` trained with the numbers of
    plain PyTorch, within what the plan says to the byte."""
    case, dtype = CASES["llama"], torch.float32
    reference, model = case.model(dtype), case.model(dtype)
    plain = two_groups(reference, fused=True)
    blocks = find_blocks(model).model
    every, states = blocks.parameter_nbytes, 2 * blocks.parameter_nbytes
    largest = max(p.nbytes for b in blocks.blocks for p in b.parameters)
    # Parameters, states, gradients of three quarters of the model, one that waits to be added.
    allowed: dict[str, Any] = {
        "device_memory": AMPLE,
        "host_memory": every + states + every * 3 // 4 + largest,
        "policy": "stream",
        "device": "cpu",
    }
    inputs = case.inputs(0, dtype)
    with pytest.raises(DoesNotFit, match="host memory"):
        forebay.prepare(model, two_groups(model), inputs, **allowed)
    model, optimizer = forebay.prepare(model, two_groups(model), inputs, update="backward", **allowed)
    for step in range(2):
        for one, made in ((model, optimizer), (reference, plain)):
            one(**case.inputs(step, dtype))["loss"].backward()
            made.step()
            made.zero_grad()
    values = forebay.parameters(model)
    assert all(torch.equal(values[n], p) for n, p in reference.named_parameters())
    report = forebay.report(model)
    host = report.timeline.peaks[Tier.HOST]
    forebay.close(model)
    assert host == report.plan.host <= allowed["host_memory"]
    assert set(report.plan.updated(Update.BACKWARD)) == set(used_up(case, dtype))


def test_without_a_batch_nobody_knows() -> None:
    model = network(torch.float32)
    with pytest.raises(ConfigError, match=r"no batch was given.*give a batch"):
        forebay.prepare(model, torch.optim.AdamW(model.parameters()), device_memory=AMPLE, update="backward")


TEXT = "".join(f"{i} green bottles hanging on the wall, and if one should fall\n" for i in range(200))


def test_the_command_line(tmp_path: Path) -> None:
    """``train`` keeps what its plan says, with the losses of a run that uses nothing up; ``--clip-norm`` is refused
    beside it."""
    (tmp_path / "text").write_text(TEXT)
    flags = ["--model", "tiny", "--data", tmp_path / "text", "--seq", 32, "--steps", 2, "--device", "cpu"]
    flags += ["--device-memory", "8MiB", "--policy", "stream", "--json"]
    found = [invoke("train", *flags, "--update", update) for update in ("step", "backward")]
    assert [done.exit_code for done in found] == [0, 0], found[1].output
    kept, passed = (json.loads(done.stdout) for done in found)
    assert kept["loss"] == passed["loss"]
    assert passed["measured"]["peaks"]["host"] < kept["measured"]["peaks"]["host"]
    refused = invoke("train", *flags, "--update", "backward", "--clip-norm", 1)
    assert refused.exit_code == 2 and "leave --clip-norm out" in refused.stderr


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])
