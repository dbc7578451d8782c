"""An update in backward that fails, a backward that ends halfway: told at once, nothing hangs, nothing leaks."""

from __future__ import annotations

import contextlib
import gc
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import forebay
from forebay.arenas import arenas, gradient_nbytes
from forebay.errors import DiskFull, ForebayError, GradientUsedUp
from forebay.memory import Tier
from forebay.plans import Placement, Plan, Update
from forebay.runtime.blocks import find_blocks
from forebay.runtime.resident import ResidentUpdates
from forebay.runtime.updates import Updater
from tests.faults.faulty import Refuses, fill_disk, train_until_refused
from tests.faults.residue import nothing_left_behind
from tests.faults.trained import WIDTH, Trained, disk_plan, network, step

__all__ = ["nothing_left_behind"]

STATES = ("exp_avg", "exp_avg_sq")


def in_backward(where: str, folder: Path, slots: int = 1) -> Plan:
    plan = disk_plan(folder)
    homes = plan.placements
    if where == "host":
        homes = tuple(replace(p, parameters=Tier.HOST, states=Tier.HOST) for p in homes)
    if where == "device":
        homes = tuple(Placement(p.block, *[Tier.DEVICE] * 3) for p in homes)
    model = find_blocks(network()).model
    homes = tuple(p.updating(Update.BACKWARD) for p in homes)
    largest = max(map(gradient_nbytes, model.blocks))
    streaming = replace(plan.streaming, gradient_slots=(largest,) * slots)
    sizes = arenas(model, homes, streaming, STATES)
    device = plan.budget.device
    return replace(plan, placements=homes, streaming=streaming, device=device, host=sizes.host, disk=sizes.disk)


@pytest.fixture(params=["host", "disk"])
def where(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["host", "disk", "device"])
def anywhere(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def twice(run: Trained) -> None:
    for _ in range(2):
        step(run.model, run.optimizer)


@pytest.mark.parametrize("slots", [1, 4])
def test_an_update_that_fails(where: str, slots: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With one slot the next gradient waits for it and tells; with a slot for each block whoever needs the parameters
    does: the next forward at the latest."""
    run = Trained(in_backward(where, tmp_path, slots), tmp_path)
    run.steps(1)
    forebay.synchronize(run.model)
    whole = Updater.run_chunk

    def run_chunk(self: Updater, state: Any, *rest: Any) -> None:
        if state.block.name == "2":
            raise ForebayError("no update of 2 today")
        whole(self, state, *rest)

    monkeypatch.setattr(Updater, "run_chunk", run_chunk)
    with pytest.raises(ForebayError, match="no update of 2"):
        twice(run)
    with contextlib.suppress(ForebayError):
        forebay.close(run.model)
    run.device.close()


def test_an_update_on_the_device_that_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Backward tells, and nobody goes on from what may be half a step; the memory comes back."""
    run = Trained(in_backward("device", tmp_path), tmp_path)
    run.steps(1)
    whole = ResidentUpdates.run

    def failing(self: ResidentUpdates, state: Any, *rest: Any) -> None:
        whole(self, state, *rest)
        if state.block.name == "1":
            raise ForebayError("no update of 1 today")

    monkeypatch.setattr(ResidentUpdates, "run", failing)
    with pytest.raises(ForebayError, match="no update of 1 today"):
        run.backward()
    with pytest.raises(GradientUsedUp):
        run.optimizer.step()
    run.optimizer.zero_grad()
    with pytest.raises(GradientUsedUp, match=r"was updated in backward and is read again before optimizer\.step"):
        run.backward()
    # torch holds something of a backward that has failed until the next one, in plain PyTorch too.
    torch.ones(1, requires_grad=True).sum().backward()
    run.close()


@pytest.mark.parametrize("file", ["states", "parameters"])
def test_a_disk_that_is_full(file: str, tmp_path: Path) -> None:
    run = Trained(in_backward("disk", tmp_path, 4), tmp_path)
    run.steps(1)
    forebay.synchronize(run.model)
    fill_disk(file)
    with pytest.raises(DiskFull, match=f"{file}.*No space left"):
        twice(run)
    with contextlib.suppress(DiskFull):
        forebay.close(run.model)
    run.device.close()


def test_backward_that_ends_halfway(anywhere: str, tmp_path: Path) -> None:
    """Blocks behind the fault are updated, the others are not: no step, and nothing else, goes on from there."""
    run = Trained(in_backward(anywhere, tmp_path), tmp_path)
    run.steps(1)
    handle = run.model[1].register_forward_hook(lambda m, a, out: out.register_hook(fault) and None)

    def fault(gradient: torch.Tensor) -> None:
        raise RuntimeError("in the middle of backward")

    with pytest.raises(RuntimeError, match="in the middle"):
        run.backward()
    handle.remove()
    run.optimizer.zero_grad()
    with pytest.raises(GradientUsedUp, match=r"was updated in backward and is read again before optimizer\.step"):
        run.backward()
    with pytest.raises(GradientUsedUp, match="dropped or replaced"):
        run.optimizer.step()
    forebay.close(run.model)
    run.device.close()


def test_close_between_backward_and_step(anywhere: str, tmp_path: Path) -> None:
    """The parameters are those of the step that was made."""
    run = Trained(in_backward(anywhere, tmp_path), tmp_path)
    run.steps(1)
    run.backward()
    run.reference(torch.ones(2, WIDTH)).square().mean().backward()
    run.plain.step()
    forebay.close(run.model)
    assert all(torch.equal(p, q) for p, q in zip(run.model.parameters(), run.reference.parameters(), strict=True))
    run.device.close()


def test_a_model_that_is_dropped_in_the_middle(anywhere: str, tmp_path: Path) -> None:
    run = Trained(in_backward(anywhere, tmp_path), tmp_path)
    run.steps(1)
    run.backward()
    gone, device = weakref.ref(run.model), run.device
    del run
    gc.collect()
    assert gone() is None
    assert device.usage().live == 0
    device.close()


@pytest.mark.parametrize("nth", range(3, 45, 7))
def test_a_job_that_no_lane_takes(where: str, nth: int, tmp_path: Path) -> None:
    run = Trained(in_backward(where, tmp_path), tmp_path, Refuses(nth))
    train_until_refused(run.model, run.optimizer, run.device)
