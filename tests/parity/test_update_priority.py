"""Updates that run beside compute leave the cores to it; those that are waited for do not."""

from __future__ import annotations

import os
import sys
import threading

import pytest
import torch

from benchmarks.fasthost.queued import QueuedDevice
from benchmarks.fasthost.timed import AMPLE, TimedModel, plan_by_hand
from forebay import api
from forebay.memory import Tier
from forebay.priority import STEP
from forebay.timeline import Lane

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own here")

LAYERS, ELEMENTS = 2, 128 * TimedModel.WIDTH


def nice() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@pytest.mark.parametrize("overlap", [True, False])
def test_threads_of_updates(overlap: bool) -> None:
    model, own = TimedModel(LAYERS, ELEMENTS), nice()
    device = QueuedDevice(model.pace.compute)
    plan = plan_by_hand(model, states=Tier.HOST, overlap=overlap, chunk=ELEMENTS)
    given = torch.optim.AdamW(model.parameters())
    _, optimizer = api.prepare(model, given, plan=plan, device_memory=AMPLE, device=device)
    for _ in range(2):
        model.read(model(torch.zeros(1, TimedModel.WIDTH)).sum())
        model(torch.zeros(1, TimedModel.WIDTH)).backward()
        optimizer.step()
        optimizer.zero_grad()
    api.synchronize(model)
    team = [thread for thread in threading.enumerate() if thread.name.startswith("forebay-team")]
    found = [os.getpriority(os.PRIO_PROCESS, thread.native_id or 0) for thread in team]
    found.append(device.submit(Lane.UPDATE, nice).wait())
    others = {device.submit(lane, nice).wait() for lane in (Lane.H2D, Lane.D2H, Lane.NORM)}
    api.close(model)
    device.close()
    model.pace.compute.close()
    assert set(found) == {min(19, own + STEP) if overlap else own}
    assert others == {nice()} == {own}
