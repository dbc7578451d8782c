"""Activations that wait for backward on the host: the numbers stay those of plain PyTorch, bit for bit."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import forebay
import forebay.device.cpu
from forebay.device.cpu import CpuDevice
from forebay.device.delays import RandomDelays
from forebay.memory import Kind, Tier
from forebay.plans import Plan
from forebay.runtime.blocks import find_blocks
from forebay.timeline import Lane
from tests.parity.compare import assert_same_training
from tests.parity.offloading import SPLITS, SUBJECTS, host_formula, in_parts, movable, moving, offload_plan, trace_of
from tests.parity.recomputing import AMPLE, plan_of

WHERE = pytest.mark.parametrize("resident", [False, True], ids=["streamed", "resident"])
WINDOWS = [0, 5_000, 20_000, 1_000_000]


def moved(model: nn.Module, verb: str) -> list[tuple[str, int]]:
    """What went to the host (``offload``) or came back (``reload``), in the order of the events."""
    events = forebay.report(model).timeline.events
    return [(e.what.removeprefix(f"{verb} "), e.nbytes) for e in events if e.what.startswith(f"{verb} ")]


def counters(model: nn.Module) -> int:
    return forebay.report(model).timeline.counters["activations_kept"]


@pytest.mark.thinned(4)
@WHERE
@pytest.mark.parametrize("name", SUBJECTS)
def test_same_numbers_with_all_that_may_be_moved_moved(name: str, resident: bool) -> None:
    """And the host takes what the formula says, once a micro-batch, each storage once whatever looks into it."""
    case = SUBJECTS[name]
    named = movable(trace_of(case, torch.float32))
    plan = offload_plan(case, torch.float32, resident=resident, offload_window=20_000, reload_window=20_000)
    model = assert_same_training(case, torch.float32, steps=1, plan=plan, device_memory=AMPLE, device="cpu")
    assert counters(model) == 0
    passes = 2
    expected = sorted(n for one in named for n in one.nbytes)
    assert expected, "nothing in this model is large enough to be moved"
    assert sorted(n for _, n in moved(model, "offload")) == sorted(expected * passes)
    assert sorted(moved(model, "reload")) == sorted(moved(model, "offload"))
    host = forebay.report(model).timeline.usage(Tier.HOST)
    assert host.at_peak[Kind.ACTIVATION] == host_formula(named)
    assert host.peak == plan.host
    forebay.close(model)


@pytest.mark.thinned(8)
@WHERE
@pytest.mark.parametrize("name", SUBJECTS)
def test_same_numbers_with_copies_made_between_ops(name: str, resident: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch's own copy, however small, where compute has all cores: no lane's thread ever has an activation."""
    case, made_by, right = SUBJECTS[name], set[str](), forebay.device.cpu._copy_bytes

    def noting(here: Any, target: torch.Tensor, source: torch.Tensor) -> None:
        made_by.add(threading.current_thread().name)
        right(here, target, source)

    monkeypatch.setattr("forebay.device.cpu.cores", lambda: 1)
    monkeypatch.setattr("forebay.device.cpu.BRIEF", 0)
    monkeypatch.setattr("forebay.device.cpu._copy_bytes", noting)
    plan = offload_plan(case, torch.float32, resident=resident, offload_window=20_000, reload_window=20_000)
    model = assert_same_training(case, torch.float32, steps=2, plan=plan, device_memory=AMPLE, device="cpu")
    assert moved(model, "offload") and len(moved(model, "offload")) == len(moved(model, "reload"))
    # Parameters that stream may have to wait for an update of theirs: that copy is their lane's.
    assert made_by == {threading.main_thread().name} or (made_by and not resident)
    forebay.close(model)


@given(
    data=st.data(),
    name=st.sampled_from(sorted(SUBJECTS)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    resident=st.booleans(),
    slots=st.integers(1, 3),
    windows=st.tuples(st.sampled_from(WINDOWS), st.sampled_from(WINDOWS)),
)
@settings(max_examples=6, deadline=None)
def test_any_ops_may_be_moved(
    data: st.DataObject, name: str, dtype: torch.dtype, resident: bool, slots: int, windows: tuple[int, int]
) -> None:
    """With an arena that is just large enough, or too small: what has no room stays on the device."""
    case = SUBJECTS[name]
    dtype = dtype if dtype in case.dtypes else torch.float32
    model = case.model(dtype)
    every = movable(trace_of(case, dtype))
    named = data.draw(st.lists(st.sampled_from(every), unique=True)) if every else []
    short = data.draw(st.integers(0, 2)) * 8192
    plan = plan_of(find_blocks(model).model, (), resident=resident, slots=slots)
    arena = max(0, host_formula(named) - short)
    plan = moving(plan, named, arena=arena, offload_window=windows[0], reload_window=windows[1])
    plan = in_parts(plan, lambda: data.draw(SPLITS))
    trained = assert_same_training(case, dtype, steps=2, plan=plan, device_memory=AMPLE, device="cpu")
    forebay.close(trained)


def delayed(name: str, lanes: tuple[Lane, ...], plan: Plan) -> None:
    device = CpuDevice(AMPLE, delays=RandomDelays(seed=2, max_seconds=0.002, lanes=lanes))
    try:
        model = assert_same_training(
            SUBJECTS[name], torch.float32, steps=1, plan=plan, device_memory=AMPLE, device=device
        )
        assert counters(model) == 0
        forebay.close(model)
    finally:
        device.close()


@pytest.mark.thinned(2)
@pytest.mark.parametrize("windows", [(0, 0), (20_000, 20_000), (2**20, 2**20)], ids=str)
@pytest.mark.parametrize("lane", [Lane.H2D, Lane.D2H])
def test_late_transfers_change_nothing(lane: Lane, windows: tuple[int, int]) -> None:
    case = SUBJECTS["llama-tied"]
    plan = offload_plan(
        case, torch.float32, resident=False, slots=2, offload_window=windows[0], reload_window=windows[1]
    )
    delayed("llama-tied", (lane,), plan)


@pytest.mark.parametrize("name", ["t5", "convnet", "used-twice"])
def test_every_transfer_late_by_chance(name: str) -> None:
    plan = offload_plan(
        SUBJECTS[name], torch.float32, resident=False, slots=2, offload_window=20_000, reload_window=20_000
    )
    delayed(name, tuple(Lane), plan)
