"""An update that runs ahead of its step and fails, or is never asked for: the old copy stands, and nothing leaks."""

from __future__ import annotations

import contextlib
import gc
import shutil
import threading
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import forebay
from forebay.arenas import arenas, arenas_of
from forebay.checking import check
from forebay.errors import ConfigError, DiskFull, ForebayError, PlanInvalid, StorageError
from forebay.memory import Tier
from forebay.plans import Plan, Update
from forebay.runtime.blocks import find_blocks
from forebay.runtime.hooks import prepared_session
from forebay.runtime.updates import Updater
from forebay.timeline import Lane
from tests.faults.faulty import Late, Refuses, fill_disk, train_until_refused
from tests.faults.residue import mapped, nothing_left_behind
from tests.faults.test_bad_plans import MACHINE, PLAN, TRACE
from tests.faults.trained import AMPLE, Trained, adamw, disk_plan, network, step
from tests.null.updating import updating

__all__ = ["nothing_left_behind"]

STATES = ("exp_avg", "exp_avg_sq")


def speculating(where: str, folder: Path) -> Plan:
    plan = disk_plan(folder)
    homes = plan.placements
    if where == "host":
        homes = tuple(replace(p, parameters=Tier.HOST, states=Tier.HOST) for p in homes)
    homes = tuple(p.updating(Update.AHEAD) for p in homes)
    sizes = arenas(find_blocks(network()).model, homes, plan.streaming, STATES)
    return replace(plan, placements=homes, host=sizes.host, disk=sizes.disk)


@pytest.fixture(params=["host", "disk"])
def where(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def gate() -> threading.Event:
    """What updates that are going to fail wait for before they do."""
    event = threading.Event()
    event.set()
    return event


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch, gate: threading.Event) -> set[str]:
    """Blocks whose update jobs fail as long as they are in the set."""
    blocks: set[str] = set()
    whole = Updater.run_chunk

    def run_chunk(self: Updater, state: Any, *rest: Any) -> None:
        if state.block.name in blocks:
            gate.wait()
            raise ForebayError(f"no update of {state.block.name} today")
        whole(self, state, *rest)

    monkeypatch.setattr(Updater, "run_chunk", run_chunk)
    return blocks


def test_an_update_that_failed_before_its_step(where: str, failing: set[str], tmp_path: Path) -> None:
    """The step says so, before anything has changed. When it is tried again, it starts from the copy that stands; not
    on disk, where a staging buffer whose bytes were never written is not given to anybody else."""
    run = Trained(speculating(where, tmp_path), tmp_path)
    run.steps(1)
    forebay.synchronize(run.model)
    failing.update(p.block for p in forebay.report(run.model).plan.placements)
    run.backward()
    with pytest.raises(ForebayError, match="no update of"):
        forebay.synchronize(run.model)
    with pytest.raises(ForebayError, match="no update of"):
        run.optimizer.step()
    run.assert_equal()
    failing.clear()
    if where == "host":
        run.optimizer.step()
        run.optimizer.zero_grad()
        step(run.reference, run.plain)
        run.steps(2)
        run.assert_equal()
    run.close()


def test_an_update_that_failed_and_was_never_asked_for(failing: set[str], tmp_path: Path) -> None:
    """A skipped step: all goes on, and who waits for everything is told once."""
    run = Trained(speculating("host", tmp_path), tmp_path)
    run.steps(1)
    forebay.synchronize(run.model)
    failing.add("2")
    run.backward()
    run.optimizer.zero_grad()
    with pytest.raises(ForebayError, match="no update of 2"):
        forebay.synchronize(run.model)
    failing.clear()
    run.steps(2)
    run.assert_equal()
    run.close()


def test_an_update_that_fails_after_its_step(
    where: str, failing: set[str], gate: threading.Event, tmp_path: Path
) -> None:
    """It was taken over while it was queued: like any update that fails, it is told by the next who needs it."""
    run = Trained(speculating(where, tmp_path), tmp_path)
    run.steps(1)
    forebay.synchronize(run.model)
    gate.clear()
    failing.add("1")
    run.backward()
    run.optimizer.step()
    assert run.counter("committed") == 2 * 4
    gate.set()
    with pytest.raises(ForebayError, match="no update of 1"):
        run.backward()
    with pytest.raises(ForebayError, match="no update of 1"):
        forebay.close(run.model)
    run.close()


@pytest.mark.parametrize("file", ["states", "parameters"])
def test_a_disk_that_is_full_ahead_of_the_step(file: str, tmp_path: Path) -> None:
    run = Trained(speculating("disk", tmp_path), tmp_path)
    run.steps(2)
    forebay.synchronize(run.model)
    fill_disk(file)
    run.backward()
    with pytest.raises(DiskFull, match=f"{file}.*No space left"):
        forebay.synchronize(run.model)
    with pytest.raises(DiskFull, match=f"{file}.*No space left"):
        run.optimizer.step()
    if file == "states":  # the file that stands in for the full one reads as zeros
        run.assert_equal()
    with contextlib.suppress(DiskFull):
        forebay.close(run.model)
    run.device.close()


def test_close_between_backward_and_step(where: str, tmp_path: Path) -> None:
    """What ran ahead was never asked for: the model is as the last step left it."""
    run = Trained(speculating(where, tmp_path), tmp_path, Late(Lane.UPDATE))
    run.steps(2)
    run.backward()
    assert run.counter("speculated") > run.counter("committed")
    forebay.close(run.model)
    assert all(torch.equal(p, q) for p, q in zip(run.model.parameters(), run.reference.parameters(), strict=True))
    run.close()


def test_close_with_a_step_that_was_taken_over(where: str, tmp_path: Path) -> None:
    run = Trained(speculating(where, tmp_path), tmp_path, Late(Lane.UPDATE))
    run.steps(3)
    assert run.counter("committed") > 0
    forebay.close(run.model)
    assert all(torch.equal(p, q) for p, q in zip(run.model.parameters(), run.reference.parameters(), strict=True))
    run.close()


@pytest.mark.parametrize("steps", [1, 2])
def test_second_copies_go_when_the_session_does(steps: int, tmp_path: Path) -> None:
    """After an odd number of steps the second copies are the current ones; after an even one the first."""
    before = mapped()
    run = Trained(speculating("host", tmp_path), tmp_path)
    run.steps(steps)
    assert run.counter("committed") == steps * 4
    forebay.close(run.model)
    gc.collect()
    nbytes = sum(p.nbytes for p in run.model.parameters())
    assert mapped() - before < 1.5 * nbytes
    assert all(torch.equal(p, q) for p, q in zip(run.model.parameters(), run.reference.parameters(), strict=True))
    run.close()


def test_nothing_is_handed_out_of_second_copies_where_the_last_checkpoint_has_failed(
    gate: threading.Event, tmp_path: Path
) -> None:
    """It is told when everything else has happened."""
    run = Trained(speculating("host", tmp_path), tmp_path)
    blocks = prepared_session(run.model).store.blocks
    first = {name: state.parameters.read().data_ptr() for name, state in blocks.items()}
    run.steps(1)
    assert run.counter("committed") == len(first) == 4
    gate.clear()
    run.device.submit(Lane.DISK_WRITE, gate.wait)
    forebay.save(run.model, run.optimizer, tmp_path / "kept", step=1, background=True)
    shutil.rmtree(tmp_path / "kept")
    gate.set()
    with pytest.raises(StorageError, match="it was moved or removed"):
        forebay.close(run.model)
    assert {n: min(p.data_ptr() for p in run.model.get_submodule(n).parameters()) for n in first} == first
    assert all(torch.equal(p, q) for p, q in zip(run.model.parameters(), run.reference.parameters(), strict=True))
    run.close()


def test_a_model_that_is_dropped_with_updates_ahead(where: str, tmp_path: Path) -> None:
    run = Trained(speculating(where, tmp_path), tmp_path)
    run.steps(1)
    run.backward()
    gone, device = weakref.ref(run.model), run.device
    del run
    gc.collect()
    assert gone() is None
    assert device.usage().live == 0
    device.close()


def test_backward_that_ends_halfway(where: str, tmp_path: Path) -> None:
    """Blocks behind the fault have run ahead; their outcome is of a step that never comes."""
    run = Trained(speculating(where, tmp_path), tmp_path)
    run.steps(1)
    before = run.counter("speculated")
    handle = run.model[1].register_forward_hook(lambda m, a, out: out.register_hook(fault) and None)

    def fault(gradient: torch.Tensor) -> None:
        raise RuntimeError("in the middle of backward")

    with pytest.raises(RuntimeError, match="in the middle"):
        run.backward()
    handle.remove()
    assert before < run.counter("speculated") < before + 4
    run.assert_equal()
    run.optimizer.zero_grad()
    run.steps(2)
    run.assert_equal()
    assert run.counter("committed") == 3 * 4
    run.close()


@pytest.mark.parametrize("nth", range(3, 60, 7))
def test_a_job_that_no_lane_takes(where: str, nth: int, tmp_path: Path) -> None:
    run = Trained(speculating(where, tmp_path), tmp_path, Refuses(nth))
    train_until_refused(run.model, run.optimizer, run.device)


def test_a_block_that_trains_nothing_is_refused(tmp_path: Path) -> None:
    plan = speculating("host", tmp_path)
    model = network()
    model[2].requires_grad_(False)
    with pytest.raises(ConfigError, match="update ahead for block 2, which trains nothing; set its update to step"):
        forebay.prepare(model, adamw(model), plan=plan, device_memory=AMPLE, device="cpu")


def test_second_copies_need_their_room(tmp_path: Path) -> None:
    """A plan that promises less host memory than two copies take is refused before anything is opened."""
    plan = speculating("host", tmp_path)
    short = replace(plan, host=plan.host - 1)
    model = network()
    with pytest.raises(ConfigError, match="made for another model or optimizer"):
        forebay.prepare(model, adamw(model), plan=short, device_memory=AMPLE, device="cpu")


def test_the_checker_counts_second_copies() -> None:
    """A plan that promises no room for them is refused, and one that does is proven."""
    plan = updating(PLAN, Update.AHEAD, ("b1",))
    with pytest.raises(PlanInvalid, match="the plan predicts a host peak of") as caught:
        check(TRACE, MACHINE, plan)
    assert caught.value.subject == "host"
    sizes = arenas_of(TRACE.model, plan, TRACE.state_names)
    check(TRACE, MACHINE, replace(plan, host=sizes.host, disk=sizes.disk))


def test_a_plan_keeps_what_it_speculates_on(tmp_path: Path) -> None:
    plan = speculating("host", tmp_path)
    assert Plan.from_json(plan.to_json()) == plan
