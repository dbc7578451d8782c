"""``--loss`` of the command line: what is planned, what is said, what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

pytest.importorskip("transformers")

from forebay.cli.beside import made_beside
from forebay.cli.main import app
from forebay.plans import Plan

LLAMA = {
    "model_type": "llama",
    "vocab_size": 16411,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
"""Of 256 tokens, 16.8 MB of logits: three times of that are there at a time, beside 4.2 MB of parameters."""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA))
    return file


def plan(config: Path, *more: object) -> dict[str, Any]:
    words = [
        "plan",
        str(config),
        "--seq",
        "256",
        "--device-memory",
        "24MiB",
        "--policy",
        "stream",
        "--json",
        *map(str, more),
    ]
    done = CliRunner().invoke(app, words)
    assert done.exit_code in (0, 1), done.output
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["fits"] == (done.exit_code == 0)
    return found


def test_auto_is_in_pieces_here_where_all_logits_do_not_fit(config: Path, tmp_path: Path) -> None:
    assert not plan(config, "--loss", "plain")["fits"]
    out = tmp_path / "plan.json"
    found = plan(config, "--out", out)
    assert found["fits"]
    assert found["exact"]
    assert sum("no tokens" in reason for reason in found["reasons"]) == 1
    assert any("with all logits at once nothing fits" in reason for reason in found["reasons"])
    assert Plan.from_json(out.read_text()).loss_piece == 24 * 2**20 // 64


def test_another_process_gives_the_same_answer(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = "--host-memory", "1GiB"  # what is free is another number each time
    here, asked = plan(config, *limit), list[int]()

    def beside(make: Callable[[Any], Any], jobs: Sequence[Any]) -> list[Any]:
        asked.append(len(jobs))
        return made_beside(make, jobs, most=2, patience=0.0)

    monkeypatch.setattr("forebay.cli.plan.made_beside", beside)
    there = plan(config, *limit)
    assert asked == [2]
    assert there == here | {"solve_seconds": there["solve_seconds"]}


def test_on_another_machine_pieces_are_an_alternative_until_asked_for(config: Path) -> None:
    there = ("--machine", "l4", "--device-memory", "216MiB")  # 24, beside a card's workspaces and pages
    auto = plan(config, *there)
    assert not auto["fits"]
    assert auto["alternatives"][0]["change"].startswith("--loss chunked: ")
    chunked = plan(config, *there, "--loss", "chunked")
    assert chunked["fits"]
    assert not chunked["exact"]


def test_a_loss_that_there_is_not_is_misuse(config: Path) -> None:
    done = CliRunner().invoke(app, ["plan", str(config), "--loss", "none"])
    assert done.exit_code == 2
    assert "--loss" in done.stderr
