"""Updates on the device of blocks that are at home elsewhere: the numbers are those of an update at home."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import forebay
from forebay.device.cpu import CpuDevice
from forebay.device.delays import RandomDelays
from forebay.kernels.team import Team
from forebay.optim.arithmetic import TorchArithmetic
from forebay.optim.parts import Arithmetic
from forebay.optim.rules import UpdateRule
from forebay.plans import Plan, Update
from forebay.runtime import updates
from forebay.timeline import Event, Lane
from tests.null.updating import at_home
from tests.parity.compare import adamw, assert_same_training
from tests.parity.device_updating import chunk_jobs, on_device, placed
from tests.parity.models import CASES
from tests.parity.speculating import AMPLE, MIXED, Run, counters
from tests.parity.test_delays import LATE, NARROW, assert_same_whichever_is_late, train
from tests.parity.test_speculation import ACTIONS, LOOP, ROUNDS, assert_same, run_all

DTYPES = [torch.float32, torch.bfloat16]
PLANS: dict[tuple[torch.dtype, bool], Plan] = {
    (dtype, disk): on_device(MIXED, dtype, disk=disk) for dtype in DTYPES for disk in (False, True)
}


@pytest.mark.thinned(2)
@pytest.mark.parametrize("cells", [1, 50])
@pytest.mark.parametrize("disk", [False, True], ids=["host", "tiers"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_result_wherever_the_update_runs(dtype: torch.dtype, disk: bool, cells: int, tmp_path: Path) -> None:
    """Resident, at home, and brought to the device; with room for one chunk there, or for all."""
    folder = f"{tmp_path}:64MiB"
    resident = train(NARROW, dtype, None)
    plan = on_device(NARROW, dtype, disk=disk, cells=cells)
    train(NARROW, dtype, None, plan=at_home(plan, host=AMPLE), disk=folder).assert_equal(resident)
    train(NARROW, dtype, None, plan=plan, disk=folder).assert_equal(resident)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("disk", [False, True], ids=["host", "tiers"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=4)
@given(actions=st.lists(ROUNDS, min_size=2, max_size=4), seed=st.integers(0, 9))
def test_whatever_a_loop_does(
    dtype: torch.dtype, disk: bool, actions: list[list[str]], seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Clipping, two groups, parameters without gradient, frozen ones, loading: against updates at home, whose numbers
    are those of plain PyTorch. Every job on the device's side is late by chance."""
    folder = f"{tmp_path_factory.mktemp('disk')}:64MiB" if disk else None
    plan = PLANS[dtype, disk]
    flat = [action for group in actions for action in group]
    expected = run_all(Run(MIXED, dtype, at_home(plan, host=AMPLE), folder, None), flat)
    there = Run(MIXED, dtype, plan, folder, RandomDelays(seed, max_seconds=0.001))
    assert_same(run_all(there, flat), expected, flat)


@pytest.mark.thinned(4)
@pytest.mark.parametrize("between", ACTIONS)
def test_between_one_step_and_the_next(between: str, tmp_path: Path) -> None:
    """Each thing that a loop may do when a step has been asked for and its updates are not queued yet."""
    plan, folder = PLANS[torch.bfloat16, True], f"{tmp_path}:64MiB"
    actions = [*LOOP, "backward", "step", between, "step", "zero", *LOOP]
    expected = run_all(Run(MIXED, torch.bfloat16, at_home(plan, host=AMPLE), folder, None), actions)
    there = Run(MIXED, torch.bfloat16, plan, folder, RandomDelays(0, max_seconds=0.001))
    assert_same(run_all(there, actions), expected, actions)


def test_beside_blocks_that_speculate(tmp_path: Path) -> None:
    """Some blocks of a plan on the device, some on the host ahead of their step."""
    plan, folder = on_device(MIXED, torch.bfloat16, disk=True, speculate=2), f"{tmp_path}:64MiB"
    assert plan.updated(Update.DEVICE) and len(plan.updated(Update.AHEAD)) == 2
    actions = [*LOOP, *LOOP, "backward", "clip", "step", "zero", *LOOP]
    expected = run_all(Run(MIXED, torch.bfloat16, at_home(plan, host=AMPLE), folder, None), actions)
    there = Run(MIXED, torch.bfloat16, plan, folder, RandomDelays(1, max_seconds=0.001))
    made = [ACTIONS[action](there) for action in actions]
    # Two blocks in each of four steps; the third step is clipped.
    assert counters(there.model) == (8, 6, 2)
    assert_same([*made, there.everything()], expected, actions)
    there.close()


OPTIMIZERS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "sgd": (lambda p: torch.optim.SGD(p, lr=0.1), ()),
    "momentum": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True), ("momentum_buffer",)),
    "amsgrad": (lambda p: torch.optim.Adam(p, amsgrad=True), ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")),
}


@pytest.mark.thinned(2)
@pytest.mark.parametrize(("kind", "dtype"), [("sgd", torch.float32), *((kind, torch.bfloat16) for kind in OPTIMIZERS)])
def test_other_optimizers(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Without any state, with one, with three."""
    make, states = OPTIMIZERS[kind]
    plan = on_device(NARROW, dtype, disk=True, states=states)
    left = []
    for one in (at_home(plan, host=AMPLE), plan):
        model = NARROW.model(dtype)
        model, optimizer = forebay.prepare(
            model, make(model.parameters()), plan=one, device_memory=AMPLE, disk=f"{tmp_path}:64MiB", device="cpu"
        )
        for step in range(3):
            model(**NARROW.inputs(step, dtype))["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
        left.append((dict(forebay.parameters(model)), optimizer.state_dict()["state"]))
        forebay.close(model)
    (first, first_states), (second, second_states) = left
    assert all(torch.equal(first[n], second[n]) for n in first)
    assert all(torch.equal(first_states[i][n], second_states[i][n]) for i in first_states for n in first_states[i])


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", ["llama-tied", "used-twice", "frozen", "checkpointed"])
def test_models_of_every_shape(name: str, tmp_path: Path) -> None:
    case, dtype = CASES[name], CASES[name].dtypes[-1]
    plan = on_device(case, dtype, disk=True, host_slots=3)
    made = assert_same_training(
        case, dtype, clip=0.5, steps=3, plan=plan, device_memory=AMPLE, disk=f"{tmp_path}:64MiB", device="cpu"
    )
    forebay.close(made)


@pytest.mark.parametrize("name", ["llama-tied", "experts"])
def test_models_of_every_shape_go_on_alike(name: str, tmp_path: Path) -> None:
    """Several steps without a look in between, against updates at home."""
    case, dtype = CASES[name], CASES[name].dtypes[-1]
    plan, folder = on_device(case, dtype, disk=True, host_slots=3), f"{tmp_path}:64MiB"
    expected = train(case, dtype, None, plan=at_home(plan, host=AMPLE), disk=folder)
    train(case, dtype, RandomDelays(2, max_seconds=0.001), plan=plan, disk=folder).assert_equal(expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_job_late_in_turn(dtype: torch.dtype, tmp_path: Path) -> None:
    """Two micro-batches a step, zeros in place and otherwise; nothing is looked at between the steps."""
    plan = on_device(NARROW, dtype, disk=True, host_slots=5)
    assert_same_whichever_is_late(dtype, plan, tmp_path, 0 if dtype is torch.float32 else 16, 32)


SLOW = [(lane, True) for lane in (Lane.H2D, Lane.D2H, Lane.DEVICE_UPDATE, Lane.DISK_READ, Lane.DISK_WRITE)]


@pytest.mark.thinned(2)
@pytest.mark.parametrize(("lane", "overlap"), [*SLOW, (Lane.DEVICE_UPDATE, False)])
def test_a_slow_lane(lane: Lane, overlap: bool, tmp_path: Path) -> None:
    expected = train(NARROW, torch.float32, None)
    plan, disk = on_device(NARROW, torch.float32, disk=True, host_slots=1), f"{tmp_path}:64MiB"
    plan = replace(plan, streaming=replace(plan.streaming, overlap_update=overlap))
    delays = RandomDelays(seed=1, max_seconds=LATE, lanes=[lane])
    train(NARROW, torch.float32, delays, plan=plan, disk=disk).assert_equal(expected)


def events(plan: Plan, dtype: torch.dtype, steps: int = 2) -> list[Event]:
    """Those of a run of ``steps`` steps, in the order in which each lane had them."""
    device = CpuDevice(AMPLE)
    model = NARROW.model(dtype)
    model, optimizer = forebay.prepare(
        model, adamw(list(model.parameters())), plan=plan, device_memory=AMPLE, device=device
    )
    for step in range(steps):
        model(**NARROW.inputs(step, dtype))["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    forebay.synchronize(model)
    seen = forebay.report(model).timeline.events
    forebay.close(model)
    device.close()
    return list(seen)


def test_an_update_goes_right_before_the_fetch_of_its_block() -> None:
    """The link is first in, first out: no fetch waits for the updates of blocks that come later."""
    plan = on_device(NARROW, torch.float32, disk=False)
    plan = replace(plan, streaming=replace(plan.streaming, prefetch_distance=1))
    names = list(plan.updated(Update.DEVICE))
    moved = [e.what for e in events(plan, torch.float32) if e.lane is Lane.H2D]
    # What is loaded and fetched from the first step on, to the end of the next forward.
    first = next(i for i, what in enumerate(moved) if what.startswith("load "))
    order: list[str] = []
    for what in moved[first:]:
        verb, block = what.split()[0], what.split()[-1]
        if not order or order[-1] != f"{verb} {block}":
            order.append(f"{verb} {block}")
    assert order[: 2 * len(names)] == [f"{verb} {name}" for name in names for verb in ("load", "fetch")]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_jobs_of_a_step(dtype: torch.dtype) -> None:
    """Each chunk of each block is updated once a step, on the device's lane and on no other."""
    plan = on_device(NARROW, dtype, disk=False)
    updates = [e for e in events(plan, dtype, steps=3) if e.what.startswith("update ")]
    assert {e.lane for e in updates} == {Lane.DEVICE_UPDATE}
    assert len(updates) == 3 * len(chunk_jobs(NARROW, dtype, plan))


def test_a_window_of_another_size_is_the_same_plan_else() -> None:
    plan = on_device(NARROW, torch.float32, disk=False, cells=1)
    wider = placed(NARROW, torch.float32, plan, cells=3)
    assert wider.streaming.update_window == 3 * plan.streaming.update_window
    assert wider.host == plan.host


def test_layer_by_layer_accumulation(tmp_path: Path) -> None:
    """Blocks are fetched from threads of the micro-batches then, and with them their updates are queued."""
    plan, left = on_device(NARROW, torch.float32, disk=True), []
    for one in (at_home(plan, host=AMPLE), plan):
        model = NARROW.model(torch.float32)
        model, optimizer = forebay.prepare(
            model,
            adamw(list(model.parameters())),
            plan=one,
            device_memory=AMPLE,
            disk=f"{tmp_path}:64MiB",
            device="cpu",
        )
        for step in range(3):
            batches = [NARROW.inputs(2 * step + micro, torch.float32) for micro in range(2)]
            forebay.accumulate(model, batches, lambda m, batch: m(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()
        left.append(dict(forebay.parameters(model)))
        forebay.close(model)
    assert all(torch.equal(left[0][n], left[1][n]) for n in left[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_with_torchs_own_kernels(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a card: 16-bit gradients become fp32 in the window, at the end of the cells, and masters that are kept as
    halves."""
    widened: list[int] = []

    def torchs(rule: UpdateRule, team: Team, workspace: torch.Tensor | None) -> Arithmetic:
        widened.append(0 if workspace is None else workspace.nbytes)
        return TorchArithmetic(rule, workspace)

    monkeypatch.setattr(updates, "host_arithmetic", torchs)
    plan = on_device(NARROW, dtype, disk=False)
    expected = train(NARROW, dtype, None, plan=at_home(plan, host=AMPLE))
    widened.clear()
    train(NARROW, dtype, RandomDelays(3, max_seconds=0.001), plan=plan).assert_equal(expected)
    # A chunk of 1,024 elements: gradients, masters.
    assert max(widened) == (2 * 4 * 1024 if dtype is torch.bfloat16 else 0)
