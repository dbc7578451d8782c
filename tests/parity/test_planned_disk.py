"""Plans whose activations go to disk because the host has no room: made by a planner, kept by the runtime."""

from __future__ import annotations

from pathlib import Path

import torch

import forebay
from forebay.arenas import DISK_BLOCK
from forebay.budgets import Budget, DiskBudget
from forebay.checking import check
from forebay.memory import Kind, Tier
from forebay.treatments import Fate
from forebay.units import MiB
from tests.null.planning import machine
from tests.parity.compare import assert_same_training
from tests.parity.models import CASES
from tests.parity.offloading import larger, trace_of
from tests.parity.recomputing import AMPLE
from tests.parity.test_offload import counters, moved

CASE = larger(CASES["llama"], 32)


def test_the_planner_s_plan_trains_with_the_same_numbers(tmp_path: Path) -> None:
    """The host has room for the buffers on the way to disk and a part of what moves: the rest is on disk."""
    trace, on = trace_of(CASE, torch.float32), machine(kind="cpu", disk=1e9)
    everything = forebay.plan(trace, on, Budget(AMPLE, AMPLE), "offload-all")
    host = DISK_BLOCK + 2 * MiB
    assert host < everything.host and everything.disk == 0
    plan = forebay.plan(trace, on, Budget(AMPLE, host, None, DiskBudget(str(tmp_path), AMPLE)), "offload-all")
    check(trace, on, plan)
    fates = {t.fate for selection in plan.activations for t in selection.treatments}
    assert fates == {Fate.OFFLOAD, Fate.DISK} and plan.host <= host
    model = assert_same_training(
        CASE,
        torch.float32,
        steps=1,
        plan=plan,
        device_memory=AMPLE,
        host_memory=host,
        disk=str(tmp_path),
        device="cpu",
    )
    assert counters(model) == 0 and moved(model, "write")
    tiers = {t.tier: t for t in forebay.report(model).timeline.tiers}
    assert tiers[Tier.DISK].at_peak[Kind.ACTIVATION] == plan.streaming.disk_activations == plan.disk
    assert tiers[Tier.HOST].peak == plan.host
    forebay.close(model)
