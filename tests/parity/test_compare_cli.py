"""``forebay compare`` from the command line: exit codes, JSON, tables, and one line for whatever cannot be used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

pytest.importorskip("transformers")

from forebay.cli.main import app
from forebay.planners import STATES
from forebay.units import MiB
from tests.null.states.test_compare_states import KEYS
from tests.parity.test_plan_cli import MACHINE


@pytest.fixture
def paper(tmp_path: Path) -> Path:
    path = tmp_path / "paper.json"
    path.write_text(MACHINE.to_json())
    return path


def invoke(paper: Path, *arguments: str) -> Result:
    command = ["compare", "tiny", "--machine", str(paper), "--batch", "2", "--seq", "32", *arguments]
    return CliRunner().invoke(app, command)


def test_policies_for_states_side_by_side(paper: Path) -> None:
    done = invoke(paper, "--policies", "states", "--budgets", "3MiB,1KiB", "--json")
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)
    policies = ("auto", *STATES)
    assert [(row["budget"], row["policy"]) for row in rows] == [(b, p) for b in (3 * MiB, 1024) for p in policies]
    assert all(set(row) == KEYS for row in rows)
    some, none = rows[: len(policies)], rows[len(policies) :]
    assert rows[0]["feasible"] and sum(row["feasible"] for row in some) > 1
    for row in some:
        if row["feasible"]:
            assert row["exact"] and row["step_seconds"] >= rows[0]["step_seconds"] / 1.01
            assert row["peaks"]["device"] <= 3 * MiB and row["peaks"]["disk"] == 0
    assert not any(row["feasible"] for row in none)
    assert all("What would fit" in row["reason"] for row in none)
    # The others are for a mixture of experts, or for steps of several micro-batches.
    others = {row["policy"] for row in none if "device memory" not in row["reason"]}
    assert others == {"moesys", "harmony", "mobius"}


def test_tables_without_json(paper: Path) -> None:
    done = invoke(paper, "--policies", "states", "--budgets", "64MiB")
    assert done.exit_code == 0, done.output
    assert "tiny" in done.stdout and "Bytes over each link in a step" in done.stdout
    assert all(policy in done.stdout for policy in ("auto", *STATES))


@pytest.mark.parametrize(
    ("more", "said"), [((), True), (("--accumulate", "2"), False), (("--update", "backward"), False)]
)
def test_the_foot_says_that_plans_are_for_one_backward_a_step(paper: Path, more: tuple[str, ...], said: bool) -> None:
    done = invoke(paper, "--policies", "keep", "--budgets", "64MiB", *more)
    assert done.exit_code == 0, done.output
    assert ("a loop of several backwards a step" in " ".join(done.stdout.split())) is said


def test_where_nothing_fits_the_answer_is_no(paper: Path) -> None:
    done = invoke(paper, "--policies", "states", "--budgets", "1KiB")
    assert done.exit_code == 1 and "Does not fit" in done.stdout and "Traceback" not in done.output


def test_what_cannot_be_used_is_misuse(paper: Path) -> None:
    done = invoke(paper, "--policies", "states", "--budgets", "lots")
    assert done.exit_code == 2 and done.stdout == "" and done.stderr.startswith("forebay: --budgets")


def test_plan_says_no_for_a_policy_that_cannot_serve(paper: Path) -> None:
    arguments = ["--machine", str(paper), "--device-memory", "600KiB", "--policy", "zero-offload", "--json"]
    done = CliRunner().invoke(app, ["plan", "tiny", "--batch", "1", "--seq", "16", *arguments])
    assert done.exit_code == 1, done.output
    found = json.loads(done.stdout)
    assert not found["fits"] and found["policy"] == "zero-offload"
    assert any("keeps all parameters on the device" in reason for reason in found["reasons"])
