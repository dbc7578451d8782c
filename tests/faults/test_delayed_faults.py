"""A delayed update that fails: whoever needs what it should have made is told, and nothing leaks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay.device.cpu import CpuDevice
from forebay.errors import ForebayError
from forebay.plans import Plan
from forebay.runtime.updates import Updater
from forebay.units import MiB
from tests.faults.faulty import Refuses, train_until_refused
from tests.faults.residue import nothing_left_behind
from tests.faults.trained import AMPLE, Trained, adamw, network, step

__all__ = ["nothing_left_behind"]


def delayed() -> Plan:
    """From the second step on."""
    model = network()
    model, _ = forebay.prepare(model, adamw(model), device_memory=AMPLE, policy="zero-offload-delayed", device="cpu")
    made = forebay.report(model).plan
    forebay.close(model)
    return replace(made, streaming=replace(made.streaming, delay_after=1))


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Blocks whose update jobs fail as long as they are in the set."""
    blocks: set[str] = set()
    whole = Updater.run_chunk

    def run_chunk(self: Updater, state: Any, *rest: Any) -> None:
        if state.block.name in blocks:
            raise ForebayError(f"no update of {state.block.name} today")
        whole(self, state, *rest)

    monkeypatch.setattr(Updater, "run_chunk", run_chunk)
    return blocks


def test_an_update_that_fails_under_the_next_step(failing: set[str], tmp_path: Path) -> None:
    """The next step reads what the one before it has made and knows of nothing; the one after it needs this one's."""
    run = Trained(delayed(), tmp_path)
    run.steps(2)
    forebay.synchronize(run.model)
    failing.add("1")
    step(run.model, run.optimizer)
    step(run.model, run.optimizer)
    with pytest.raises(ForebayError, match="no update of 1"):
        step(run.model, run.optimizer)
    failing.clear()
    with pytest.raises(ForebayError, match="no update of 1"):
        forebay.parameters(run.model)["1.weight"]
    with pytest.raises(ForebayError, match="no update of 1"):
        forebay.close(run.model)
    assert not run.model[0].weight.isnan().any()
    run.close()


def test_an_update_that_fails_is_told_to_who_evaluates(failing: set[str], tmp_path: Path) -> None:
    run = Trained(delayed(), tmp_path)
    run.steps(2)
    forebay.synchronize(run.model)
    failing.add("2")
    step(run.model, run.optimizer)
    with pytest.raises(ForebayError, match="no update of 2"):
        run.model.state_dict()
    with pytest.raises(ForebayError, match="no update of 2"):
        forebay.close(run.model)
    run.close()


@pytest.mark.parametrize("nth", [30, 40, 50])
def test_a_job_that_a_lane_does_not_take(nth: int, tmp_path: Path) -> None:
    device = CpuDevice(8 * MiB, delays=Refuses(nth))
    plan, model = delayed(), network()
    model, optimizer = forebay.prepare(model, adamw(model), plan=plan, device_memory=AMPLE, device=device)
    train_until_refused(model, optimizer, device)
