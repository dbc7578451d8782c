"""What ``forebay train`` predicts before a run, and sets beside what it measured after it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

pytest.importorskip("transformers")

import torch
from torch import nn

import forebay
from forebay.budgets import Budget
from forebay.cli.main import app
from forebay.profiler.probe import nominal

MiB = 2**20


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{i} green bottles hanging on the wall\n" for i in range(200)))
    return path


def train(*arguments: object) -> Result:
    settings = ("--model", "tiny", "--seq", 32, "--steps", 1, "--device", "cpu", "--device-memory", "16MiB")
    done = CliRunner().invoke(app, ["train", *map(str, (*settings, *arguments))])
    assert done.exit_code == 0, done.stderr
    return done


def figures(*arguments: object) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(train(*arguments, "--json").stdout)
    return found


def test_the_plan_opens_a_run_with_its_reasons_and_its_step(text: Path) -> None:
    done = train("--data", text)
    before, _, after = done.stderr.partition("step 1/1")
    opening = re.search(r"^plan by auto: \S+ \S+ on the device; (\S+ \S+) a step$", before, re.MULTILINE)
    assert opening is not None, before
    assert "  - parameters, gradients and states fit on the device\n" in before
    assert "  - the step time is a rough guess" in before
    assert after
    assert re.search(rf"^ *step +{opening.group(1)} +\S+ \S+ +[+-]\S+ % *$", done.stdout, re.MULTILINE), done.stdout


def test_the_prediction_is_scaled_to_the_micro_batches_of_a_step(text: Path) -> None:
    one, four = (figures("--data", text, "--accumulate", n) for n in (1, 4))
    ratio = four["predicted"]["step_seconds"] / one["predicted"]["step_seconds"]
    assert 2 < ratio < 4  # four passes, one update
    # One backward a step: until gradients that stay are made their room is that of activations.
    assert one["predicted"]["peaks"].pop("device") < four["predicted"]["peaks"].pop("device")
    assert four["predicted"]["peaks"] == one["predicted"]["peaks"]


def model_and_batch() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))), torch.randn(4, 64)


@pytest.mark.parametrize("policy", ["auto", "stream", "resident"])
def test_prepare_and_plan_promise_the_same_and_say_so(policy: str) -> None:
    model, batch = model_and_batch()
    budget = Budget(MiB, 64 * MiB)
    planned = forebay.plan(forebay.profile(model, batch), nominal("cpu"), budget, policy)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = forebay.prepare(
        model, optimizer, batch, device_memory=MiB, host_memory=64 * MiB, policy=policy, device="cpu"
    )
    for _ in range(2):
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    report = forebay.report(model)
    assert report.plan == planned
    assert planned.notes[0].startswith("the step time is a rough guess")
    assert report.predicted_step_seconds == planned.step_seconds
    assert planned.step_seconds is not None and planned.step_seconds > 0
    assert report.step_ratio is not None and report.step_ratio > 0
    for tier, ratio in report.peak_ratios().items():
        assert ratio is None or ratio <= 1, tier
    forebay.close(model)


def test_without_a_batch_no_step_is_predicted() -> None:
    model, _ = model_and_batch()
    model, _ = forebay.prepare(model, torch.optim.AdamW(model.parameters()), device_memory="1MiB", device="cpu")
    report = forebay.report(model)
    assert report.predicted_step_seconds is None
    assert report.step_ratio is None
    assert report.plan.notes == ()
    forebay.close(model)
