"""What is at home in memory is saved while the next steps run, and is what it was when the save was asked for."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import forebay
from forebay.arenas import arenas_of
from forebay.device.base import Delays
from forebay.device.cpu import CpuDevice
from forebay.errors import StorageError
from forebay.memory import Tier
from forebay.plans import Plan, Update
from forebay.runtime.blocks import find_blocks
from forebay.timeline import Lane
from forebay.units import MiB
from tests.parity.content import content, expect_same
from tests.parity.in_place import MOMENTS, InPlace, adamw, states_on_disk
from tests.parity.models import CASES, Case

STEPS = 4
AMPLE = 64 * MiB


class SlowSaves(Delays):
    """Checkpoints that are on their way for a while."""

    def __init__(self, seconds: float = 0.02) -> None:
        self._seconds = seconds

    def seconds(self, lane: Lane, what: str) -> float:
        return self._seconds if what == "checkpoint" else 0.0


def stream(model: nn.Module) -> Plan:
    model, _ = forebay.prepare(model, adamw(model), device_memory=AMPLE, policy="stream", device="cpu")
    made = forebay.report(model).plan
    forebay.close(model)
    # As on a device of its own: updates may be queued when a step returns.
    return replace(made, streaming=replace(made.streaming, overlap_update=True, update_chunk=2048))


def ahead(model: nn.Module) -> Plan:
    """Every block is updated ahead of its step, into a second copy."""
    plan = stream(model)
    homes = tuple(p if p.resident else p.updating(Update.AHEAD) for p in plan.placements)
    made = replace(plan, placements=homes)
    return replace(made, host=arenas_of(find_blocks(model).model, made, MOMENTS).host)


def in_backward(model: nn.Module) -> Plan:
    plan = stream(model)
    largest = max(block.gradient_nbytes for block in find_blocks(model).model.blocks) + 4096
    streaming = replace(plan.streaming, gradient_slots=(largest,))
    homes = tuple(p.updating(Update.BACKWARD) for p in plan.placements)
    made = replace(plan, placements=homes, streaming=streaming)
    return replace(made, host=arenas_of(find_blocks(model).model, made, MOMENTS).host)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, case: Case, number: int) -> None:
    model(**case.inputs(number, torch.float32))["loss"].backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    ("name", "make"), [("llama", stream), ("convnet", stream), ("llama", ahead), ("llama", in_backward)]
)
def test_a_checkpoint_is_what_was_there_although_steps_go_on(name: str, make: Any, tmp_path: Path) -> None:
    case = CASES[name]
    plan = make(case.model(torch.float32))
    model = case.model(torch.float32)
    wanted = []
    model, optimizer = forebay.prepare(model, adamw(model), plan=plan, device_memory=AMPLE, device="cpu")
    for number in range(STEPS):
        step(model, optimizer, case, number)
        wanted.append(content(model, optimizer))
    forebay.close(model)

    device = CpuDevice(AMPLE, delays=SlowSaves())
    model = case.model(torch.float32)
    model, optimizer = forebay.prepare(model, adamw(model), plan=plan, device_memory=AMPLE, device=device)
    for number in range(STEPS):
        step(model, optimizer, case, number)
        forebay.save(model, optimizer, tmp_path / str(number), step=number, background=True)
        if number % 2:
            forebay.synchronize(model)  # else the next step begins while it is on its way
    peaks = forebay.report(model).timeline.peaks
    assert peaks[Tier.HOST] <= plan.host and not peaks[Tier.DISK]
    forebay.close(model)
    device.close()

    model = case.model(torch.float32)
    model, optimizer = forebay.prepare(model, adamw(model), policy="stream", device_memory=AMPLE, device="cpu")
    for number in range(STEPS):
        assert forebay.resume(model, optimizer, tmp_path / str(number)).step == number
        expect_same(wanted[number], content(model, optimizer))
    forebay.close(model)


def test_whoever_writes_waits_for_a_checkpoint_that_is_on_its_way(tmp_path: Path) -> None:
    case = CASES["llama"]
    device = CpuDevice(AMPLE, delays=SlowSaves(0.05))
    model = case.model(torch.float32)
    plan = stream(case.model(torch.float32))
    model, optimizer = forebay.prepare(model, adamw(model), plan=plan, device_memory=AMPLE, device=device)
    step(model, optimizer, case, 0)
    before = content(model, optimizer)
    state = optimizer.state_dict()
    forebay.save(model, optimizer, tmp_path / "one", step=1, background=True)
    model.load_state_dict({n: torch.zeros_like(v) for n, v in forebay.parameters(model).items()}, strict=False)
    step(model, optimizer, case, 1)
    forebay.save(model, optimizer, tmp_path / "two", step=2, background=True)
    optimizer.load_state_dict(state)
    # And a resume first lets the one before end.
    assert forebay.resume(model, optimizer, tmp_path / "one").step == 1
    expect_same(before, content(model, optimizer))
    forebay.close(model)
    device.close()


def test_a_folder_is_the_one_that_it_was_when_the_save_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES["llama"]
    device = CpuDevice(AMPLE, delays=SlowSaves(0.05))
    model = case.model(torch.float32)
    model, optimizer = forebay.prepare(model, adamw(model), policy="stream", device_memory=AMPLE, device=device)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    forebay.save(model, optimizer, "checkpoint", step=1, background=True)
    monkeypatch.chdir(tmp_path / "elsewhere")
    forebay.synchronize(model)
    assert forebay.resume(model, optimizer, tmp_path / "checkpoint").step == 1
    forebay.close(model)
    device.close()


def test_a_checkpoint_that_fails_on_its_way_is_told_and_training_goes_on(tmp_path: Path) -> None:
    case = CASES["llama"]
    device = CpuDevice(AMPLE, delays=SlowSaves())
    model = case.model(torch.float32)
    plan = stream(case.model(torch.float32))
    model, optimizer = forebay.prepare(model, adamw(model), plan=plan, device_memory=AMPLE, device=device)
    folder = tmp_path / "kept"
    step(model, optimizer, case, 0)
    forebay.save(model, optimizer, folder, step=1)
    before = content(model, optimizer)
    for tell in (forebay.synchronize, lambda model: forebay.save(model, optimizer, folder, step=2)):
        forebay.save(model, optimizer, folder, step=2, background=True)
        shutil.rmtree(folder / "generation-00000002")
        step(model, optimizer, case, 1)
        with pytest.raises(StorageError, match="it was moved or removed"):
            tell(model)
    other = case.model(torch.float32)
    other, its = forebay.prepare(other, adamw(other), policy="stream", device_memory=AMPLE, device="cpu")
    shutil.copytree(folder, tmp_path / "copy")
    assert forebay.resume(other, its, tmp_path / "copy").step == 1
    expect_same(before, content(other, its))
    forebay.close(other)
    forebay.save(model, optimizer, folder, step=3)
    forebay.close(model)
    device.close()


def test_parameters_in_memory_are_copied_beside_states_that_stay(tmp_path: Path) -> None:
    run = InPlace(CASES["llama"], torch.float32, tmp_path, states_on_disk)
    parameters = 4 * sum(p.numel() for p in CASES["llama"].model(torch.float32).parameters())
    for number in range(3):
        run.steps(range(number, number + 1))
        assert run.save(number, background=True) == parameters
    run.steps(range(3, 4))
    run.close()
    never = InPlace(CASES["llama"], torch.float32, tmp_path, states_on_disk)
    never.steps(range(3))
    wanted = never.content()
    assert never.resume() == 2
    expect_same(wanted, never.content())
    never.close()
