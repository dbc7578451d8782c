"""A run whose disk tier is spread over two folders: the same bits as in one, within the bytes of each folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import forebay
from forebay.calls import Calls
from forebay.errors import DiskFull, DoesNotFit
from forebay.memory import Tier
from forebay.plans import Plan
from forebay.reporting.table import closing_table
from forebay.runtime.blocks import find_blocks
from forebay.units import MiB
from tests.parity.speculating import AMPLE, Run, speculating
from tests.parity.test_delays import NARROW

STEPS = 3
FLOAT = torch.float32


def plan_with_calls_in_flight() -> Plan:
    plan = speculating(NARROW, FLOAT, disk=True)
    return replace(plan, streaming=replace(plan.streaming, disk_reads=Calls(8192, 2), disk_writes=Calls(4096, 3)))


def everything_after(plan: Plan, disk: str) -> tuple[dict[str, torch.Tensor], int, int]:
    run = Run(NARROW, FLOAT, plan, disk, None)
    for batch in range(STEPS):
        run.backward(batch)
        run.optimizer.step()
        run.optimizer.zero_grad()
    seen = run.everything()
    report = forebay.report(run.model)
    lines = "".join(str(line) for line in closing_table(report).renderables)
    assert "written to disk: " in lines and "TB in 1,000 steps" in lines
    usage = report.usage(Tier.DISK)
    peak = 0 if usage is None else usage.peak
    run.close()
    return seen, report.disk_written, peak


def test_two_folders_give_the_same_bits_as_one(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).mkdir()
    plan = plan_with_calls_in_flight()
    one, written, peak = everything_after(plan, f"{tmp_path}/a:1MiB")
    two, written_to_both, peak_of_both = everything_after(plan, f"{tmp_path}/b:{plan.disk - 4096},{tmp_path}/c:4096")
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, two[name]), name
    assert peak == peak_of_both == plan.disk
    assert written == written_to_both
    # Parameters and states go to disk at the start and once a step at least, where they live there.
    model = find_blocks(NARROW.model(FLOAT)).model
    on_disk = sum(model.block(p.block).nbytes for p in plan.placements if p.parameters is Tier.DISK)
    on_disk += sum(2 * model.block(p.block).nbytes for p in plan.placements if p.states is Tier.DISK)
    assert written >= STEPS * on_disk
    assert not any(path for folder in "abc" for path in (tmp_path / folder).iterdir())


def test_folders_that_are_too_small_together_are_refused(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    plan = replace(plan_with_calls_in_flight(), device=AMPLE)
    model = NARROW.model(FLOAT)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    with pytest.raises(DoesNotFit, match="disk: the plan needs"):
        forebay.prepare(
            model,
            torch.optim.AdamW(model.parameters()),
            plan=plan,
            device_memory=AMPLE,
            disk=f"{tmp_path}/a:{plan.disk // 2},{tmp_path}/b:4096",
        )
    # Whole pages of each folder count: two halves of a page are none.
    with pytest.raises(DiskFull, match="its folders have room for"):
        forebay.prepare(
            model,
            torch.optim.AdamW(model.parameters()),
            plan=plan,
            device_memory=AMPLE,
            disk=f"{tmp_path}/a:{plan.disk - 2048},{tmp_path}/b:2048",
        )
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    assert MiB > plan.disk  # else the sizes above say nothing
