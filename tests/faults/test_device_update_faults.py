"""Updates on the device that fail, that nobody asked for any more, or that a plan cannot have."""

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
import forebay.optim
from forebay.arenas import Sizer, arenas
from forebay.checking import check
from forebay.errors import ConfigError, DiskFull, ForebayError, PlanInvalid
from forebay.memory import Tier
from forebay.plans import Plan, Update
from forebay.runtime.blocks import find_blocks
from forebay.runtime.hooks import session_of
from forebay.runtime.updates import Updater
from forebay.timeline import Lane
from tests.faults.faulty import Late, Refuses, fill_disk, train_until_refused
from tests.faults.residue import mapped, nothing_left_behind
from tests.faults.test_bad_plans import MACHINE, PLAN, TRACE
from tests.faults.trained import AMPLE, Trained, adamw, disk_plan, network
from tests.null.updating import updating

__all__ = ["nothing_left_behind"]

STATES = ("exp_avg", "exp_avg_sq")


def on_device(where: str, folder: Path) -> Plan:
    """Every block at home on the host or on disk, updated on the device two chunks at a time."""
    plan = disk_plan(folder)
    homes = plan.placements
    if where == "host":
        homes = tuple(replace(p, parameters=Tier.HOST, states=Tier.HOST) for p in homes)
    names, model = tuple(p.block for p in homes), find_blocks(network()).model
    window = Sizer(model, STATES, plan.streaming.update_chunk, plan.streaming.masters).update_window(names, 2)
    streaming = replace(plan.streaming, update_window=window)
    homes = tuple(p.updating(Update.DEVICE) for p in homes)
    sizes = arenas(model, homes, streaming, STATES)
    return replace(
        plan,
        placements=homes,
        streaming=streaming,
        device=plan.device + window,
        host=sizes.host,
        disk=sizes.disk,
    )


@pytest.fixture(params=["host", "disk"])
def where(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Blocks whose updates on the device fail as long as they are in the set."""
    blocks: set[str] = set()
    whole = Updater.run_cell

    def run_cell(self: Updater, state: Any, *rest: Any) -> None:
        if state.block.name in blocks:
            raise ForebayError(f"no update of {state.block.name} today")
        whole(self, state, *rest)

    monkeypatch.setattr(Updater, "run_cell", run_cell)
    return blocks


def test_same_numbers_as_plain_pytorch(where: str, tmp_path: Path) -> None:
    run = Trained(on_device(where, tmp_path), tmp_path)
    run.steps(3)
    run.assert_equal()
    run.close()


def test_an_update_that_fails_is_told_by_the_next_who_needs_it(where: str, failing: set[str], tmp_path: Path) -> None:
    """And nothing of it is written home: the old values stand."""
    run = Trained(on_device(where, tmp_path), tmp_path)
    run.steps(1)
    forebay.synchronize(run.model)
    home = session_of(run.model).session.store.blocks["1"].current
    before = [content.read().clone() for content in (home.parameters, home.states)]
    failing.add("1")
    run.backward()
    run.optimizer.step()
    with pytest.raises(ForebayError, match="no update of 1"):
        run.backward()
    home.parameters.written = home.states.written = None  # not to be told again
    assert all(map(torch.equal, before, (home.parameters.read(), home.states.read())))
    with contextlib.suppress(ForebayError):
        forebay.close(run.model)
    run.device.close()


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    run = Trained(on_device("disk", tmp_path), tmp_path)
    run.steps(2)
    forebay.synchronize(run.model)
    fill_disk("states")
    run.backward()
    run.optimizer.step()
    with pytest.raises(DiskFull, match=r"states.*No space left"):
        forebay.synchronize(run.model)
    with contextlib.suppress(DiskFull):
        forebay.close(run.model)
    run.device.close()


@pytest.mark.thinned(2)
@pytest.mark.parametrize("lane", [Lane.H2D, Lane.D2H, Lane.DEVICE_UPDATE])
def test_close_with_updates_that_are_not_queued_yet(where: str, lane: Lane, tmp_path: Path) -> None:
    """They were asked for: the parameters are those after the step."""
    run = Trained(on_device(where, tmp_path), tmp_path, Late(lane))
    run.steps(2)
    forebay.close(run.model)
    assert all(torch.equal(p, q) for p, q in zip(run.model.parameters(), run.reference.parameters(), strict=True))
    run.close()


def test_a_model_that_is_dropped_with_updates_that_are_not_queued_yet(where: str, tmp_path: Path) -> None:
    before = mapped()
    run = Trained(on_device(where, tmp_path), tmp_path)
    run.steps(1)
    gone, device = weakref.ref(run.model), run.device
    del run
    gc.collect()
    assert gone() is None
    assert device.usage().live == 0
    assert mapped() == before
    device.close()


def test_the_window_goes_when_the_session_does(tmp_path: Path) -> None:
    """Although the optimizer is still there, which holds the session and its updater."""
    run = Trained(on_device("host", tmp_path), tmp_path)
    run.steps(1)
    nbytes = forebay.report(run.model).plan.streaming.update_window
    windows = [t for t in gc.get_objects() if isinstance(t, torch.Tensor) and t.nbytes == nbytes and t.dim() == 1]
    assert len(windows) == 1
    gone = weakref.ref(windows.pop().untyped_storage())
    assert gone() is not None
    run.close()
    assert run.optimizer is not None and gone() is None


@pytest.mark.parametrize("nth", range(5, 120, 14))
def test_a_job_that_no_lane_takes(where: str, nth: int, tmp_path: Path) -> None:
    run = Trained(on_device(where, tmp_path), tmp_path, Refuses(nth))
    train_until_refused(run.model, run.optimizer, run.device)


def test_a_block_that_trains_nothing_is_refused(tmp_path: Path) -> None:
    plan = on_device("host", tmp_path)
    model = network()
    model[2].requires_grad_(False)
    with pytest.raises(ConfigError, match="update device for block 2, which trains nothing; set its update to step"):
        forebay.prepare(model, adamw(model), plan=plan, device_memory=AMPLE, device="cpu")


def test_states_in_fewer_bits_are_refused(tmp_path: Path) -> None:
    """They are widened on the device, which the window has no room for."""
    model = network()
    optimizer = forebay.optim.AdamW(model.parameters(), moments="8bit")
    with pytest.raises(ConfigError, match=r"updates block 0 on the device.*states in fewer bits"):
        forebay.prepare(model, optimizer, plan=on_device("host", tmp_path), device_memory=AMPLE, device="cpu")


def test_a_window_is_needed_with_room_for_a_chunk(tmp_path: Path) -> None:
    plan = on_device("host", tmp_path)
    with pytest.raises(ConfigError, match="has no update_window"):
        replace(plan, streaming=replace(plan.streaming, update_window=0))
    with pytest.raises(ConfigError, match="update_window must be 0 bytes or more"):
        replace(plan.streaming, update_window=-1)
    # A chunk of 2,048 elements: two states, the parameters and the gradients in fp32.
    least = 2048 * (2 * 4 + 4 + 4)
    short = replace(plan, streaming=replace(plan.streaming, update_window=least - 1))
    model = network()
    with pytest.raises(ConfigError, match=f"update_window is {least - 1} bytes and one chunk .* takes {least}"):
        forebay.prepare(model, adamw(model), plan=short, device_memory=AMPLE, device="cpu")


def test_the_checker_refuses_a_window_without_room_for_a_chunk() -> None:
    plan = updating(PLAN, Update.DEVICE, ("b1",), streaming=replace(PLAN.streaming, update_window=1))
    with pytest.raises(PlanInvalid, match="block b1 is updated on the device, where a chunk takes up to") as caught:
        check(TRACE, MACHINE, plan)
    assert caught.value.subject == "b1"


def test_a_plan_keeps_what_it_updates_on_the_device(tmp_path: Path) -> None:
    plan = on_device("host", tmp_path)
    assert Plan.from_json(plan.to_json()) == plan
