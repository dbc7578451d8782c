"""Blocks on disk that are updated ahead of their step while checkpoints name one of their places there."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

import forebay
from forebay.arenas import arenas_of
from forebay.device.cpu import CpuDevice
from forebay.device.delays import RandomDelays
from forebay.memory import Tier
from forebay.plans import Plan, Update
from forebay.runtime.blocks import find_blocks
from tests.parity.content import content, expect_same
from tests.parity.speculating import AMPLE, MIXED, counters, speculating
from tests.parity.test_delays import STATES

CASE = MIXED
LATE = 0.004


def plan_for(dtype: torch.dtype) -> Plan:
    """Every block that trains is updated ahead, in turn wherever one can be; what is on disk has one place more."""
    plan = speculating(CASE, dtype, disk=True)
    plan = replace(plan, streaming=replace(plan.streaming, disk_copies=2))
    sizes = arenas_of(find_blocks(CASE.model(dtype)).model, plan, STATES)
    assert sizes.disk_other_parameters and sizes.disk_other_states
    # Three of each: the current copy, the spare one, and that of a checkpoint.
    assert sizes.disk == 3 * (sizes.disk_other_parameters + sizes.disk_other_states)
    assert all(p.update is Update.AHEAD for p in plan.placements if Tier.DISK in (p.parameters, p.states))
    return replace(plan, host=sizes.host, disk=sizes.disk)


class Trained:
    """A model in training, which is saved in ``kept``."""

    def __init__(self, dtype: torch.dtype, kept: Path, **how: Any) -> None:
        self.dtype, self.kept = dtype, kept
        model = CASE.model(dtype)
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, fused=True)
        batch = None if "plan" in how else CASE.inputs(0, dtype)
        self.model, self.optimizer = forebay.prepare(model, optimizer, batch, device_memory=AMPLE, **how)

    def does(self, what: str, number: int) -> None:
        """One of the things that a loop does; ``number`` is its batch, or the step that is saved."""
        if what in ("step", "clip", "skip"):
            self.model(**CASE.inputs(number, self.dtype))["loss"].backward()
            if what == "clip":  # what was updated ahead was updated with other gradients
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1e-3)
            if what != "skip":
                self.optimizer.step()
            self.optimizer.zero_grad()
        elif what in ("save", "background"):
            forebay.save(self.model, self.optimizer, self.kept, step=number, background=what == "background")
        elif what == "resume":
            forebay.resume(self.model, self.optimizer, self.kept)

    def content(self) -> dict[str, torch.Tensor]:
        return content(self.model, self.optimizer)


def expect_as_copied(dtype: torch.dtype, loop: Sequence[str], seed: int, folder: Path) -> tuple[int, int, int]:
    """``loop`` with jobs that come late, saved in place, beside the same one that keeps everything on the host and is
    copied. Whenever the loop looks, another model goes on from what is in the folder."""
    device = CpuDevice(AMPLE, delays=RandomDelays(seed, LATE))
    (folder / "disk").mkdir()
    how = {"plan": plan_for(dtype), "disk": f"{folder / 'disk'}:64MiB", "crash_safe": folder / "kept"}
    run = Trained(dtype, folder / "kept", device=device, **how)
    reference, reader = (
        Trained(dtype, folder / name, device="cpu", policy="zero-offload") for name in ("copied", "looked")
    )
    saved: dict[str, torch.Tensor] = {}
    for number, what in enumerate(["save", *loop, "look"]):
        run.does(what, number)
        reference.does(what, number)
        if what in ("save", "background"):
            saved = reference.content()
        if what == "look":
            forebay.synchronize(run.model)  # a save in the background, too
            shutil.rmtree(folder / "looked", ignore_errors=True)
            shutil.copytree(folder / "kept", folder / "looked")
            reader.does("resume", 0)
            expect_same(reader.content(), saved)
    expect_same(run.content(), reference.content())
    counted = counters(run.model)
    for one in (run, reference, reader):
        forebay.close(one.model)
    device.close()
    return counted


THINGS = ("step", "step", "step", "clip", "skip", "save", "background", "background", "resume", "look")


@given(
    loop=st.lists(st.sampled_from(THINGS), min_size=4, max_size=14),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=10)
def test_whatever_a_loop_does(loop: list[str], dtype: torch.dtype, seed: int) -> None:
    with TemporaryDirectory() as folder:
        _, committed, redone = expect_as_copied(dtype, loop, seed, Path(folder))
    event(f"committed: {committed > 0}, redone: {redone > 0}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_updates_are_ahead_behind_every_save(dtype: torch.dtype, tmp_path: Path) -> None:
    """All of them but that of a block in the first step, which has a parameter that gets no gradient: a save in between
    takes none of their places."""
    loop = ["step", "step", "background", "step", "save", "step", "step", "look", "step", "background", "step", "look"]
    speculated, committed, redone = expect_as_copied(dtype, loop, 0, tmp_path)
    blocks = sum(p.update is Update.AHEAD for p in plan_for(dtype).placements)
    assert blocks > 3 and speculated == committed == loop.count("step") * blocks - 1
    assert redone == 0
