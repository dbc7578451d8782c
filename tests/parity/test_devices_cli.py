"""``forebay plan --devices`` and ``forebay compare --devices``: exit codes, JSON, tables, and what cannot be used."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

pytest.importorskip("transformers")

from forebay.cli.main import app
from forebay.planners.parallel import ON_DEVICES
from forebay.units import MiB
from tests.parity.test_plan_cli import MACHINE

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "devices.md").read_text(encoding="utf-8")
COMMANDS = [
    shlex.split(line.removeprefix("$ "))[1:]
    for body in re.findall(r"^```console\n(.*?)^```$", PAGE, re.M | re.S)
    for line in body.splitlines()
]
KEYS = {
    "policy",
    "budget",
    "feasible",
    "step_seconds",
    "idle_share",
    "peaks",
    "devices",
    "moved",
    "solve_seconds",
    "reasons",
    "reason",
}


@pytest.fixture
def paper(tmp_path: Path) -> Path:
    path = tmp_path / "paper.json"
    path.write_text(MACHINE.to_json())
    return path


def invoke(paper: Path, verb: str, *arguments: str) -> Result:
    command = [verb, "tiny", "--machine", str(paper), "--batch", "2", "--seq", "32", *arguments]
    return CliRunner().invoke(app, command)


def test_policies_for_several_devices_side_by_side(paper: Path) -> None:
    done = invoke(paper, "compare", "--devices", "2:10GB", "--budgets", "4MiB,1KiB", "--accumulate", "2", "--json")
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)
    assert [(row["budget"], row["policy"]) for row in rows] == [(b, p) for b in (4 * MiB, 1024) for p in ON_DEVICES]
    assert all(set(row) == KEYS for row in rows)
    some, none = rows[: len(ON_DEVICES)], rows[len(ON_DEVICES) :]
    assert any(row["feasible"] for row in some) and not any(row["feasible"] for row in none)
    for row in some:
        if row["feasible"]:
            assert row["peaks"]["device"] == max(d["peak"] for d in row["devices"]) <= 4 * MiB
            assert len(row["devices"]) == 2 and row["step_seconds"] > 0
    assert all("device memory" in row["reason"] for row in none)


def test_the_tables_say_that_they_are_simulated(paper: Path) -> None:
    done = invoke(paper, "compare", "--devices", "1+1", "--policies", "harmony,mobius,mpress")
    assert done.exit_code == 0, done.output
    assert all(words in done.stdout for words in ("1+1 devices", "harmony", "step and peaks", "are simulated"))
    assert "mpress: policy mpress swaps to other devices" in done.stdout


def test_a_plan_is_that_of_the_fastest_policy_or_of_the_one_that_is_named(paper: Path) -> None:
    found = {}
    for policy in ("auto", "dapple", "harmony"):
        done = invoke(paper, "plan", "--devices", "2:10GB", "--policy", policy, "--json")
        assert done.exit_code == 0, done.output
        found[policy] = json.loads(done.stdout)
    assert found["dapple"]["policy"] == "dapple" and found["auto"]["policy"] in ON_DEVICES
    assert all(found["auto"]["step_seconds"] <= one["step_seconds"] for one in found.values())
    assert found["auto"]["alternatives"] and not found["harmony"]["alternatives"]
    auto = found["auto"]
    assert auto["tokens_per_second"] == pytest.approx(2 * 64 / auto["step_seconds"]) and auto["micro_batches"] == 2
    done = invoke(paper, "plan", "--devices", "2", "--policy", "dapple")
    assert done.exit_code == 0 and "dapple: a step takes" in done.stdout and "no links between devices" in done.stdout


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--devices", "1", "--policy", "dapple"), "there is one device"),
        (("--devices", "60", "--policy", "mobius"), "60 devices, and the model has"),
        (("--devices", "2", "--policy", "mpress"), "--devices 2:25GB"),
        (("--devices", "2", "--policy", "dapple", "--device-memory", "1KiB"), "device memory"),
        (("--devices", "2", "--policy", "harmony", "--host-memory", "1KiB"), "host memory"),
    ],
)
def test_what_cannot_be_served_is_no_with_what_would_do(paper: Path, arguments: tuple[str, ...], words: str) -> None:
    done = invoke(paper, "plan", *arguments, "--json")
    assert done.exit_code == 1, done.output
    found = json.loads(done.stdout)
    assert not found["fits"] and words in found["reasons"][0] and "What would fit" in found["reasons"][0]


def test_a_refusal_without_json(paper: Path) -> None:
    done = invoke(paper, "plan", "--devices", "2", "--policy", "mpress")
    assert done.exit_code == 1 and "Does not fit: policy mpress swaps to other devices" in done.stdout


def test_the_commands_of_the_page() -> None:
    assert [command[0] for command in COMMANDS] == ["compare", "plan"]
    for command in COMMANDS:
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0 and "are simulated" in done.output, done.output
        assert all(policy in done.output for policy in (ON_DEVICES if command[0] == "compare" else ("mobius",)))


@pytest.mark.parametrize(
    ("verb", "arguments", "words"),
    [
        ("plan", ("--devices", "some"), "--devices: devices are written N or N+N"),
        ("plan", ("--devices", "2", "--policy", "rotor"), "--policy: there is no policy 'rotor' for several devices"),
        (
            "plan",
            ("--devices", "2", "--policy", "mobus"),
            "no policy 'mobus' for several devices; there are auto, dapple",
        ),
        ("plan", ("--devices", "2", "--policy", "harmony,mobius"), "--policy: there is no policy 'harmony,mobius'"),
        ("plan", ("--devices", "2", "--policy", "all"), "--policy: there is no policy 'all'"),
        ("plan", ("--devices", "2", "--disk", "/tmp"), "--disk is for one device"),
        ("plan", ("--devices", "2", "--compress", "8"), "--compress is for one device"),
        ("plan", ("--devices", "2", "--out", "plan.json"), "--out is for one device"),
        ("compare", ("--devices", "2", "--policies", "rotor"), "--policies: there is no policy 'rotor'"),
        ("compare", ("--devices", "2", "--policies", "mobus"), "for several devices; there are all, dapple"),
        ("compare", ("--devices", "2", "--measure"), "--measure is for one device"),
        ("compare", ("--devices", "2", "--budgets", "0.2:0.9"), "--budgets: of several devices they are sizes"),
        ("plan", ("--policy", "dapple"), "--policy: dapple is for several devices"),
    ],
)
def test_what_cannot_be_used_is_misuse(paper: Path, verb: str, arguments: tuple[str, ...], words: str) -> None:
    done = invoke(paper, verb, *arguments)
    assert done.exit_code == 2 and done.stdout == "" and words in done.stderr, done.output
    assert "Traceback" not in done.output
