"""Loops that train, save, go back and look at what is in the folder, beside the same loop that copies everything."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import forebay
from forebay.device.cpu import CpuDevice
from forebay.device.delays import RandomDelays
from forebay.plans import Plan
from tests.parity.content import content, expect_same
from tests.parity.models import Case
from tests.parity.speculating import AMPLE, counters

__all__ = ["THINGS", "USED_UP", "expect_as_copied"]

LATE = 0.004
"""Seconds by which a job may be late."""

THINGS = ("step", "step", "step", "twice", "clip", "skip", "save", "background", "background", "resume", "look")
"""What a loop does."""

USED_UP = ("step", "step", "step", "save", "background", "background", "resume", "look")
"""What one does whose gradients are used up in backward."""


class Trained:
    """A model of ``case`` in training, which is saved in ``kept``."""

    def __init__(self, case: Case, dtype: torch.dtype, kept: Path, **how: Any) -> None:
        self.case, self.dtype, self.kept = case, dtype, kept
        model = case.model(dtype)
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, fused=True)
        self.model, self.optimizer = forebay.prepare(model, optimizer, device_memory=AMPLE, **how)

    def does(self, what: str, number: int) -> None:
        """One of ``THINGS`` but for a look; ``number`` is its batch, or the step that is saved."""
        if what in ("step", "twice", "clip", "skip"):
            for batch in range(number, number + 1 + (what == "twice")):
                self.model(**self.case.inputs(batch, self.dtype))["loss"].backward()
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


def expect_as_copied(
    case: Case, dtype: torch.dtype, plan: Plan, loop: Sequence[str], seed: int, folder: Path
) -> tuple[int, int, int]:
    """``loop`` under ``plan`` with jobs that come late, saved in place where that has two places on disk, beside the
    same one that keeps everything on the host, updates it at its step and is copied. Whenever the loop looks, another
    model goes on from what is in the folder. Returns the ``counters`` of updates ahead of their step."""
    device = CpuDevice(AMPLE, delays=RandomDelays(seed, LATE))
    how: dict[str, Any] = {"plan": plan, "device": device}
    if plan.disk:
        (folder / "disk").mkdir()
        how["disk"] = f"{folder / 'disk'}:{plan.disk}B"
        if plan.streaming.disk_copies > 1:
            how["crash_safe"] = folder / "kept"
    run = Trained(case, dtype, folder / "kept", **how)
    reference, reader = (
        Trained(case, dtype, folder / name, device="cpu", policy="zero-offload") for name in ("copied", "looked")
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
    live = device.usage().live
    device.close()
    assert live == 0
    return counted
