"""Plans with updates ahead of their step from a planner to a run: through ``prepare``, JSON and the command line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from typer.testing import CliRunner

import forebay
from forebay.budgets import Budget
from forebay.checking import check
from forebay.cli.main import app
from forebay.memory import Tier
from forebay.plans import Plan, Update
from forebay.profiler.capture import capture
from forebay.units import MiB
from tests.null.planning import machine
from tests.parity.compare import assert_same_training
from tests.parity.models import CASES
from tests.parity.recomputing import AMPLE
from tests.parity.speculating import counters
from tests.parity.test_random_plans import WIDE

STEPS = 3
# Room for gradients, half of the parameters and what passes to disk: all states (6 MiB) are there.
HOST, DISK = 11 * MiB, 32 * MiB


def prepared(plan: Plan, folder: Path) -> torch.nn.Module:
    """A model that has trained ``STEPS`` steps under ``plan`` with the numbers of plain PyTorch, nothing clipped."""
    return assert_same_training(
        WIDE,
        torch.float32,
        clip=None,
        steps=STEPS,
        plan=plan,
        device_memory=2 * MiB,
        host_memory=HOST,
        disk=f"{folder}:{DISK}B",
        device="cpu",
    )


def test_auto_makes_a_plan_that_speculates_and_it_trains(tmp_path: Path) -> None:
    """On ``cpu``, where only what is on disk is worth it; the plan goes through JSON."""
    model = WIDE.model(torch.float32)
    budgets: dict[str, Any] = {
        "device_memory": 2 * MiB,
        "host_memory": HOST,
        "disk": f"{tmp_path}:{DISK}B",
        "device": "cpu",
    }
    made, _ = forebay.prepare(model, torch.optim.AdamW(model.parameters()), WIDE.inputs(0, torch.float32), **budgets)
    plan = forebay.report(made).plan
    forebay.close(made)
    homes = {p.block: p for p in plan.placements}
    ahead = plan.updated(Update.AHEAD)
    assert ahead and all(homes[name].states is Tier.DISK for name in ahead)
    assert any("second copy" in reason for reason in plan.reasons)

    model = prepared(Plan.from_json(plan.to_json()), tmp_path)
    _, committed, redone = counters(model)
    # Two micro-batches: the first step does not know that yet.
    assert (committed, redone) == ((STEPS - 1) * len(ahead), len(ahead))
    peaks = forebay.report(model).timeline.peaks
    assert (peaks[Tier.HOST], peaks[Tier.DISK]) == (plan.host, plan.disk)
    forebay.close(model)


def test_a_plan_for_a_gpu_speculates_in_memory_and_runs_here() -> None:
    """For one whose host is slow to update; on ``cpu`` the same plan has the same bytes and plain PyTorch's numbers."""
    case, dtype = CASES["llama"], torch.bfloat16
    trace = capture(case.model(dtype), case.inputs(0, dtype), "adamw", "cuda").trace
    trace = replace(trace, workspace_nbytes=0)  # what a card has beside tensors, and nothing here
    on = machine(compute=1e9, h2d=1e9, d2h=1e9, update=3e8)
    plan = forebay.plan(trace, on, Budget(AMPLE, AMPLE), "stream")
    check(trace, on, plan)
    assert plan.updated(Update.AHEAD) and not plan.disk
    model = assert_same_training(
        case, dtype, clip=None, steps=STEPS, plan=plan, device_memory=AMPLE, host_memory=AMPLE, device="cpu"
    )
    assert counters(model)[1] == (STEPS - 1) * len(plan.updated(Update.AHEAD))
    peaks = forebay.report(model).timeline.peaks
    assert peaks[Tier.HOST] == plan.host
    forebay.close(model)


def test_train_runs_it_from_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    model = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 6, "num_attention_heads": 4}
    (tmp_path / "model.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 256, **model}))
    command = ["train", "--model", tmp_path / "model.json", "--data", tmp_path / "text.txt", "--seq", 16, "--steps", 3]
    command += [
        "--device",
        "cpu",
        "--device-memory",
        "8MiB",
        "--host-memory",
        "14MiB",
        "--clip-norm",
        "1000",
        "--loss",
        "plain",
    ]
    command += ["--disk", f"{tmp_path / 'disk'}:48MiB", "--run", tmp_path / "run", "--json"]
    done = CliRunner().invoke(app, [str(word) for word in command])
    assert done.exit_code == 0, done.stderr
    plan = Plan.from_json((tmp_path / "run" / "plan.json").read_text())
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert plan.updated(Update.AHEAD)
    counted = report["timeline"]["counters"]
    assert counted["committed"] == 3 * len(plan.updated(Update.AHEAD)) and counted["redone"] == 0
    peaks = json.loads(done.stdout)["measured"]["peaks"]
    assert (peaks["host"], peaks["disk"]) == (plan.host, plan.disk)
