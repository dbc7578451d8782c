"""``forebay compare --measure``: policies are run here, one after the other, and held against plain PyTorch."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner, Result

pytest.importorskip("transformers")

import forebay.planners
from forebay.cli.compare import STEPS, WARM_STEPS
from forebay.cli.main import app
from forebay.planners import STATES
from forebay.units import MiB

SOME = ("l2l", "zero-infinity")


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two policies stand for all."""
    monkeypatch.setattr(forebay.planners, "STATES", MappingProxyType({name: STATES[name] for name in SOME}))


def invoke(model: str, policies: str, *arguments: str) -> Result:
    return CliRunner().invoke(
        app, ["compare", model, "--batch", "2", "--seq", "32", "--policies", policies, "--measure", *arguments]
    )


def test_updates_in_turns_are_timed_in_whole_rounds() -> None:
    done = invoke("tiny", "angel-ptm-lock-free", "--budgets", "1MiB", "--json")
    assert done.exit_code == 0, done.output
    (row,) = json.loads(done.stdout)
    found = row["measured"]
    # Rounds are powers of two from 2 on: three steps would be none, or one and a half.
    assert found["reason"] is None and found["steps"] in (4, 8, 16)
    assert found["moved"]["h2d"] == row["moved"]["h2d"]  # the mean of whole rounds, as foretold


@pytest.mark.usefixtures("few")
def test_measured_beside_predicted(tmp_path: Path) -> None:
    done = invoke("tiny", "states", "--budgets", "1MiB", "--disk", f"{tmp_path}:64MiB", "--json")
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)
    assert [row["policy"] for row in rows] == ["auto", *SOME] and all(row["feasible"] for row in rows)
    for row in rows:
        found = row["measured"]
        assert found["reason"] is None and found["steps"] == STEPS and len(found["losses"]) == WARM_STEPS + STEPS
        assert found["losses_as_plain"] is True
        assert found["step_seconds"] > 0 and 0 < found["peaks"]["device"] <= row["budget"] == MiB
        assert found["peaks"]["host"] == row["peaks"]["host"]
    # Whatever it is that l2l moves in a step: it was predicted to the byte.
    l2l = rows[1]
    assert l2l["measured"]["moved"] == l2l["moved"] and l2l["moved"]["h2d"] > 0
    assert list(tmp_path.iterdir()) == []


class Moody(nn.Module):
    """Cannot be run where it has values, unlike where it has none."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        if type(x) is torch.Tensor and x.device.type == "cpu":
            raise RuntimeError("no values, please\nand more")
        return x.sum()


def moody() -> tuple[nn.Module, torch.Tensor]:
    return Moody(), torch.zeros(2, 64)


def calm() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)]), torch.ones(2, 64)


def test_a_run_that_fails_has_a_reason_and_the_rest_goes_on() -> None:
    done = invoke(f"{__name__}:moody", ",".join(SOME), "--budgets", "80KiB")
    assert done.exit_code == 1 and "Traceback" not in done.output
    assert "l2l did not run: RuntimeError: no values, please" in " ".join(done.stdout.split())
    assert "plain PyTorch was not run: RuntimeError: no values, please" in " ".join(done.stdout.split())
    assert "running zero-infinity" in done.stderr and max(map(len, done.stdout.splitlines())) <= 80


@pytest.mark.parametrize("optimizer", ["adamw", "rmsprop"])
def test_tables_say_whose_losses_are_those_of_plain_pytorch(optimizer: str) -> None:
    """In bfloat16 plain PyTorch too updates an fp32 copy of what it computes with."""
    done = invoke("tiny", SOME[0], "--budgets", "1MiB", "--dtype", "bfloat16", "--optimizer", optimizer)
    assert done.exit_code == 0, done.output
    said = " ".join(done.stdout.split())
    assert f"{WARM_STEPS + STEPS} losses equal to plain PyTorch's, bit for bit: " in said
    assert "did not run" not in said and "not plain" not in said and "error" in said


def test_a_function_of_ones_own_is_run_with_its_own_values() -> None:
    done = invoke(f"{__name__}:calm", f"auto,{SOME[1]}", "--budgets", "80KiB", "--json")
    assert done.exit_code == 0, done.output
    losses = {tuple(row["measured"]["losses"]) for row in json.loads(done.stdout)}
    assert len(losses) == 1 and len(set(*losses)) == WARM_STEPS + STEPS


class Restless(nn.Module):
    """Draws from Python's and NumPy's generators while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x) * random.random() + np.random.rand()
        return x.sum()


def restless() -> tuple[nn.Module, torch.Tensor]:
    return Restless(), torch.ones(2, 64)


def test_runs_draw_the_same_numbers_of_python_and_numpy() -> None:
    done = invoke(f"{__name__}:restless", f"auto,{SOME[1]}", "--budgets", "80KiB", "--json")
    assert done.exit_code == 0, done.output
    assert [row["measured"]["losses_as_plain"] for row in json.loads(done.stdout)] == [True, True]


def test_another_machine_is_misuse() -> None:
    done = invoke("tiny", "states", "--machine", "rtx-4090")
    assert done.exit_code == 2 and done.stdout == "" and done.stderr.startswith("forebay: --measure")
