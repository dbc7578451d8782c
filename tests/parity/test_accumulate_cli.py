"""Micro-batches on the command line: ``forebay plan`` says what they take together, ``forebay train`` does so."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

pytest.importorskip("transformers")

from forebay.cli.main import app
from forebay.planners import Problem, make_plan
from forebay.plans import Plan
from forebay.reporting.run import RunReport

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "accumulation.md").read_text(encoding="utf-8")
COMMANDS = [
    line.removeprefix("$ ")
    for body in re.findall(r"^```console\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    for line in body.splitlines()
]
TEXT = "".join(f"{i} green bottles hanging on the wall, and if one should fall\n" for i in range(200))
STREAMED = ("tiny", "--machine", "rtx-4090", "--batch", 2, "--seq", 32, "--policy", "stream")


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def planned(*arguments: object) -> dict[str, Any]:
    done = invoke("plan", *arguments, "--json")
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_plan_says_what_crosses_together_and_by_turns() -> None:
    one, found = planned(*STREAMED), planned(*STREAMED, "--accumulate", 8)
    assert one["accumulation"] is None
    said = found["accumulation"]
    assert said["micro_batches"] == 8
    assert found["step_seconds"] == one["step_seconds"]
    assert said["loop"]["moved"]["d2h"] == 8 * said["moved"]["d2h"] > 0
    assert said["loop"]["moved"]["h2d"] > 5 * said["moved"]["h2d"] > 0
    assert one["step_seconds"] < said["step_seconds"] < said["loop"]["step_seconds"]
    assert found["peaks"]["device"] < said["peaks"]["device"] <= found["budgets"]["device"]


def test_the_table_has_both() -> None:
    done = invoke("plan", *STREAMED, "--accumulate", 8)
    assert done.exit_code == 0, done.output
    assert "A step of 8 micro-batches" in done.stdout
    for name in ("together", "one by one"):
        assert re.search(rf"^ *{name} +[\d.]+ .?s ", done.stdout, re.M), done.stdout
    assert "A step of" not in invoke("plan", *STREAMED).stdout


def test_where_nothing_streams_it_is_the_loop() -> None:
    found = planned("tiny", "--machine", "rtx-4090", "--seq", 32, "--policy", "resident", "--accumulate", 4)
    said = found["accumulation"]
    assert said["step_seconds"] == said["loop"]["step_seconds"] and said["moved"] == said["loop"]["moved"]
    assert any("nothing streams" in reason for reason in found["reasons"])


@pytest.mark.parametrize(
    ("value", "said"), [("0", "--accumulate: "), ("-3", "--accumulate: "), ("many", "--accumulate")]
)
def test_a_number_that_there_is_not_is_misuse(value: str, said: str) -> None:
    done = invoke("plan", *STREAMED, "--accumulate", value)
    assert (done.exit_code, done.stdout) == (2, "")
    assert said in done.stderr and "Traceback" not in done.stderr


def test_more_than_there_is_room_for_do_not_fit() -> None:
    limit = "194MiB"  # 2, beside what is counted for a card's workspaces and pages
    done = invoke("plan", *STREAMED, "--device-memory", limit, "--accumulate", 500, "--json")
    assert done.exit_code == 1, done.output
    found = json.loads(done.stdout)
    assert found["accumulation"] is None
    assert "no plan leaves room for 500 micro-batches at a time; use fewer" in found["reasons"][0]
    assert planned(*STREAMED, "--device-memory", limit)["fits"]


def test_the_page_has_a_command() -> None:
    assert [shlex.split(command)[:3] for command in COMMANDS] == [["forebay", "plan", "llama-3.2-1b"]]


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_the_command_says_what_the_page_says(command: str) -> None:
    """Some 10 s. Rates of a catalogue are the same everywhere."""
    done = invoke(*shlex.split(command)[1:])
    assert done.exit_code == 0, done.output
    for name in ("together", "one by one"):
        shown, said = (
            next(row for row in text.splitlines() if row.strip().startswith(f"{name}  "))
            for text in (done.stdout, PAGE)
        )
        assert shown.split() == said.split()


# Training


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def train(text: Path, run: Path, *more: object) -> tuple[dict[str, Any], RunReport, str]:
    """A short run of steps of 3 micro-batches: what --json prints, the report in its folder, and what it said."""
    settings = ["--model", "tiny", "--data", text, "--seq", 32, "--batch", 2, "--device", "cpu", "--steps", 3]
    done = invoke("train", *settings, "--accumulate", 3, "--run", run, *more, "--json")
    assert done.exit_code == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found, RunReport.from_json((run / "report.json").read_text()), done.stderr


def test_training_takes_micro_batches_together_and_gives_the_same_losses(tmp_path: Path, text: Path) -> None:
    loop, alone, _ = train(text, tmp_path / "resident", "--device-memory", "64MiB", "--policy", "resident")
    assert (alone.micro_batches, alone.together) == (3, 1)
    found, report, _ = train(text, tmp_path / "streamed", "--device-memory", "16MiB", "--policy", "stream")
    assert (report.micro_batches, report.together) == (3, 3)
    assert found["loss"] == loop["loss"]
    assert report.predicted_step_seconds == found["predicted"]["step_seconds"] == report.plan.seconds_of_step(3, 3)
    assert found["predicted"]["step_seconds"] > 0


def test_without_room_for_them_training_takes_one_after_the_other(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under the plan that the search for room began with."""
    loop, _, _ = train(text, tmp_path / "resident", "--device-memory", "64MiB", "--policy", "resident")
    made: list[Problem] = []

    def counted(problem: Problem, *asked: Any) -> Plan:
        made.append(problem)
        return make_plan(problem, *asked)

    monkeypatch.setattr("forebay.asking.make_plan", counted)
    found, report, said = train(text, tmp_path / "tight", "--device-memory", "860KiB", "--policy", "stream-recompute")
    assert (report.micro_batches, report.together) == (3, 1)
    assert found["loss"] == loop["loss"]
    assert "the micro-batches of a step go one by one: no plan leaves room for 3" in " ".join(said.split())
    # With all logits at once and with the loss in pieces: what there can be no room for is not sought, and the leanest
    # plan, which is asked for with nothing first, says what would be enough.
    asked = [problem.budget.device for problem in made]
    assert len(asked) == 6 and asked[::3] == [860 * 1024] * 2 and asked[1::3] == [1, 1]
    assert max(asked[2::3]) < 860 * 1024
